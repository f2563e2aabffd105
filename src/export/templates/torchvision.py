"""Loads the state dict beside this file into torchvision and compares its answer with golden.npz:  python check.py [FILE]"""
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
{% if format == "safetensors" %}
from safetensors.torch import load_file
{% endif %}
from torchvision import models
from torchvision.models._utils import IntermediateLayerGetter

TOLERANCE = 1e-4  # relative to the largest value: other machines and versions round differently
LAYERS = {{ layers | dict }}  # what IntermediateLayerGetter returns, and what the maps are called
{% if not with_classifier %}
ABSENT = {{ absent | tuple }}  # what the backbone's file leaves out of the whole network
{% endif %}
here = Path(__file__).parent
golden = {name: torch.from_numpy(a) for name, a in np.load(here / "golden.npz").items()}
file = sys.argv[1] if len(sys.argv) > 1 else here / "{{ file }}"
{% if format == "safetensors" %}
state = load_file(file)
{% else %}
state = torch.load(file, weights_only=True)
{% endif %}
{% include "hashes.py" %}
model = models.{{ arch }}(weights=None, num_classes={{ classes or 1 }})
out = {}
{% if with_classifier %}
model.load_state_dict(state, strict=True)
{% else %}
missing, unexpected = model.load_state_dict(state, strict=False)
stray = [name for name in missing if not name.startswith(ABSENT)] + unexpected
if stray:
    sys.exit(f"WRONG: missing or unexpected {stray}")
{% endif %}
with torch.no_grad():
{% if with_classifier %}
    out["logits"] = model.eval()(golden["input"])
{% endif %}
    body = IntermediateLayerGetter(model, LAYERS).eval()
{% if not with_classifier %}
    body.load_state_dict(state, strict=True)
{% endif %}
{% if torchvision.maps == "features" %}
    x = golden["input"]
    for i, child in enumerate(body["features"]):  # channels last inside, a map after every second child
        x = child(x)
        if i % 2:
            out[str(i // 2)] = x.permute(0, 3, 1, 2)
{% else %}
    out.update(body(golden["input"]))
{% endif %}
wrong = set(out) != set(golden) - {"input"}
for name, got in out.items():
    want = golden[name]
    same = got.shape == want.shape
    off = float((got - want).abs().max() / want.abs().max().clamp_min(1)) if same else float("inf")
    wrong |= not off <= TOLERANCE
    print(f"{name}: {tuple(got.shape)}, largest relative difference {off:.1e}")
sys.exit("WRONG" if wrong else print("ok"))
