"""The peers of `cargo bench --bench step`: training steps as a careful user of PyTorch writes them, images and weights in channels_last.

It reads one task a line, does it once and answers with one number a line, seconds (or an error after `!`):

    plain DEPTH BATCH          a plain step of L-MCL: two CIFAR ResNets of this depth with branches, heads and gates, all terms, SGD
    meta DEPTH BATCH           a meta step of the same: two steps on L_MCL and one on the task, then the adjoints with create_graph
    baseline ARCH SIDE BATCH   a step of two bare networks with cross-entropy: resnetN of CIFAR, wrn_16_2, or a name of torchvision

Images are random, so no loading is timed. Short steps are repeated, and the median is the answer.
"""
import copy, time

import torch
import torch.nn.functional as F
from tasks import serve
from torch import nn

TAU, T, ALPHA, BETA, LR = 0.1, 3.0, 0.1, 1.0, 0.1
CLASSES = 100
LAST = torch.channels_last
LEAST_SECONDS = 1.5


class Block(nn.Module):
    def __init__(self, c, k, stride):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(c, k, 3, stride, 1, bias=False), nn.BatchNorm2d(k)
        self.c2, self.b2 = nn.Conv2d(k, k, 3, 1, 1, bias=False), nn.BatchNorm2d(k)
        self.short = nn.Sequential(nn.Conv2d(c, k, 1, stride, bias=False), nn.BatchNorm2d(k)) if stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x))))) + self.short(x))


def stage(depth, l):
    c, k = (16, 16, 32)[l], (16, 32, 64)[l]
    return nn.Sequential(*[Block(c if i == 0 else k, k, 2 if l and i == 0 else 1) for i in range((depth - 2) // 6)])


class Net(nn.Module):
    """A CIFAR ResNet; with branches, a classifier after every stage."""

    def __init__(self, depth, branches):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.stages = nn.ModuleList([stage(depth, l) for l in range(3)])
        tails = [nn.Sequential(stage(depth, 1), stage(depth, 2)), nn.Sequential(stage(depth, 2))]
        self.branches = nn.ModuleList(tails if branches else [])
        self.heads = nn.ModuleList([nn.Linear(64, CLASSES) for _ in range(3 if branches else 1)])

    def forward(self, x):
        maps, x = [], self.stem(x)
        for part in self.stages:
            x = part(x)
            maps.append(x)
        feats = [branch(m).mean((2, 3)) for branch, m in zip(self.branches, maps)] + [x.mean((2, 3))]
        return feats, [head(f) for head, f in zip(self.heads, feats)]


class Preactivated(nn.Module):
    """WRN's block; a shortcut that changes width is a 1 x 1 convolution of the activated input."""

    def __init__(self, c, k, stride):
        super().__init__()
        self.b1, self.c1 = nn.BatchNorm2d(c), nn.Conv2d(c, k, 3, stride, 1, bias=False)
        self.b2, self.c2 = nn.BatchNorm2d(k), nn.Conv2d(k, k, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(c, k, 1, stride, bias=False) if c != k else None

    def forward(self, x):
        a = F.relu(self.b1(x))
        y = self.c2(F.relu(self.b2(self.c1(a))))
        return y + (x if self.short is None else self.short(a))


def wrn_16_2():
    widths, layers = [16, 32, 64, 128], [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    for s in range(3):
        layers += [Preactivated(widths[s], widths[s + 1], 2 if s else 1), Preactivated(widths[s + 1], widths[s + 1], 1)]
    return nn.Sequential(*layers, nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def two_of_a_class(batch, side):
    return torch.randn(batch, 3, side, side).contiguous(memory_format=LAST), torch.arange(batch) // 2 % CLASSES


def sgd(params):
    return torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=5e-4, nesterov=True)


def zeros_for(gradients, at):
    return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, at)]


class LMcl:
    def __init__(self, depth, batch):
        mlp = lambda i, h, o: nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, o))
        self.nets = nn.ModuleList([Net(depth, True), Net(depth, True)]).to(memory_format=LAST)
        self.proj = nn.ModuleList([nn.ModuleList([mlp(64, 128, 128) for _ in range(3)]) for _ in self.nets])
        self.gates = nn.ModuleList([mlp(192, 64, 3) for _ in self.nets])
        self.xi = nn.ModuleList([nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(3)]) for _ in self.nets])
        self.x, self.y = two_of_a_class(batch, 32)
        self.own = torch.eye(batch, dtype=torch.bool)
        self.pos = ((self.y[:, None] == self.y[None]) & ~self.own).float()
        self.theta = [*self.nets.parameters(), *self.proj.parameters()]
        self.pi = list(self.xi.parameters())
        self.opt, self.pi_opt = sgd([*self.theta, *self.gates.parameters()]), sgd(self.pi)

    def forward(self):
        both = [net(self.x) for net in self.nets]
        return [f for f, _ in both], [z for _, z in both]

    def task(self, logits):
        return sum(F.cross_entropy(z, self.y) for own in logits for z in own)

    def log_p(self, scores):
        return F.log_softmax(scores.masked_fill(self.own, -1e9), 1)

    def hard(self, scores, weight):
        return -((self.pos * self.log_p(scores)).sum(1) * weight).mean()

    def soft(self, teacher, student, weight):
        target = self.log_p(teacher.detach())
        return (weight * (target.exp() * (target - self.log_p(student))).sum(1)).mean()

    def l_mcl(self, feats, lambda_learns):
        v = [[F.normalize(q(f), dim=1) for q, f in zip(qs, fs)] for qs, fs in zip(self.proj, feats)]
        with torch.set_grad_enabled(lambda_learns):
            u = [[F.normalize(k(e), dim=1) for k, e in zip(ks, es)] for ks, es in zip(self.xi, v)]
        loss = 0.0
        for a, b in ((0, 1), (1, 0)):
            for i in range(3):
                for j in range(3):
                    with torch.set_grad_enabled(lambda_learns):
                        w = torch.sigmoid((u[a][i] * u[b][j]).sum(1))
                    p, q = v[a][i], v[b][j]
                    pp, qq, pq, qp = p @ p.T / TAU, q @ q.T / TAU, p @ q.T / TAU, q @ p.T / TAU
                    loss = loss + ALPHA * (self.hard(pp, w) + self.hard(qq, w) + self.hard(pq, w) + self.hard(qp, w))
                    loss = loss + BETA * (self.soft(qq, pp, w) + self.soft(pp, qq, w) + self.soft(qp, pq, w) + self.soft(pq, qp, w))
        return loss

    def plain(self):
        self.opt.zero_grad()
        feats, logits = self.forward()
        mixed = lambda g, fs, zs: (F.softmax(g(torch.cat(fs, 1)), 1)[:, :, None] * torch.stack(zs, 1)).sum(1)
        ens = [mixed(g, fs, zs) for g, fs, zs in zip(self.gates, feats, logits)]
        pairs = [(F.log_softmax(logits[a][-1] / T, 1), F.softmax(ens[1 - a].detach() / T, 1)) for a in (0, 1)]
        kd = sum(F.kl_div(own, other, reduction="batchmean") for own, other in pairs) * T * T
        (self.task(logits) + sum(F.cross_entropy(e, self.y) for e in ens) + kd + self.l_mcl(feats, False)).backward()
        self.opt.step()

    def meta(self):
        inner, outer = lambda: self.l_mcl(self.forward()[0], True), lambda: self.task(self.forward()[1])
        theta, pi, trail = self.theta, self.pi, []
        start = copy.deepcopy([self.nets.state_dict(), self.proj.state_dict()])
        for objective in (inner, inner, outer):
            trail.append((objective, [t.detach().clone() for t in theta]))
            gradient = torch.autograd.grad(objective(), theta, allow_unused=True)
            with torch.no_grad():
                [t.sub_(LR * g) for t, g in zip(theta, gradient) if g is not None]
        u = zeros_for(torch.autograd.grad(outer(), theta, allow_unused=True), theta)
        dpi = [torch.zeros_like(t) for t in pi]
        for objective, at in reversed(trail):
            with torch.no_grad():
                [t.copy_(s) for t, s in zip(theta, at)]
            gradient = torch.autograd.grad(objective(), theta, create_graph=True, allow_unused=True)
            dot = sum((g * (-LR * s)).sum() for g, s in zip(gradient, u) if g is not None)
            h = zeros_for(torch.autograd.grad(dot, theta + pi, allow_unused=True), theta + pi)
            u, dpi = [a + b for a, b in zip(u, h)], [a + b for a, b in zip(dpi, h[len(theta):])]
        self.nets.load_state_dict(start[0]), self.proj.load_state_dict(start[1])
        for t, d in zip(pi, dpi):
            t.grad = d
        self.pi_opt.step()


