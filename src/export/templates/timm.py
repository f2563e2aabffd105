"""Loads the folder of this file into timm and compares its answers with golden.npz:  python check.py [FOLDER]"""
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import timm
import torch
from safetensors.torch import load_file

TOLERANCE = 1e-4  # relative to the largest value: other machines and versions round differently
here = Path(__file__).parent
golden = {name: torch.from_numpy(a) for name, a in np.load(here / "golden.npz").items()}
folder = Path(sys.argv[1] if len(sys.argv) > 1 else here).resolve()
state = load_file(folder / "{{ file }}")
{% include "hashes.py" %}
{% if timm.swin %}
size = {"img_size": tuple(golden["input"].shape[-2:])}  # timm lays its windows out for one size
{% else %}
size = {}
{% endif %}
model = timm.create_model(f"local-dir:{folder}", pretrained=True, **size).eval()
model.load_state_dict(state, strict=True)
features = timm.create_model(f"local-dir:{folder}", pretrained=True, features_only=True, out_indices={% if timm.swin %}(0, 1, 2, 3){% else %}(1, 2, 3, 4){% endif %}, **size).eval()
with torch.no_grad():
    maps = features(golden["input"])
{% if timm.swin %}
    maps = [map.permute(0, 3, 1, 2) for map in maps]  # timm's Swin has the channels last
{% endif %}
    out = {str(l): map for l, map in enumerate(maps)}
{% if with_classifier %}
    out["logits"] = model(golden["input"])
{% endif %}
wrong = set(out) != set(golden) - {"input"}
for name, got in out.items():
    want = golden[name]
    same = got.shape == want.shape
    off = float((got - want).abs().max() / want.abs().max().clamp_min(1)) if same else float("inf")
    wrong |= not off <= TOLERANCE
    print(f"{name}: {tuple(got.shape)}, largest relative difference {off:.1e}")
sys.exit("WRONG" if wrong else print("ok"))
