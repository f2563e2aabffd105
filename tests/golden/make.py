#!/usr/bin/env python3
"""Golden files of the whole objective: f32 inputs, float64 expectations, both modes. Written with torch 2.13.0 on a CPU, seed 20230.

    pip install torch==2.13.0 safetensors numpy
    python tests/golden/make.py

A direct transcription of the paper's equations (and, for `reference`, of what the released code does instead), pair by pair and loop by
loop, so that it shares no idea with the batched code it judges. Three files: two networks of different widths and three stages with
logits in the tens, where naive softmaxes fail; three networks; and a batch of one class pair, whose only contrast sample is the positive.

Layout: `feats.m.l` [B,c], `logits.m.l` [B,C], `labels` [B]; heads `head.m.l.{w1,b1,w2,b2}`; gates `gate.m.{w1,b1,w2,b2}`; meta projections
`xi_v.m.l.w` (paper) and `xi_f.m.l.{w,b}` (reference); `bank.m` [B,K+1,d], column 0 the positive. `expected.*`: values summed over ordered
pairs of networks and layers, weighted by lambda but not by alpha and beta; gradients of the total with lambda held.
"""
from pathlib import Path
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

TAU, T, ALPHA, BETA = .1, 3., .1, 1.


def make(name, widths, L, B, C, d, K, scale, seed):
    M = len(widths)
    g = torch.Generator().manual_seed(seed)
    rand = lambda *s: torch.randn(*s, generator=g)
    x = {'labels': torch.arange(B // 2).repeat_interleave(2) % C}
    for m, c in enumerate(widths):
        for l in range(L):
            x[f'feats.{m}.{l}'] = rand(B, c).relu()
            x[f'logits.{m}.{l}'] = rand(B, C) * scale
            x |= {f'head.{m}.{l}.w1': rand(d, c) / c ** .5, f'head.{m}.{l}.b1': rand(d) * .1,
                  f'head.{m}.{l}.w2': rand(d, d) / d ** .5, f'head.{m}.{l}.b2': rand(d) * .1,
                  f'xi_v.{m}.{l}.w': rand(d, d) / d ** .5, f'xi_f.{m}.{l}.w': rand(d, c) / c ** .5, f'xi_f.{m}.{l}.b': rand(d) * .1}
        x |= {f'gate.{m}.w1': rand(c, L * c) / (L * c) ** .5, f'gate.{m}.b1': rand(c) * .1,
              f'gate.{m}.w2': rand(L, c) / c ** .5, f'gate.{m}.b2': rand(L) * .1}
        x[f'bank.{m}'] = F.normalize(rand(B, K + 1, d), dim=-1)
    X = {k: v.double() if v.is_floating_point() else v for k, v in x.items()}
    y = X['labels']
    feats = [[X[f'feats.{m}.{l}'].requires_grad_() for l in range(L)] for m in range(M)]
    logits = [[X[f'logits.{m}.{l}'].requires_grad_() for l in range(L)] for m in range(M)]
    mlp = lambda p, v: F.relu(v @ X[p + '.w1'].T + X[p + '.b1']) @ X[p + '.w2'].T + X[p + '.b2']
    v = [[F.normalize(mlp(f'head.{m}.{l}', feats[m][l]), dim=1) for l in range(L)] for m in range(M)]
    ens = [(torch.softmax(mlp(f'gate.{m}', torch.cat(feats[m], 1)), 1)[:, :, None] * torch.stack(logits[m], 1)).sum(1) for m in range(M)]
    out = {'expected.task': sum(F.cross_entropy(logits[m][l], y) for m in range(M) for l in range(L)),
           'expected.task_gate': sum(F.cross_entropy(e, y) for e in ens)}
    kd = lambda t, s: F.kl_div(F.log_softmax(s / T, 1), F.softmax(t.detach() / T, 1), reduction='batchmean') * T * T
    out['expected.ens'] = sum(kd(ens[b], logits[a][-1]) for a in range(M) for b in range(M) if b != a)

    def row_hard(s, i):
        """-log of the positive's probability for anchor i; s [B,B]."""
        others = [j for j in range(B) if j != i]
        mates = [j for j in others if y[j] == y[i]]
        return -sum(s[i, j] - torch.logsumexp(s[i, others], 0) for j in mates) / len(mates)

    def row_kl(t, s, i, mode):
        keep = [j for j in range(B) if j != i or mode == 'reference']
        temp = 1. if mode == 'paper' else T
        p, q = F.log_softmax(t[i, keep].detach() / temp, 0), F.log_softmax(s[i, keep] / temp, 0)
        return (p.exp() * (p - q)).sum() * temp ** 2

    def pair(u, w, lam, mode):
        """One pair of embeddings, both directions."""
        uu, ww, uw, wu = u @ u.T / TAU, w @ w.T / TAU, u @ w.T / TAU, w @ u.T / TAU
        mean = lambda f: sum(lam[i] * f(i) for i in range(B)) / B
        return dict(vcl=mean(lambda i: row_hard(uu, i) + row_hard(ww, i)), icl=mean(lambda i: row_hard(uw, i) + row_hard(wu, i)),
                    soft_vcl=mean(lambda i: row_kl(ww, uu, i, mode) + row_kl(uu, ww, i, mode)),
                    soft_icl=mean(lambda i: row_kl(wu, uw, i, mode) + row_kl(uw, wu, i, mode)))

    for mode in ('paper', 'reference'):
        xi = [[F.normalize(v[m][l] @ X[f'xi_v.{m}.{l}.w'].T if mode == 'paper' else feats[m][l] @ X[f'xi_f.{m}.{l}.w'].T + X[f'xi_f.{m}.{l}.b'], dim=1).detach()
               for l in range(L)] for m in range(M)]
        terms = dict(vcl=0., icl=0., soft_vcl=0., soft_icl=0.)
        for a in range(M):
            for b in range(M):
                for k in range(L):
                    for z in range(L):
                        if a == b: continue
                        lam = torch.sigmoid((xi[a][k] * xi[b][z]).sum(1))
                        out[f'expected.{mode}.lambda.{a}.{b}.{k}.{z}'] = lam
                        for n, t in pair(v[a][k], v[b][z], lam, mode).items(): terms[n] = terms[n] + t
        for n, t in terms.items(): out[f'expected.{mode}.l_mcl.{n}'] = t
        one = torch.ones(B, dtype=torch.float64)
        mcl = dict(vcl=0., icl=0., soft_vcl=0., soft_icl=0.)
        for m in range(M): s = v[m][-1] @ v[m][-1].T / TAU; mcl['vcl'] = mcl['vcl'] + sum(row_hard(s, i) for i in range(B)) / B
        for a in range(M):
            for b in range(a + 1, M):
                p = pair(v[a][-1], v[b][-1], one, mode)
                for n in ('icl', 'soft_vcl', 'soft_icl'): mcl[n] = mcl[n] + p[n]
        for n, t in mcl.items(): out[f'expected.{mode}.mcl.{n}'] = t
        total = out['expected.task'] + out['expected.task_gate'] + out['expected.ens'] \
            + ALPHA * (terms['vcl'] + terms['icl']) + BETA * (terms['soft_vcl'] + terms['soft_icl'])
        if mode == 'reference': total = total + sum(kd(ens[m], logits[m][-1]) for m in range(M))
        out[f'expected.{mode}.total'] = total
        for what, leaves in (('feats', feats), ('logits', logits)):
            flat = [t for ts in leaves for t in ts]
            for i, gr in enumerate(torch.autograd.grad(total, flat, retain_graph=True)):
                out[f'expected.{mode}.grad.{what}.{i // L}.{i % L}'] = gr
    # Memory mining: networks 0 and 1, last layer, lambda 1, each vanilla term with its own bank.
    s = lambda m, n: torch.einsum('bkd,bd->bk', X[f'bank.{n}'], v[m][-1]) / TAU
    ce = lambda q: -F.log_softmax(q, 1)[:, 0].mean()
    def kl(t, q): t = F.log_softmax(t.detach(), 1); return (t.exp() * (t - F.log_softmax(q, 1))).sum(1).mean()
    out |= {'expected.paper.memory.vcl': ce(s(0, 0)) + ce(s(1, 1)), 'expected.paper.memory.icl': ce(s(0, 1)) + ce(s(1, 0)),
            'expected.paper.memory.soft_vcl': kl(s(0, 0), s(1, 1)) + kl(s(1, 1), s(0, 0)),
            'expected.paper.memory.soft_icl': kl(s(0, 1), s(1, 0)) + kl(s(1, 0), s(0, 1))}
    out = {k: t.detach().double().reshape(t.shape or (1,)).contiguous() for k, t in out.items()}
    meta = dict(M=M, L=L, B=B, C=C, d=d, K=K, alpha=ALPHA, beta=BETA, tau=TAU, T=T)
    save_file(x | out, Path(__file__).parent / f'{name}.safetensors', metadata={k: str(t) for k, t in meta.items()})


make('objective_m2_l3_b6', [7, 5], 3, 6, 5, 6, 9, 20., 20230)
make('objective_m3_l2_b8', [8, 8, 6], 2, 8, 6, 8, 12, 1., 20231)
make('objective_m2_l1_b2', [5, 5], 1, 2, 3, 4, 3, 1., 20232)
