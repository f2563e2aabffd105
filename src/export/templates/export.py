"""Writes {{ arch }}.pt2 by torch.export from the state dict beside this file:  python export.py [FILE] [--size HEIGHT WIDTH]"""
import argparse
from pathlib import Path

import torch
from torch import nn
from torchvision import models
{% if not with_classifier %}
from torchvision.models._utils import IntermediateLayerGetter
{% endif %}

here = Path(__file__).parent
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("file", nargs="?", type=Path, default=here / "{{ arch }}.pt2")
parser.add_argument("--size", nargs=2, type=int, default=({{ image_size }}, {{ image_size }}), metavar=("HEIGHT", "WIDTH"))
args = parser.parse_args()
state = torch.load(here / "{{ file }}", weights_only=True)
{% if with_classifier %}
network = models.{{ arch }}(weights=None, num_classes={{ classes }}).eval()
network.load_state_dict(state, strict=True)
{% elif torchvision.maps == "features" %}


class Backbone(nn.Module):
    """torchvision's Swin has the channels last inside; a map comes after every second child."""

    def __init__(self, body):
        super().__init__()
        self.features = body["features"]

    def forward(self, x):
        maps = {}
        for i, child in enumerate(self.features):
            x = child(x)
            if i % 2:
                maps[str(i // 2)] = x.permute(0, 3, 1, 2)
        return maps


network = Backbone(IntermediateLayerGetter(models.{{ arch }}(weights=None), {{ layers | dict }})).eval()
network.load_state_dict(state, strict=True)
{% else %}


class Backbone(nn.Module):
    """The children up to the last map, one after another."""

    def __init__(self, body):
        super().__init__()
        self.names = dict(body.return_layers)
        for name, child in body.items():
            self.add_module(name, child)

    def forward(self, x):
        maps = {}
        for name, child in self.named_children():
            x = child(x)
            if name in self.names:
                maps[self.names[name]] = x
        return maps


network = Backbone(IntermediateLayerGetter(models.{{ arch }}(weights=None), {{ layers | dict }})).eval()
network.load_state_dict(state, strict=True)
{% endif %}
auto = torch.export.Dim.AUTO
images = torch.randn(2, 3, *args.size)
{% if torchvision.maps == "features" %}
shapes = {0: auto}  # torchvision's Swin chooses padding and shift in Python: one image size
{% else %}
shapes = {0: auto, 2: auto, 3: auto}
{% endif %}
with torch.no_grad():
    program = torch.export.export(network, (images,), dynamic_shapes=(shapes,))
torch.export.save(program, args.file)

module = torch.export.load(args.file).module()
wide = images{% if torchvision.maps != "features" %}.new_empty(3, 3, args.size[0] + 32, args.size[1] + 64).normal_(){% else %}.new_empty(3, 3, *args.size).normal_(){% endif %}

with torch.no_grad():
    for x in (images, wide):
        want, got = network(x), module(x)
        want, got = (list(y.values()) if isinstance(y, dict) else [y] for y in (want, got))
        off = max(float((a - b).abs().max() / b.abs().max().clamp_min(1)) for a, b in zip(got, want, strict=True))
        print(f"{tuple(x.shape)}: largest relative difference {off:.1e}")
        if off > 1e-4:
            raise SystemExit("WRONG")
print(args.file)
