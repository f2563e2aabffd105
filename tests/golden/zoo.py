#!/usr/bin/env python3
"""Forward passes of the distillation zoo's networks for 32 x 32 images, for tests/nets/released.rs. Made with torch 2.13.0; no random numbers.

    pip install torch==2.13.0
    python tests/golden/zoo.py                   # prints the rows of ZOO
    python tests/golden/zoo.py --write FOLDER    # also writes random-weight checkpoints in the forms that RepDistiller and mdistiller save,
                                                 # and FOLDER/logits.json with what each answers to the test image

The layers, their order and their state-dict names are those of RepDistiller (github.com/HobbitLong/RepDistiller, models/) and mdistiller
(github.com/megvii-research/mdistiller, mdistiller/models/cifar/), whose classes agree. Tensors are filled by the rule of `fill` in
released.rs, with norms of weight 1: at 0.3 too little of the image would be left at the end.
"""
import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


def conv(c_in, c_out, k, stride=1, groups=1, bias=False):
    return nn.Conv2d(c_in, c_out, k, stride, k // 2, groups=groups, bias=bias)


class Basic(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(c_in, c_out, 3, stride), nn.BatchNorm2d(c_out)
        self.conv2, self.bn2 = conv(c_out, c_out, 3), nn.BatchNorm2d(c_out)
        changes = stride != 1 or c_in != c_out
        self.downsample = nn.Sequential(conv(c_in, c_out, 1, stride), nn.BatchNorm2d(c_out)) if changes else None

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, depth, planes):
        super().__init__()
        n = (depth - 2) // 6
        self.conv1, self.bn1 = conv(3, planes[0], 3), nn.BatchNorm2d(planes[0])
        for l in (1, 2, 3):
            first = Basic(planes[l - 1], planes[l], 1 if l == 1 else 2)
            setattr(self, f'layer{l}', nn.Sequential(first, *(Basic(planes[l], planes[l], 1) for _ in range(n - 1))))
        self.fc = nn.Linear(planes[3], 100)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        feat = F.avg_pool2d(x, 8).flatten(1)
        return feat, self.fc(feat)


class Pre(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(c_in), conv(c_in, c_out, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(c_out), conv(c_out, c_out, 3)
        self.convShortcut = conv(c_in, c_out, 1, stride) if c_in != c_out else None

    def forward(self, x):
        a = F.relu(self.bn1(x))
        y = self.conv2(F.relu(self.bn2(self.conv1(a))))
        return y + (x if self.convShortcut is None else self.convShortcut(a))


class Wide(nn.Module):
    def __init__(self, depth, widen):
        super().__init__()
        n, widths = (depth - 4) // 6, [16, 16 * widen, 32 * widen, 64 * widen]
        self.conv1 = conv(3, 16, 3)
        for l in (1, 2, 3):
            first = Pre(widths[l - 1], widths[l], 1 if l == 1 else 2)
            block = nn.Module()
            block.layer = nn.Sequential(first, *(Pre(widths[l], widths[l], 1) for _ in range(n - 1)))
            setattr(self, f'block{l}', block)
        self.bn1, self.fc = nn.BatchNorm2d(widths[3]), nn.Linear(widths[3], 100)

    def forward(self, x):
        x = self.block3.layer(self.block2.layer(self.block1.layer(self.conv1(x))))
        feat = F.avg_pool2d(F.relu(self.bn1(x)), 8).flatten(1)
        return feat, self.fc(feat)


class Vgg(nn.Module):
    def __init__(self, convs):
        super().__init__()
        widths = [64, 128, 256, 512, 512]
        for b, c in enumerate(widths):
            layers = []
            for i in range(convs):
                c_in = c if i else (widths[b - 1] if b else 3)
                layers += [conv(c_in, c, 3, bias=True), nn.BatchNorm2d(c), nn.ReLU()]
            setattr(self, f'block{b}', nn.Sequential(*layers[:-1]))
        self.classifier = nn.Linear(512, 100)

    def forward(self, x):
        for b in range(5):
            if b in (1, 2, 3):
                x = F.max_pool2d(x, 2)
            x = F.relu(getattr(self, f'block{b}')(x))
        feat = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return feat, self.classifier(feat)


class Inverted(nn.Module):
    def __init__(self, c_in, c_out, stride, expand):
        super().__init__()
        wide, self.residual = c_in * expand, stride == 1 and c_in == c_out
        self.conv = nn.Sequential(conv(c_in, wide, 1), nn.BatchNorm2d(wide), nn.ReLU(), conv(wide, wide, 3, stride, wide), nn.BatchNorm2d(wide),
                                  nn.ReLU(), conv(wide, c_out, 1), nn.BatchNorm2d(c_out))

    def forward(self, x):
        return x + self.conv(x) if self.residual else self.conv(x)


class Mobile(nn.Module):
    def __init__(self, width=0.5):
        super().__init__()
        at = int(32 * width)
        self.conv1 = nn.Sequential(conv(3, at, 3, 2), nn.BatchNorm2d(at), nn.ReLU())
        self.blocks = nn.ModuleList()
        for expand, c, n, stride in [(1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]:
            group = []
            for i in range(n):
                group.append(Inverted(at, int(c * width), stride if i == 0 else 1, expand))
                at = int(c * width)
            self.blocks.append(nn.Sequential(*group))
        self.conv2 = nn.Sequential(conv(at, 1280, 1), nn.BatchNorm2d(1280), nn.ReLU())
        self.classifier = nn.Sequential(nn.Linear(1280, 100))

    def forward(self, x):
        x = self.conv1(x)
        for group in self.blocks:
            x = group(x)
        feat = F.avg_pool2d(self.conv2(x), 2, ceil_mode=True).flatten(1)
        return feat, self.classifier(feat)


def shuffle(x, groups):
    b, c, h, w = x.shape
    return x.reshape(b, groups, c // groups, h, w).permute(0, 2, 1, 3, 4).reshape(b, c, h, w)


class Shuffle1Block(nn.Module):
    def __init__(self, c_in, c_new, stride):
        super().__init__()
        middle, self.groups, self.stride = c_new // 4, 1 if c_in == 24 else 3, stride
        self.conv1, self.bn1 = conv(c_in, middle, 1, groups=self.groups), nn.BatchNorm2d(middle)
        self.conv2, self.bn2 = conv(middle, middle, 3, stride, middle), nn.BatchNorm2d(middle)
        self.conv3, self.bn3 = conv(middle, c_new, 1, groups=3), nn.BatchNorm2d(c_new)

    def forward(self, x):
        y = shuffle(F.relu(self.bn1(self.conv1(x))), self.groups)
        y = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(y)))))
        return F.relu(torch.cat([y, F.avg_pool2d(x, 3, 2, 1)], 1) if self.stride == 2 else y + x)


class Shuffle1(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, at = conv(3, 24, 1), nn.BatchNorm2d(24), 24
        for l, (c, n) in enumerate([(240, 4), (480, 8), (960, 4)], 1):
            blocks = [Shuffle1Block(at, c - at, 2)] + [Shuffle1Block(c, c, 1) for _ in range(n - 1)]
            setattr(self, f'layer{l}', nn.Sequential(*blocks))
            at = c
        self.linear = nn.Linear(960, 100)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        feat = F.avg_pool2d(x, 4).flatten(1)
        return feat, self.linear(feat)


class Shuffle2Basic(nn.Module):
    def __init__(self, c):
        super().__init__()
        c //= 2
        for i, layer in enumerate([conv(c, c, 1), conv(c, c, 3, groups=c), conv(c, c, 1)], 1):
            setattr(self, f'conv{i}', layer)
            setattr(self, f'bn{i}', nn.BatchNorm2d(c))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        b = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(b)))))
        return shuffle(torch.cat([a, F.relu(self.bn3(self.conv3(b)))], 1), 2)