def bare(arch, side, batch):
    import torchvision.models as models

    def one():
        if arch == "wrn_16_2":
            return wrn_16_2()
        # torchvision has no ResNet of a depth that CIFAR's have.
        return getattr(models, arch)(num_classes=CLASSES) if hasattr(models, arch) else Net(int(arch.removeprefix("resnet")), False)

    nets = nn.ModuleList([one(), one()]).to(memory_format=LAST)
    x, y = two_of_a_class(batch, side)
    opt = sgd(nets.parameters())
    logits = lambda answer: answer[1][-1] if isinstance(answer, tuple) else answer

    def step():
        opt.zero_grad()
        sum(F.cross_entropy(logits(net(x)), y) for net in nets).backward()
        opt.step()

    return step


def timed(step):
    """Seconds of a step; the median of as many as fit into a while."""
    seconds = []
    while not seconds or sum(seconds) < LEAST_SECONDS:
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


MADE = {}


def made(key, make):
    """One thing of a kind at a time: what is made for another task would only take memory."""
    if key not in MADE:
        MADE.clear()
        MADE[key] = make()
    return MADE[key]


def plain(depth, batch):
    return timed(made(("l_mcl", depth, batch), lambda: LMcl(int(depth), int(batch))).plain)


def meta(depth, batch):
    return timed(made(("l_mcl", depth, batch), lambda: LMcl(int(depth), int(batch))).meta)


def baseline(arch, side, batch):
    return timed(made((arch, side, batch), lambda: bare(arch, int(side), int(batch))))


serve(plain, meta, baseline)
