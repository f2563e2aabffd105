"""Compares every tensor of the file beside this one with its hash in export.json:  python check.py [FILE]"""
import hashlib
import json
import sys
from pathlib import Path

from safetensors import safe_open

here = Path(__file__).parent
facts = json.loads((here / "export.json").read_text())
with safe_open(sys.argv[1] if len(sys.argv) > 1 else here / "{{ file }}", "numpy") as file:
    found = {name: hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest() for name in file.keys()}
    architecture = file.metadata()["architecture"]
wrong = sorted(name for name in found.keys() | facts["tensors"].keys() if found.get(name) != facts["tensors"].get(name))
print(f"{len(found)} tensors of a {architecture}; other than exported: {wrong or 'none'}")
sys.exit("WRONG" if wrong or architecture != facts["arch"] else print("ok"))
