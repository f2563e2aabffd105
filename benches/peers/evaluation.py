"""The peers of `cargo bench --bench evaluation`: what a careful user of PyTorch, scikit-learn and openTSNE has for the same work.

It reads one task a line, does it once and answers with one number a line (or an error after `!`):

    script FILE SIDE BATCH   images/s of this TorchScript network on batches of images of this side: the best of plain, frozen and optimised for
                        inference, all of them channels_last
    probe FILE          seconds of one epoch of the paper's probe: 1000 images, augmentation, this network, SGD with batches of 64
    loader              images/s of pad 4, crop, flip, to float, normalise: the best of PIL and v2 on tensors, 0 and 2 workers
    logreg FILE         seconds of scikit-learn's LogisticRegression on the clouds in this file
    tsne FILE           seconds of t-SNE on the first 5000 of them: the faster of scikit-learn and openTSNE

Which way is the best is found out once; it is the one that is timed afterwards.
"""
import time, warnings

warnings.filterwarnings("ignore")
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F

from tasks import serve

clock = time.perf_counter
MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


def seconds(work):
    start = clock()
    work()
    return clock() - start


BEST = {}


def fastest(ways, warm=True):
    """Seconds of the fastest of some ways to do a work; which one that is, is found out once."""
    key = tuple(ways)
    if key not in BEST:
        if warm:
            [way() for way in ways.values()]
        BEST[key] = min(ways, key=lambda name: seconds(ways[name]))
    return seconds(ways[BEST[key]])


NETS = {}


def network(file):
    """A network as it is, and the same frozen and optimised for inference (BatchNorm folded), in channels_last."""
    if file not in NETS:
        load = lambda: torch.jit.load(file).eval().to(memory_format=torch.channels_last)
        ways = {"plain": load(), "frozen": torch.jit.freeze(load())}
        try:
            ways["optimised"] = torch.jit.optimize_for_inference(torch.jit.freeze(load()))
        except RuntimeError:
            pass  # not every network can be
        NETS[file] = ways
    return NETS[file]


def script(file, side, batch):
    x = torch.randn(int(batch), 3, int(side), int(side)).contiguous(memory_format=torch.channels_last)

    def passes(net, least=1.0):
        start, count = clock(), 0
        with torch.inference_mode():
            while count == 0 or clock() - start < least:
                net(x)
                count += len(x)
        return count / (clock() - start)

    key = (file, side, batch)
    if key not in BEST:
        for net in network(file).values():
            passes(net, 0.0), passes(net, 0.0), passes(net, 0.0)  # TorchScript specialises itself in its first passes
        BEST[key] = max(network(file).values(), key=passes)
    return passes(BEST[key])


PIXELS = np.random.default_rng(0).integers(0, 256, (10000, 32, 32, 3), dtype=np.uint8)
LABELS = np.arange(10000) % 10


class Pictures(torch.utils.data.Dataset):
    """PIL images and torchvision's first transforms."""

    def __init__(self, count):
        from PIL import Image
        from torchvision import transforms as V

        self.count, self.open = count, Image.fromarray
        self.augment = V.Compose([V.RandomCrop(32, padding=4), V.RandomHorizontalFlip(), V.ToTensor(), V.Normalize(MEAN, STD)])

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.augment(self.open(PIXELS[i])), LABELS[i]


class Tensors(Pictures):
    """uint8 tensors and torchvision's v2 transforms."""

    def __init__(self, count):
        from torchvision.transforms import v2

        self.count, self.images = count, torch.from_numpy(PIXELS.transpose(0, 3, 1, 2).copy())
        crop = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
        self.augment = v2.Compose([*crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])

    def __getitem__(self, i):
        return self.augment(self.images[i]), LABELS[i]


def loader():
    def way(kind, workers):
        def run():
            for _ in torch.utils.data.DataLoader(kind(5000), 128, True, num_workers=workers):
                pass

        return run

    ways = {f"{kind.__name__} {workers}": way(kind, workers) for kind in (Pictures, Tensors) for workers in (0, 2)}
    return 5000 / fastest(ways)


def probe(file):
    net = network(file)["optimised"]
    head = nn.Linear(64, 10)
    step = torch.optim.SGD(head.parameters(), 0.1, 0.9)

    def epoch(kind):
        for images, labels in torch.utils.data.DataLoader(kind(1000), 64, True):
            with torch.inference_mode():
                features = net(images.contiguous(memory_format=torch.channels_last))
            step.zero_grad()
            F.cross_entropy(head(features.clone()), labels).backward()
            step.step()

    return fastest({f"probe {kind.__name__}": (lambda kind=kind: epoch(kind)) for kind in (Pictures, Tensors)})


def clouds(file):
    kept = np.load(file)
    return kept[:, :-1].astype(np.float32), kept[:, -1].astype(int)


def logreg(file):
    from sklearn.linear_model import LogisticRegression

    x, y = clouds(file)
    return seconds(lambda: LogisticRegression(max_iter=1000).fit(x, y))


def tsne(file):
    from openTSNE import TSNE as Open
    from sklearn.manifold import TSNE

    x = clouds(file)[0][:5000]
    jobs = torch.get_num_threads()
    ways = {
        "scikit-learn": lambda: TSNE(perplexity=30, max_iter=750, n_jobs=jobs).fit_transform(x),
        "openTSNE": lambda: Open(perplexity=30, n_jobs=jobs, random_state=0).fit(x),
    }
    return fastest(ways, warm=False)


serve(script, probe, loader, logreg, tsne)
