"""Loads the state dict beside this file into MMDetection's backbone and compares its maps with golden.npz:  python check.py [FILE]"""
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
from mmdet.models.backbones import {{ mmdet.class }}

TOLERANCE = 1e-4  # relative to the largest value: other machines and versions round differently
here = Path(__file__).parent
golden = {name: torch.from_numpy(a) for name, a in np.load(here / "golden.npz").items()}
state = torch.load(sys.argv[1] if len(sys.argv) > 1 else here / "{{ file }}")
{% include "hashes.py" %}
{% if mmdet.class == "SwinTransformer" %}
net = SwinTransformer(embed_dims={{ mmdet.embed_dims }}, depths={{ mmdet.depths }}, num_heads={{ mmdet.num_heads }}, window_size={{ mmdet.window_size }})
state = {name.removeprefix("backbone."): t for name, t in state.items()}
missing, unexpected = net.load_state_dict(state, strict=False)
stray = [name for name in missing if not name.startswith("norm")] + unexpected
if stray:
    sys.exit(f"WRONG: missing or unexpected {stray}")
for i in range(4):
    setattr(net, f"norm{i}", torch.nn.Identity())  # the golden maps are those before MMDetection's norms
{% else %}
net = ResNet(depth={{ mmdet.depth }}, out_indices=(0, 1, 2, 3), style="pytorch")
net.load_state_dict(state, strict=True)
{% endif %}
with torch.no_grad():
    net.eval()  # MMDetection's returns nothing
    maps = net(golden["input"])
wrong = len(maps) != 4
for i, got in enumerate(maps):
    want = golden[str(i)]
    same = got.shape == want.shape
    off = float((got - want).abs().max() / want.abs().max().clamp_min(1)) if same else float("inf")
    wrong |= not off <= TOLERANCE
    print(f"{i}: {tuple(got.shape)}, largest relative difference {off:.1e}")
sys.exit("WRONG" if wrong else print("ok"))
