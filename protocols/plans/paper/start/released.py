"""The objective of the released L-MCL code in its plain form: two ResNets on CIFAR-100, from their random start.

It asks one question: do the embeddings of different images become one point in the first steps, as they do in this
package? So it imports nothing of this package. The objective, its weights, the start and the schedule follow the
released scripts: SGD with momentum 0.9 (Nesterov), weight decay 5e-4, a learning rate of 0.1 from the first step, 64
classes x 2 images a batch, alpha 0.1, beta 1, tau 0.1, T 3, a meta step after every 50th batch, the first included.

    python released.py --data DIR --out released.csv            # DIR has cifar-100-binary/train.bin
    python released.py --data DIR --out released.csv --stop 50 --state s.pt   # in parts; the same line goes on

A row every 25 steps: the loss, likeness.M.L (mean cosine between two different images, network M, stage L, from 0) and
mutual_information.A.B.K.Z (ln 126 - ICL of stage K of network A to stage Z of network B).
"""

import argparse
import csv
import math
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

TAU, T, ALPHA, BETA, DIM = 0.1, 3.0, 0.1, 1.0, 128
LR, MOMENTUM, DECAY = 0.1, 0.9, 5e-4
META_EVERY, INNER, EVERY = 50, 2, 25


class Block(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out)
        self.conv2, self.bn2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False), nn.BatchNorm2d(c_out)
        self.shortcut = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def stage(number, blocks):
    c_in, c_out, stride = [(16, 16, 1), (16, 32, 2), (32, 64, 2)][number]
    return nn.Sequential(*[Block(c_in if i == 0 else c_out, c_out, stride if i == 0 else 1) for i in range(blocks)])


class Peer(nn.Module):
    """A network, its two branches with the remaining stages at full depth, and a projection head for each stage."""

    def __init__(self, blocks, classes=100):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.stages = nn.ModuleList([stage(l, blocks) for l in range(3)])
        self.branches = nn.ModuleList([nn.Sequential(*[stage(n, blocks) for n in range(l + 1, 3)]) for l in range(2)])
        self.classifiers = nn.ModuleList([nn.Linear(64, classes) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Sequential(nn.Linear(64, DIM), nn.ReLU(), nn.Linear(DIM, DIM)) for _ in range(3)])
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x, maps = self.stem(x), []
        for part in self.stages:
            x = part(x)
            maps.append(x)
        maps = [branch(map) for branch, map in zip(self.branches, maps)] + [x]
        feats = [map.mean((2, 3)) for map in maps]
        logits = [classifier(feat) for classifier, feat in zip(self.classifiers, feats)]
        embeds = [head(feat) for head, feat in zip(self.heads, feats)]
        return feats, logits, [v / v.norm(dim=1, keepdim=True) for v in embeds]


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 * 64, 64), nn.ReLU(), nn.Linear(64, 3), nn.Softmax(dim=1))

    def forward(self, feats, logits):
        return (self.layers(torch.cat(feats, 1)).unsqueeze(2) * torch.stack(logits, 1)).sum(1)


class Cohort(nn.Module):
    """What the meta step unrolls: networks, branches, classifiers and heads. The gates are not in it."""

    def __init__(self, blocks):
        super().__init__()
        self.peers = nn.ModuleList([Peer(blocks), Peer(blocks)])

    def forward(self, x):
        return [peer(x) for peer in self.peers]


class Meta(nn.Module):
    """lambda: sigmoid of the cosine of two projected features, by pair of layers and image."""

    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList([nn.ModuleList([nn.Linear(64, DIM) for _ in range(3)]) for _ in range(2)])

    def forward(self, outs):
        rows = [[p(f) for p, f in zip(own, out[0])] for own, out in zip(self.projections, outs)]
        rows = [[r / r.norm(dim=1, keepdim=True) for r in own] for own in rows]
        return {(k, z): torch.sigmoid((rows[0][k] * rows[1][z]).sum(1)) for k in range(3) for z in range(3)}


