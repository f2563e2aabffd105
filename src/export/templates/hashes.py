facts = json.loads((here / "export.json").read_text())
hashes = {name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for name, t in state.items()}
changed = sorted(name for name in hashes.keys() | facts["tensors"].keys() if hashes.get(name) != facts["tensors"].get(name))
if changed:
    sys.exit(f"WRONG: other than exported: {changed}")
