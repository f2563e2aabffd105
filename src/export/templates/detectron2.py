"""Loads the pickle beside this file into Detectron2's ResNet and compares its maps with golden.npz:  python check.py [FILE]"""
import hashlib
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.modeling import build_backbone

TOLERANCE = 1e-4  # relative to the largest value: other machines and versions round differently
here = Path(__file__).parent
golden = {name: torch.from_numpy(a) for name, a in np.load(here / "golden.npz").items()}
file = sys.argv[1] if len(sys.argv) > 1 else here / "{{ file }}"
with open(file, "rb") as f:
    state = {name: torch.from_numpy(a) for name, a in pickle.load(f)["model"].items()}
{% include "hashes.py" %}
cfg = get_cfg()
cfg.MODEL.BACKBONE.NAME = "build_resnet_backbone"
cfg.MODEL.RESNETS.DEPTH = {{ detectron2.depth }}
cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = {{ channels[0] }}
cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False
cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
net = build_backbone(cfg)
DetectionCheckpointer(net).load(str(file))
with torch.no_grad():
    net.eval()
    maps = net(golden["input"])
wrong = False
for i in range(4):
    got, want = maps[f"res{i + 2}"], golden[str(i)]
    same = got.shape == want.shape
    off = float((got - want).abs().max() / want.abs().max().clamp_min(1)) if same else float("inf")
    wrong |= not off <= TOLERANCE
    print(f"{i}: {tuple(got.shape)}, largest relative difference {off:.1e}")
sys.exit("WRONG" if wrong else print("ok"))