def hard(similarity, labels):
    """l of each anchor: -mean over its positives of log p, over all images but itself."""
    off = ~torch.eye(len(labels), dtype=torch.bool)
    positive = (labels[:, None] == labels[None]) & off
    log_p = similarity - torch.log((similarity.exp() * off).sum(1, keepdim=True))
    return -(log_p * positive).sum(1) / positive.sum(1)


def soft(target, own):
    """KL at temperature T over whole rows, the image itself included, as the released code has it."""
    p, log_q = F.softmax(target.detach() / T, 1), F.log_softmax(own / T, 1)
    return T * T * (p * (p.log() - log_q)).sum(1)


def contrastive(outs, lambdas, labels):
    """L_MCL over ordered pairs of networks and all pairs of layers; both orders are equal, so one is counted twice."""
    total = 0.0
    for (k, z), weight in lambdas.items():
        u, v = outs[0][2][k], outs[1][2][z]
        uu, vv, uv, vu = u @ u.T / TAU, v @ v.T / TAU, u @ v.T / TAU, v @ u.T / TAU
        rows = ALPHA * (hard(uu, labels) + hard(vv, labels) + hard(uv, labels) + hard(vu, labels))
        rows = rows + BETA * (soft(vv, uu) + soft(uu, vv) + soft(vu, uv) + soft(uv, vu))
        total = total + 2 * (weight * rows).mean()
    return total


def task(outs, labels):
    return sum(F.cross_entropy(z, labels) for out in outs for z in out[1])


def distillation(outs, gates, labels):
    ensembles = [gate(out[0], out[1]) for gate, out in zip(gates, outs)]
    loss = sum(F.cross_entropy(e, labels) for e in ensembles)
    for out in outs:  # the released loop lets a network learn from its own ensemble too
        for e in ensembles:
            p, log_q = F.softmax(e.detach() / T, 1), F.log_softmax(out[1][-1] / T, 1)
            loss = loss + T * T * (p * (p.log() - log_q)).sum(1).mean()
    return loss


def meta_gradient(cohort, meta, images, labels):
    """The gradient of the task after two steps on L_MCL and one on the task, by the released backward recursion."""
    names = [name for name, _ in cohort.named_parameters()]
    theta = [p.detach().clone() for p in cohort.parameters()]
    pi = list(meta.parameters())
    velocity, path = [torch.zeros_like(p) for p in theta], []

    def objective(k, values):
        outs = functional_call(cohort, dict(zip(names, values)), (images,))
        return task(outs, labels) if k == INNER else contrastive(outs, meta(outs), labels)

    def gradient(k, values, graph):
        values = [v.detach().requires_grad_() for v in values]
        loss = objective(k, values)
        found = torch.autograd.grad(loss, values, create_graph=graph, allow_unused=True)
        return values, [torch.zeros_like(v) if g is None else g for v, g in zip(values, found)]

    for k in range(INNER + 1):
        path.append(theta)
        _, found = gradient(k, theta, False)
        velocity = [MOMENTUM * m + g + DECAY * p for m, g, p in zip(velocity, found, theta)]
        theta = [p - LR * m for p, m in zip(theta, velocity)]
    u, s = gradient(INNER, theta, False)[1], [torch.zeros_like(p) for p in theta]
    total = [torch.zeros_like(p) for p in pi]
    for k in reversed(range(INNER + 1)):
        values, found = gradient(k, path[k], True)
        c = [b - LR * a for a, b in zip(u, s)]
        dot = sum((g * w).sum() for g, w in zip(found, c) if g.requires_grad)
        second = torch.autograd.grad(dot, values + pi, allow_unused=True)
        second = [torch.zeros_like(p) if g is None else g for p, g in zip(values + pi, second)]
        total = [a + b for a, b in zip(total, second[len(values):])]
        u, s = [(1 - LR * DECAY) * a + b + h for a, b, h in zip(u, s, second)], [MOMENTUM * w for w in c]
    return total


