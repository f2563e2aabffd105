"""Mask R-CNN with FPN on COCO-2017 from a backbone that `mcl-eval export` wrote: the other half of the paper's transfer table.

    python detect.py --export runs/r50/export/peer-0/torchvision --coco /data/coco --out runs/r50/detect

Settings come from protocols/coco/mask_rcnn.toml. Killed at any point, the same command goes on where it was; the last
line appends box and mask mAP to results.jsonl in --results, from where `mcl-eval report` puts them beside the paper's.
"""
import argparse
import contextlib
import fcntl
import hashlib
import io
import json
import os
import platform
import sys
import time
import tomllib
import warnings
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection import MaskRCNN
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

PROTOCOL = Path(__file__).parent / "mask_rcnn.toml"


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True, help="folder of a torchvision or torchscript export")
    parser.add_argument("--coco", type=Path, required=True, help="folder with train2017, val2017 and annotations")
    parser.add_argument("--train", default="train2017", help="split to train on")
    parser.add_argument("--val", default="val2017", help="split to measure on")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and detections")
    parser.add_argument("--results", type=Path, help="folder whose results.jsonl gets the rows [default: the run's folder, or --out]")
    parser.add_argument("--protocol", type=Path, default=PROTOCOL)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of [mask_rcnn]")
    parser.add_argument("--limit", type=int, default=0, help="so many images of each split only: a smoke run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=2, help="processes that read images")
    parser.add_argument("--save-every", type=int, default=200, metavar="STEPS", help="steps between checkpoints")
    args = parser.parse_args()
    settings = tomllib.loads(args.protocol.read_text())["mask_rcnn"]
    for text in args.set:
        key, _, value = text.partition("=")
        if key not in settings:
            parser.error(f"--set {text}: unknown key; known: {', '.join(settings)}")
        settings[key] = value if isinstance(settings[key], str) else tomllib.loads(f"value = {value}")["value"]
    if settings["norm"] not in ("eval", "frozen", "train"):
        parser.error(f"norm = {settings['norm']}; accepted: eval, frozen, train")
    if settings["batch"] % settings["chunk"]:
        parser.error(f"batch = {settings['batch']} is no multiple of chunk = {settings['chunk']}")
    return args, settings


# ---------------------------------------------------------------------------------------------------------------- data


class Images(torch.utils.data.Dataset):
    """Images of a split with their boxes, masks and labels; crowds and empty boxes are left out, as in MMDetection."""

    def __init__(self, root, split, limit, flip=0.0, seed=0):
        with contextlib.redirect_stdout(io.StringIO()):
            self.coco = COCO(root / "annotations" / f"instances_{split}.json")
        self.folder, self.flip, self.seed, self.epoch = root / split, flip, seed, 0
        self.ids = sorted(self.coco.imgs)
        if flip:  # training: images without objects teach nothing
            self.ids = [i for i in self.ids if self.objects(i)]
        self.ids = self.ids[:limit] if limit else self.ids

    def objects(self, image):
        return [a for a in self.coco.imgToAnns[image] if not a["iscrowd"] and a["area"] > 0 and min(a["bbox"][2:]) >= 1]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, at):
        info = self.coco.imgs[self.ids[at]]
        with Image.open(self.folder / info["file_name"]) as file:
            image = torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1).float() / 255
        objects = self.objects(info["id"])
        boxes = torch.tensor([a["bbox"] for a in objects]).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes[:, 0::2].clamp_(0, info["width"])
        boxes[:, 1::2].clamp_(0, info["height"])
        masks = [torch.from_numpy(self.coco.annToMask(a)) for a in objects]
        masks = torch.stack(masks) if masks else torch.zeros(0, info["height"], info["width"], dtype=torch.uint8)
        # What is drawn depends on seed, epoch and image alone: a resumed run draws the same.
        if torch.rand(1, generator=torch.Generator().manual_seed(hash((self.seed, self.epoch, at)) % 2**63)).item() < self.flip:
            image, masks = image.flip(-1), masks.flip(-1)
            boxes = boxes[:, [2, 1, 0, 3]] * torch.tensor([-1, 1, -1, 1]) + torch.tensor([info["width"], 0, info["width"], 0])
        labels = torch.tensor([a["category_id"] for a in objects], dtype=torch.int64)
        return image, {"boxes": boxes, "labels": labels, "masks": masks, "image_id": info["id"]}

    def order(self):
        return torch.randperm(len(self), generator=torch.Generator().manual_seed(self.seed * 100_003 + self.epoch)).tolist()


