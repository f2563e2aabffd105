"""Runs the ONNX export beside this file in ONNX Runtime and compares its answer with golden.npz:  python check.py [FILE]"""
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

TOLERANCE = 1e-4  # relative to the largest value: other machines and versions round differently
here = Path(__file__).parent
golden = dict(np.load(here / "golden.npz"))
file = str(sys.argv[1] if len(sys.argv) > 1 else here / "{{ file }}")
onnx.checker.check_model(file, full_check=True)
facts = json.loads((here / "export.json").read_text())
held = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(file).graph.initializer}
hashes = {name: hashlib.sha256(held[name].tobytes()).hexdigest() if name in held else None for name in facts["tensors"]}
changed = sorted(name for name, found in hashes.items() if found != facts["tensors"][name])
if changed:
    sys.exit(f"WRONG: other than exported: {changed}")
session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
names = {% if with_classifier %}{"logits": "logits"}{% else %}{f"feature_{l}": str(l) for l in range({{ maps | length }})}{% endif %}  # of the file, of golden.npz
wrong = [output.name for output in session.get_outputs()] != list(names)
for n in {len(golden["input"]), 1}:  # the batch is open: the first image alone gives the same
    for name, got in zip(names, session.run(list(names), {"input": golden["input"][:n]})):
        want = golden[names[name]][:n]
        same = got.shape == want.shape
        off = float(np.abs(got - want).max() / max(np.abs(want).max(), 1)) if same else float("inf")
        wrong |= not off <= TOLERANCE
        print(f"{name}: {got.shape}, largest relative difference {off:.1e}")
sys.exit("WRONG" if wrong else print("ok"))
