#!/usr/bin/env python3
"""The numbers tests/numerics.rs holds the evaluation's numerics against: scikit-learn, scipy and plain numpy on data made by formula.
Run: python3 tests/golden/evaluation.py (scikit-learn 1.9.1, scipy 1.17.1, numpy 2.4.6); prints the constants of the tests."""
import numpy as np
from scipy import stats
from scipy.spatial.distance import pdist, squareform
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.manifold import _t_sne
from sklearn.neighbors import KNeighborsClassifier
import sklearn, scipy

print('versions', sklearn.__version__, scipy.__version__, np.__version__)
n, d, c = 90, 5, 3
i, j = np.arange(n)[:, None], np.arange(d)[None, :]
x = np.sin(1.7 * i + 0.9 * j * j) + 0.8 * (i % c == j)
y = np.arange(n) % c


def objective(w, b, C):
    s = x @ w.T + b
    m = s.max(1, keepdims=True)
    logz = (m + np.log(np.exp(s - m).sum(1, keepdims=True)))[:, 0]
    return (logz - s[np.arange(n), y]).mean() + (w ** 2).sum() / (2 * C * n)


for C in (0.1, 1.0, 100.0):
    m = LogisticRegression(C=C, tol=1e-10, max_iter=10000).fit(x, y)
    print('logreg', C, repr(objective(m.coef_, m.intercept_, C)), repr(m.coef_[0, 0]), repr(m.coef_[2, 3]), repr(m.intercept_[1] - m.intercept_[0]), repr(m.score(x, y)))

# Hard enough that neighbours disagree.
hard = np.sin(1.7 * i + 0.9 * j * j) + 0.25 * (i % c == j)
train, test = hard[:60], hard[60:]
for k in (1, 5, 20):
    m = KNeighborsClassifier(k, metric='cosine', weights=lambda dist: np.exp((1 - dist) / 0.07)).fit(train, y[:60])
    print('knn', k, ''.join(map(str, m.predict(test))))

p = PCA(2).fit(x)
z = p.transform(x)
for a in range(2):
    s = np.sign(p.components_[a][np.argmax(np.abs(p.components_[a]))])
    z[:, a] *= s
z = z / z[:, 0].std() * 1e-4
print('pca', repr(z[0]), repr(z[41]))

maps = np.stack([10 * np.sin(0.37 * np.arange(n)), 7 * np.cos(1.1 * np.arange(n))], 1)
P = _t_sne._joint_probabilities(squareform(pdist(x, 'sqeuclidean')), 10.0, 0)
kl, _ = _t_sne._kl_divergence(maps.ravel(), P, 1, n, 2)
print('kl', repr(kl))

# Many columns: scikit-learn finds bandwidths in f32 only, so here by bisection in f64.
m = 300
wide = np.sin(1.7 * np.arange(m)[:, None] * (np.arange(96) + 1) + 0.3 * np.arange(96) ** 2)
dist, W = squareform(pdist(wide, 'sqeuclidean')), np.zeros((m, m))
for k in range(m):
    d = np.delete(dist[k], k)
    d, low, high = d - d.min(), 0.0, 1e6
    for _ in range(200):
        beta = (low + high) / 2
        q = np.exp(-beta * d)
        q /= q.sum()
        low, high = (beta, high) if -(q[q > 0] * np.log(q[q > 0])).sum() > np.log(20) else (low, beta)
    W[k, np.arange(m) != k] = q
W = (W + W.T) / (2 * m)
plane = np.stack([10 * np.sin(0.37 * np.arange(m)), 7 * np.cos(1.1 * np.arange(m))], 1)
Q = 1 / (1 + squareform(pdist(plane, 'sqeuclidean')))
np.fill_diagonal(Q, 0)
Q /= Q.sum()
print('kl, many columns', repr((W[W > 0] * np.log(W[W > 0] / Q[W > 0])).sum()))


def near(a, k):
    dist = squareform(pdist(a)); np.fill_diagonal(dist, np.inf)
    return np.argsort(dist, 1, kind='stable')[:, :k]


a, b = near(x, 7), near(maps, 7)
print('kept', repr(np.mean([len(set(p) & set(q)) / 7 for p, q in zip(a, b)])))

for lo, hi in ((3, 9), (0, 0), (10, 10), (121, 80), (0, 6)):
    t = lo + hi
    print('mcnemar', lo, hi, repr(1.0 if t == 0 else stats.binomtest(min(lo, hi), t, 0.5).pvalue))
for df in (1, 2, 3, 4, 9, 30):
    print('t', df, repr(stats.t.ppf(0.975, df)))

u, v = x, np.cos(0.3 * i * (j[:, :3] + 1)) + x[:, :3]
H = np.eye(n) - 1 / n
K, L = u @ u.T, v @ v.T
hsic = lambda A, B: np.trace(A @ H @ B @ H)
print('cka', repr(hsic(K, L) / np.sqrt(hsic(K, K) * hsic(L, L))))

right = np.zeros(200); right[:137] = 1
r = stats.bootstrap((right,), np.mean, method='percentile', n_resamples=200000, rng=np.random.default_rng(0)).confidence_interval
print('bootstrap', repr(r))
pa = np.zeros(200); pa[:30] = -1; pa[30:75] = 1  # only a right 30 times, only b 45 times
r = stats.bootstrap((pa,), np.mean, method='percentile', n_resamples=200000, rng=np.random.default_rng(0)).confidence_interval
print('paired', repr(r))
