"""Loads the TorchScript export beside this file and compares its answer with golden.npz:  python check.py [FILE]"""
import hashlib
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

TOLERANCE = 1e-4  # relative to the largest value: other machines and versions round differently
here = Path(__file__).parent
golden = {name: torch.from_numpy(a) for name, a in np.load(here / "golden.npz").items()}
warnings.simplefilter("ignore", DeprecationWarning)
body = torch.jit.load(sys.argv[1] if len(sys.argv) > 1 else here / "{{ file }}")
state = body.state_dict()
{% include "hashes.py" %}
with torch.no_grad():
    out = body(golden["input"])
out = out if isinstance(out, dict) else {"logits": out}
wrong = False
for name, got in out.items():
    want = golden[name]
    same = got.shape == want.shape
    off = float((got - want).abs().max() / want.abs().max().clamp_min(1)) if same else float("inf")
    wrong |= not off <= TOLERANCE
    print(f"{name}: {tuple(got.shape)}, largest relative difference {off:.1e}")
trained = sum(p.requires_grad for p in body.parameters())
print(f"{trained} of {len(list(body.parameters()))} parameters can be trained")
sys.exit("WRONG" if wrong or not trained else print("ok"))
