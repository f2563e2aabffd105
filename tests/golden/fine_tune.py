#!/usr/bin/env python3
"""The numbers tests/fine_tune.rs holds fine-tuning against: PyTorch's own BatchNorm, cross-entropy, SGD and schedulers on a ResNet-8 whose
weights, images and labels are made by formula. Run: python3 tests/golden/fine_tune.py (torch 2.13.0); prints the constants of the test."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)  # the truth; ours is f32


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet8(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (nn.Sequential(Block(i, o, s)) for i, o, s in ((16, 16, 1), (16, 32, 2), (32, 64, 2)))
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x))))))
        return self.fc(x.mean((2, 3)))


net = ResNet8(5).train()
state = net.state_dict()
names = sorted(name for name in state if 'tracked' not in name)
for place, name in enumerate(names):
    value = state[name]
    wave = 0.1 * torch.sin(0.7 * torch.arange(value.numel()) + place).view(value.shape)
    near_one = name.endswith('running_var') or ('bn' in name or 'downsample.1' in name) and name.endswith('weight')
    value.copy_(1 + wave if near_one else wave)
print('names', len(names), names[0], names[-1])

images = torch.sin(0.37 * torch.arange(6 * 3 * 16 * 16)).view(6, 3, 16, 16)
labels = torch.tensor([0, 1, 2, 3, 4, 0])
rule = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
steps, rising = 10, 3
up = torch.optim.lr_scheduler.LinearLR(rule, 1 / rising, 1.0, rising - 1)
down = torch.optim.lr_scheduler.CosineAnnealingLR(rule, steps - rising)
rate = torch.optim.lr_scheduler.SequentialLR(rule, [up, down], [rising])
losses, rates = [], []
for _ in range(steps):
    rates.append(rule.param_groups[0]['lr'])
    loss = nn.functional.cross_entropy(net(images), labels)
    losses.append(loss.item())
    rule.zero_grad()
    loss.backward()
    rule.step()
    rate.step()
print('rates', rates)
print('losses', losses)
state = net.state_dict()
for name in ('conv1.weight', 'layer2.0.bn2.bias', 'layer3.0.downsample.0.weight', 'bn1.running_mean', 'layer3.0.bn1.running_var', 'fc.weight', 'fc.bias'):
    value = state[name].flatten()
    print(name, repr(value[0].item()), repr(value[-1].item()), repr(value.norm().item()))
net.eval()
with torch.no_grad():
    print('answer', net(images)[2].tolist())