class Shuffle2Down(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        half = c_out // 2
        layers = [conv(c_in, c_in, 3, 2, c_in), conv(c_in, half, 1), conv(c_in, half, 1), conv(half, half, 3, 2, half), conv(half, half, 1)]
        for i, layer in enumerate(layers, 1):
            setattr(self, f'conv{i}', layer)
            setattr(self, f'bn{i}', nn.BatchNorm2d(layer.out_channels))

    def forward(self, x):
        at = lambda i, x: getattr(self, f'bn{i}')(getattr(self, f'conv{i}')(x))
        left = F.relu(at(2, at(1, x)))
        right = F.relu(at(5, at(4, F.relu(at(3, x)))))
        return shuffle(torch.cat([left, right], 1), 2)


class Shuffle2(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, at = conv(3, 24, 1), nn.BatchNorm2d(24), 24
        for l, (c, n) in enumerate([(116, 3), (232, 7), (464, 3)], 1):
            setattr(self, f'layer{l}', nn.Sequential(Shuffle2Down(at, c), *(Shuffle2Basic(c) for _ in range(n))))
            at = c
        self.conv2, self.bn2, self.linear = conv(464, 1024, 1), nn.BatchNorm2d(1024), nn.Linear(1024, 100)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        feat = F.avg_pool2d(F.relu(self.bn2(self.conv2(x))), 4).flatten(1)
        return feat, self.linear(feat)


narrow, wide = [16, 16, 32, 64], [32, 64, 128, 256]
ZOO = {
    'resnet8': lambda: ResNet(8, narrow), 'resnet14': lambda: ResNet(14, narrow), 'resnet20': lambda: ResNet(20, narrow),
    'resnet32': lambda: ResNet(32, narrow), 'resnet44': lambda: ResNet(44, narrow), 'resnet56': lambda: ResNet(56, narrow),
    'resnet110_basic': lambda: ResNet(110, narrow), 'resnet8x4': lambda: ResNet(8, wide), 'resnet32x4': lambda: ResNet(32, wide),
    'wrn_16_1': lambda: Wide(16, 1), 'wrn_40_1': lambda: Wide(40, 1), 'wrn_16_2': lambda: Wide(16, 2), 'wrn_40_2': lambda: Wide(40, 2),
    'vgg8': lambda: Vgg(1), 'vgg13': lambda: Vgg(2), 'mobile_half': Mobile, 'shuffle_v1': Shuffle1, 'shuffle_v2': Shuffle2,
}


def fill(net):
    norms = {name for name, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for name, t in net.state_dict().items():
        if not t.is_floating_point():
            continue
        owner, leaf = name.rsplit('.', 1)
        h = sum(name.encode()) % 97
        s = torch.sin(0.7 * torch.arange(t.numel(), dtype=torch.float64) + 0.3 * h)
        if leaf == 'running_mean':
            s = torch.zeros_like(s)
        elif leaf == 'running_var':
            s = torch.ones_like(s)
        elif leaf == 'weight' and owner in norms:
            s = 1 + 0.03 * s
        elif t.dim() == 1:
            s = 0.1 * s
        else:
            s = s / math.sqrt(t.numel() // t.shape[0])
        t.copy_(s.reshape(t.shape))


def wave(batch, side=32):
    return torch.sin(0.01 * torch.arange(batch * 3 * side * side, dtype=torch.float64)).reshape(batch, 3, side, side)


def write(folder):
    """Random weights in f32, moved statistics, saved in turn as each repository saves."""
    folder.mkdir(parents=True, exist_ok=True)
    forms = {
        'repdistiller': lambda sd: {'epoch': 240, 'model': sd, 'best_acc': torch.tensor(71.5)},
        'repdistiller_teacher': lambda sd: {'opt': argparse.Namespace(model='net', lr=0.05), 'model': sd, 'best_acc': torch.tensor(71.5),
                                            'optimizer': {'state': {0: {'momentum_buffer': torch.ones(3)}}, 'param_groups': [{'lr': 0.05}]}},
        'mdistiller_student': lambda sd: {'model': sd},
        'mdistiller': lambda sd: {'epoch': 3, 'model': {**{f'module.student.{k}': v for k, v in sd.items()},
                                                        **{f'module.teacher.{k}': torch.ones_like(v) for k, v in sd.items()}},
                                  'optimizer': {'state': {}}, 'best_acc': 71.5},
        'data_parallel': lambda sd: {'state_dict': {f'module.{k}': v for k, v in sd.items()}, 'acc': torch.tensor(0.7)},
        'mcl': lambda sd: {'net': {f'module.module_list.0.{k}': v for k, v in sd.items()}, 'epoch': 300, 'acc': torch.tensor([70.1, 70.2])},
        'deep': lambda sd: {'checkpoint': {'snet': sd, 'acc': torch.tensor(1.0)}},
        'bare': lambda sd: sd,
    }
    answers = {}
    for i, (name, make) in enumerate(ZOO.items()):
        torch.manual_seed(i)
        net = make()
        net.train()
        for _ in range(3):
            net(torch.randn(8, 3, 32, 32))
        net.eval()
        form = list(forms)[i % len(forms)]
        file = f'{name}.{form}.pth'
        torch.save(forms[form](net.state_dict()), folder / file)
        answers[file] = {'arch': name, 'logits': net(wave(3).float())[1].tolist()}
    (folder / 'logits.json').write_text(json.dumps(answers))


def number(value):
    """Nine digits, as Rust reads an f64."""
    text = f'{float(value):.9g}'
    return text if '.' in text or 'e' in text else text + '.0'


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--write', type=Path)
    args = parser.parse_args()
    with torch.no_grad():
        for name, make in ZOO.items():
            net = make().double().eval()
            fill(net)
            feat, logits = net(wave(2))
            count = sum(p.numel() for p in net.parameters())
            first = ', '.join(map(number, logits[0, :3]))
            print(f'    ("{name}", {count:_}, [{first}], {number(logits.sum())}, {number(feat.sum())}),')
        if args.write:
            write(args.write)


main()
