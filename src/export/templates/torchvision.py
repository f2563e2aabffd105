"""Loads the state dict beside this file into torchvision and compares its answer with golden.npz:  python check.py [FILE]"""
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
@IMPORTS@from torchvision import models
from torchvision.models._utils import IntermediateLayerGetter

TOLERANCE = 1e-4  # relative to the largest value: other machines and versions round differently
LAYERS = @LAYERS@  # what IntermediateLayerGetter returns, and what the maps are called
ABSENT = @ABSENT_TUPLE@  # what the backbone's file leaves out of the whole network
here = Path(__file__).parent
golden = {name: torch.from_numpy(a) for name, a in np.load(here / "golden.npz").items()}
state = @READ@
facts = json.loads((here / "export.json").read_text())
hashes = {name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for name, t in state.items()}
changed = sorted(name for name in hashes.keys() | facts["tensors"].keys() if hashes.get(name) != facts["tensors"].get(name))
if changed:
    sys.exit(f"WRONG: other than exported: {changed}")
model = models.@ARCH@(weights=None, num_classes=@CLASSES@)
out = {}
if ABSENT:
    missing, unexpected = model.load_state_dict(state, strict=False)
    stray = [name for name in missing if not name.startswith(ABSENT)] + unexpected
    if stray:
        sys.exit(f"WRONG: missing or unexpected {stray}")
else:
    model.load_state_dict(state, strict=True)
with torch.no_grad():
    if not ABSENT:
        out["logits"] = model.eval()(golden["input"])
    body = IntermediateLayerGetter(model, LAYERS).eval()
    if ABSENT:
        body.load_state_dict(state, strict=True)
    if hasattr(model, "features"):  # Swin: channels last inside, a map after every second child
        x = golden["input"]
        for i, child in enumerate(body["features"]):
            x = child(x)
            if i % 2:
                out[str(i // 2)] = x.permute(0, 3, 1, 2)
    else:
        out.update(body(golden["input"]))
wrong = set(out) != set(golden) - {"input"}
for name, got in out.items():
    want = golden[name]
    same = got.shape == want.shape
    off = float((got - want).abs().max() / want.abs().max().clamp_min(1)) if same else float("inf")
    wrong |= not off <= TOLERANCE
    print(f"{name}: {tuple(got.shape)}, largest relative difference {off:.1e}")
sys.exit("WRONG" if wrong else print("ok"))