def draw(labels, images, generator):
    """64 classes, two images of each; padded by 4, cropped, mirrored at random, normalised."""
    classes = torch.randperm(100, generator=generator)[:64]
    rows = []
    for c in classes:
        own = (labels == c).nonzero().view(-1)
        rows.append(own[torch.randperm(len(own), generator=generator)[:2]])
    rows = torch.cat(rows)
    x = F.pad(images[rows].float() / 255, (4, 4, 4, 4))
    out = []
    for image in x:
        i, j = torch.randint(9, (2,), generator=generator).tolist()
        crop = image[:, i:i + 32, j:j + 32]
        out.append(crop.flip(2) if torch.rand((), generator=generator) < 0.5 else crop)
    mean, std = torch.tensor([0.5071, 0.4867, 0.4408]), torch.tensor([0.2675, 0.2565, 0.2761])
    return (torch.stack(out) - mean.view(3, 1, 1)) / std.view(3, 1, 1), labels[rows]


@torch.no_grad()
def look(outs, labels):
    row = {}
    for m, out in enumerate(outs):
        for l, v in enumerate(out[2]):
            n = len(v)
            row[f"likeness.{m}.{l}"] = ((v.sum(0).square().sum() - n) / (n * (n - 1))).item()
    for a, b in [(0, 1), (1, 0)]:
        for k in range(3):
            for z in range(3):
                icl = hard(outs[a][2][k] @ outs[b][2][z].T / TAU, labels).mean().item()
                row[f"mutual_information.{a}.{b}.{k}.{z}"] = math.log(len(labels) - 2) - icl
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder that holds cifar-100-binary")
    parser.add_argument("--out", required=True, help="CSV that is written")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--depth", type=int, default=32, help="of the ResNets: 8, 20, 32, 56")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stop", type=int, default=0, help="stop after so many steps of this call; needs --state")
    parser.add_argument("--state", help="file that keeps everything needed to go on")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    raw = torch.frombuffer(bytearray(open(os.path.join(args.data, "cifar-100-binary/train.bin"), "rb").read()), dtype=torch.uint8)
    raw = raw.view(-1, 3074)
    labels, images = raw[:, 1].long(), raw[:, 2:].reshape(-1, 3, 32, 32)
    generator = torch.Generator().manual_seed(args.seed)
    cohort, gates, meta = Cohort((args.depth - 2) // 6), nn.ModuleList([Gate(), Gate()]), Meta()
    sgd = dict(lr=LR, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True)
    optimizer = torch.optim.SGD([*cohort.parameters(), *gates.parameters()], **sgd)
    pi_optimizer = torch.optim.SGD(meta.parameters(), **sgd)
    parts = dict(cohort=cohort, gates=gates, meta=meta, optimizer=optimizer, pi_optimizer=pi_optimizer)
    rows, first = [], 0
    if args.state and os.path.exists(args.state):
        saved = torch.load(args.state)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        rows, first = saved["rows"], saved["step"]
        generator.set_state(saved["generator"])
    last = min(args.steps, first + args.stop) if args.stop else args.steps
    for step in range(first, last + 1):
        if step == last and last < args.steps:
            saved = {name: part.state_dict() for name, part in parts.items()}
            torch.save(saved | dict(rows=rows, step=step, generator=generator.get_state()), args.state)
            break
        began = time.time()
        x, y = draw(labels, images, generator)
        outs = cohort(x)
        with torch.no_grad():
            lambdas = meta(outs)
        loss = task(outs, y) + distillation(outs, gates, y) + contrastive(outs, lambdas, y)
        if step % EVERY == 0:
            rows.append(dict(step=step, loss=loss.item()) | look(outs, y))
            with open(args.out + ".tmp", "w", newline="") as file:
                writer = csv.DictWriter(file, rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)
            os.replace(args.out + ".tmp", args.out)
        if step == last:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % META_EVERY == 0:
            for p, g in zip(meta.parameters(), meta_gradient(cohort, meta, x, y)):
                p.grad = g
            pi_optimizer.step()
        likeness = " ".join(f"{out_l:.4f}" for out_l in list(look(outs, y).values())[:6])
        print(f"step {step} loss {loss.item():.3f} likeness {likeness} ({time.time() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
