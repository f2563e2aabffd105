#!/usr/bin/env python3
"""A training step of other networks in PyTorch, images and weights in channels_last: what `cargo bench --bench step -- --only baseline` takes
is compared with. Two networks, cross-entropy alone, SGD with momentum. Random images.

    python3 -m venv ~/peer-venv && ~/peer-venv/bin/pip install torch==2.13.0 torchvision
    ~/peer-venv/bin/python peer_shapes.py wrn_16_2 --side 32 --batch 32 --threads 2 [--iters 5] [--cpu]
"""
import argparse, json, time
import torch
import torch.nn.functional as F
import torchvision.models as models
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("arch", choices=["wrn_16_2", "resnet18", "shufflenet_v2_x1_0"])
for name, default in dict(side=64, batch=32, threads=2, iters=5).items():
    p.add_argument("--" + name, type=int, default=default)
p.add_argument("--cpu", action="store_true", help="CPU seconds instead of wall time")
o = p.parse_args()
torch.set_num_threads(o.threads)
torch.manual_seed(0)


class Block(nn.Module):
    """Pre-activation; a shortcut that changes width is a 1 x 1 convolution of the activated input."""

    def __init__(self, c, k, stride):
        super().__init__()
        self.b1, self.c1 = nn.BatchNorm2d(c), nn.Conv2d(c, k, 3, stride, 1, bias=False)
        self.b2, self.c2 = nn.BatchNorm2d(k), nn.Conv2d(k, k, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(c, k, 1, stride, bias=False) if c != k else None

    def forward(self, x):
        a = F.relu(self.b1(x))
        y = self.c2(F.relu(self.b2(self.c1(a))))
        return y + (x if self.short is None else self.short(a))


def wrn_16_2(num_classes):
    widths, layers = [16, 32, 64, 128], [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    for s in range(3):
        layers += [Block(widths[s], widths[s + 1], 2 if s else 1), Block(widths[s + 1], widths[s + 1], 1)]
    tail = [nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes)]
    return nn.Sequential(*layers, *tail)


make = wrn_16_2 if o.arch == "wrn_16_2" else getattr(models, o.arch)
nets = nn.ModuleList([make(num_classes=100), make(num_classes=100)]).to(memory_format=torch.channels_last)
x = torch.randn(o.batch, 3, o.side, o.side).contiguous(memory_format=torch.channels_last)
y = torch.arange(o.batch) // 2 % 100
sgd = torch.optim.SGD(nets.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)


def step():
    sgd.zero_grad()
    sum(F.cross_entropy(net(x), y) for net in nets).backward()
    sgd.step()


clock = time.process_time if o.cpu else time.perf_counter
step()
seconds = []
for _ in range(o.iters):
    start = clock()
    step()
    seconds.append(clock() - start)
row = dict(arch=o.arch, side=o.side, batch=o.batch, threads=o.threads, baseline_s=round(sorted(seconds)[o.iters // 2], 4))
print(json.dumps(row))