# ------------------------------------------------------------------------------------------------------------- network


class Swin(nn.Module):
    """torchvision's Swin has the channels last inside; maps come after every second child."""

    def __init__(self, features):
        super().__init__()
        self.features = features

    def forward(self, x):
        maps = {}
        for i, child in enumerate(self.features):
            x = child(x)
            if i % 2:
                maps[str(i // 2)] = x.permute(0, 3, 1, 2)
        return maps


class Backbone(nn.Module):
    """The exported body, the pyramid on its maps, and what the protocol says about its norms."""

    out_channels = 256

    def __init__(self, body, channels, norm):
        super().__init__()
        self.body, self.norm = body, norm
        self.fpn = FeaturePyramidNetwork(channels, self.out_channels, LastLevelMaxPool())

    def forward(self, x):
        return self.fpn(self.body(x))

    def norms(self):
        return [m for m in self.body.modules() if "BatchNorm" in getattr(m, "original_name", type(m).__name__)]

    def train(self, mode=True):
        super().train(mode)
        if self.norm != "train":
            for norm in self.norms():
                norm.eval()
        return self


def body_of(folder, facts, norm):
    """The exported network: the TorchScript module itself, or torchvision's with the exported weights."""
    if facts["with_classifier"]:
        sys.exit(f"{folder} holds a classifier; export a backbone (without --with-classifier)")
    file = folder / facts["file"]
    if facts["target"] == "torchscript":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(file, map_location="cpu")
    if facts["target"] != "torchvision":
        sys.exit(f"{folder} is for {facts['target']}; accepted: torchvision, torchscript")
    swin = facts["arch"].startswith("swin")
    frozen = {"norm_layer": FrozenBatchNorm2d} if norm == "frozen" and facts["arch"].startswith("resnet") else {}
    model = IntermediateLayerGetter(getattr(torchvision.models, facts["arch"])(weights=None, **frozen), facts["layers"])
    model.load_state_dict(torch.load(file, weights_only=True), strict=True)
    return Swin(model["features"]) if swin else model


def freeze(body, facts, stages, norm):
    """The stem and the first `stages` stages do not train, nor, with norm = "frozen", any weight of a norm."""
    if facts["arch"].startswith("swin"):
        fixed = tuple(f"features.{i}." for i in range(2 * stages)) if stages else ()
    else:
        ends = {int(index): name for name, index in facts["layers"].items()}
        children = [name for name, _ in body.named_children()]
        fixed = tuple(f"{name}." for name in children[: children.index(ends[stages - 1]) + 1]) if stages else ()
    for name, parameter in body.named_parameters():
        parameter.requires_grad_(not name.startswith(fixed))
    if norm == "frozen":
        for module in body.modules():
            if "BatchNorm" in getattr(module, "original_name", type(module).__name__):
                module.requires_grad_(False)


def detector(folder, settings):
    facts = json.loads((folder / "export.json").read_text())
    if len(facts["channels"]) != 4:
        sys.exit(f"{folder}: {facts['arch']} has {len(facts['channels'])} maps; Mask R-CNN's anchors are for the four of an ImageNet network")
    body = body_of(folder, facts, settings["norm"])
    freeze(body, facts, settings["frozen_stages"], settings["norm"])
    backbone = Backbone(body, facts["channels"], settings["norm"])
    model = MaskRCNN(
        backbone, 91, min_size=settings["min_size"], max_size=settings["max_size"], image_mean=facts["mean"], image_std=facts["std"]
    )  # 91: COCO numbers its 80 classes up to 90
    return model, facts


# ------------------------------------------------------------------------------------------------------------ training


def rate(settings, epoch, step):
    """Linear warm-up over the first steps of all, then steps down; scaled with the images of a step."""
    lr = settings["lr"] * settings["batch"] / 16 * 0.1 ** sum(epoch >= m for m in settings["milestones"])
    warm = min(1.0, step / settings["warmup"]) if settings["warmup"] else 1.0
    return lr * (settings["warmup_factor"] * (1 - warm) + warm)


def save(path, **state):
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def train(model, args, settings, identity):
    data = Images(args.coco, args.train, args.limit, settings["flip"], settings["seed"])
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, settings["lr"], settings["momentum"], weight_decay=settings["weight_decay"])
    path = args.out / "checkpoint.pth"
    first, done, step = 0, 0, 0
    if path.exists():
        saved = torch.load(path, map_location=args.device, weights_only=True)
        if saved["identity"] != identity:
            sys.exit(f"{path} was made with other settings, data or weights; give another --out, or remove it")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"].cpu())
        first, done, step = saved["epoch"], saved["done"], saved["step"]
        print(f"resumed at epoch {first + 1}, image {done}", flush=True)
    for epoch in range(first, settings["epochs"]):
        model.train()
        data.epoch = epoch
        order = data.order()[done:]
        order = order[: len(order) - len(order) % settings["chunk"]] or order
        loader = torch.utils.data.DataLoader(
            data, settings["chunk"], sampler=order, num_workers=args.workers, collate_fn=lambda rows: tuple(zip(*rows))
        )
        chunks = max(1, min(settings["batch"], len(data)) // settings["chunk"])
        since, summed = time.time(), {}
        for i, (images, targets) in enumerate(loader, 1):
            images = [image.to(args.device) for image in images]
            targets = [{k: v.to(args.device) if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
            losses = model(images, targets)
            loss = sum(losses.values())
            if not torch.isfinite(loss):
                sys.exit(f"loss is {loss.item()} at epoch {epoch + 1}, step {step}: {[t['image_id'] for t in targets]}")
            (loss / chunks).backward()
            summed = {k: summed.get(k, 0.0) + v.item() for k, v in losses.items()}
            done += len(images)
            if i % chunks and i < len(loader):
                continue
            for group in optimizer.param_groups:
                group["lr"] = rate(settings, epoch, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % args.save_every == 0 or i == len(loader):
                shown = ", ".join(f"{k.removeprefix('loss_')} {v / i:.3f}" for k, v in summed.items())
                print(f"epoch {epoch + 1}/{settings['epochs']}, step {step}: {shown}; {i * settings['chunk'] / (time.time() - since):.2f} images/s", flush=True)
            if step % args.save_every == 0:
                save(path, model=model.state_dict(), optimizer=optimizer.state_dict(), rng=torch.get_rng_state(), epoch=epoch, done=done, step=step, identity=identity)
        done = 0
        save(path, model=model.state_dict(), optimizer=optimizer.state_dict(), rng=torch.get_rng_state(), epoch=epoch + 1, done=0, step=step, identity=identity)
    return len(data)


# ---------------------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(model, args):
    """Box and mask mAP of pycocotools, in percent."""
    data = Images(args.coco, args.val, args.limit)
    model.eval()
    found = {"bbox": [], "segm": []}
    loader = torch.utils.data.DataLoader(data, 1, num_workers=args.workers, collate_fn=lambda rows: rows[0])
    for image, target in loader:
        out = {k: v.cpu() for k, v in model([image.to(args.device)])[0].items()}
        for box, label, score, mask in zip(out["boxes"].tolist(), out["labels"].tolist(), out["scores"].tolist(), out["masks"]):
            row = {"image_id": target["image_id"], "category_id": label, "score": score}
            found["bbox"].append(row | {"bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]]})
            rle = coco_mask.encode(np.asfortranarray((mask[0] > 0.5).numpy().astype(np.uint8)))
            found["segm"].append(row | {"segmentation": rle | {"counts": rle["counts"].decode()}})
    scores = {}
    for kind, metric in (("bbox", "box_map"), ("segm", "mask_map")):
        (args.out / f"{kind}.json").write_text(json.dumps(found[kind]))
        if not found[kind]:
            scores[metric] = {"value": 0.0, "detail": "no detection"}
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            run = COCOeval(data.coco, data.coco.loadRes(found[kind]), kind)
            run.params.imgIds = data.ids
            run.evaluate()
            run.accumulate()
            run.summarize()
        names = ["AP", "AP50", "AP75", "AP small", "AP medium", "AP large"]
        scores[metric] = {"value": 100 * run.stats[0], "detail": {n: round(100 * float(v), 4) for n, v in zip(names, run.stats)}}
    return scores, len(data)


def rows(scores, facts, args, settings, seen, measured, seconds):
    """As `mcl-eval` writes its own measurements."""
    full = tomllib.loads(PROTOCOL.read_text())["mask_rcnn"]
    short = [f"limit={args.limit}"] * (args.limit > 0) + [f"{k}={settings[k]}" for k in full if settings[k] != full[k] and k not in ("seed", "chunk")]
    warning = [f"{seen} training and {measured} validation images, not COCO-2017"] if args.limit or seen < 100_000 else []
    for metric, score in scores.items():
        yield {
            "time": datetime.now().astimezone().isoformat(), "command": "detect", "variant": " ".join(short), "protocol": "export-coco",
            "protocol_hash": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16], "dataset": "coco", "metric": metric,
            "value": score["value"], "seed": settings["seed"], "n_train": seen, "n_test": measured, "subject": facts["subject"],
            "run": facts["run"] or "", "method": facts["method"], "arch": facts["arch"], "peer": facts["peer"],
            "pretrained_on": facts["pretrained_on"] or "", "epoch": facts["epoch"], "weights": facts["weights"],
            "weights_hash": facts["weights_hash"], "recipe_hash": facts["recipe_hash"], "image_size": settings["min_size"],
            "mean": facts["mean"], "std": facts["std"], "device": f"{args.device} ({platform.processor() or platform.machine()})",
            "threads": torch.get_num_threads(), "seconds": seconds, "version": facts["version"], "commit": facts["commit"],
            "argv": " ".join(sys.argv), "warnings": warning, "options": {"kind": "export-coco", "mask_rcnn": settings},
            "detail": score["detail"],
        }  # fmt: skip


def main():
    args, settings = options()
    started = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(settings["seed"])
    model, facts = detector(args.export, settings)
    model.to(args.device)
    identity = json.dumps([settings, facts["weights_hash"], facts["target"], str(args.coco.resolve()), args.train, args.limit])
    seen = train(model, args, settings, identity)
    scores, measured = evaluate(model, args)
    run = Path(facts["run"]) if facts["run"] and Path(facts["run"]).is_dir() else args.out
    results = args.results or run
    results.mkdir(parents=True, exist_ok=True)
    with open(results / "results.lock", "w") as lock, open(results / "results.jsonl", "a") as file:
        fcntl.flock(lock, fcntl.LOCK_EX)  # mcl-eval appends under the same lock
        for row in rows(scores, facts, args, settings, seen, measured, time.time() - started):
            file.write(json.dumps(row) + "\n")
            print(f"{row['metric']} {row['value']:.2f}")
    print(f"2 rows -> {results / 'results.jsonl'}")


if __name__ == "__main__":
    main()
