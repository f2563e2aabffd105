"""Mask R-CNN with FPN on COCO-2017 from a backbone that `mcl-eval export` wrote: the other half of the paper's transfer table.

    python detect.py --export runs/r50/export/peer-0/torchvision --coco /data/coco --out runs/r50/detect
    torchrun --nproc-per-node 8 detect.py ...      # the same on eight GPUs

Settings come from protocols/coco/mask_rcnn.toml. Killed at any point, the same command goes on where it was. The last
lines append box and mask mAP to the results of the run, from where `mcl-eval report` puts them beside the paper's.
"""
import argparse
import contextlib
import csv
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
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection import MaskRCNN
from torchvision.ops import FrozenBatchNorm2d, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

PROTOCOL = Path(__file__).parent / "mask_rcnn.toml"
# The columns of a new results.csv, as mcl-eval writes it.
COLUMNS = (
    "time command variant protocol protocol_hash dataset metric value ci_low ci_high top5 seed n_train n_test split_hash subject run method arch"
    " peer pretrained_on epoch weights weights_hash recipe_hash image_size mean std device threads seconds version commit argv id"
).split()


def stop(message):
    """Wrong input: one line, exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True, help="folder of a torchvision or torchscript export")
    parser.add_argument("--coco", type=Path, required=True, help="folder with train2017, val2017 and annotations")
    parser.add_argument("--train", default="train2017", help="split to train on")
    parser.add_argument("--val", default="val2017", help="split to measure on")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and detections")
    parser.add_argument("--results", type=Path, help="folder whose results get the rows [default: the run that the export lies in, or --out]")
    parser.add_argument("--protocol", type=Path, default=PROTOCOL)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of [mask_rcnn]")
    parser.add_argument("--limit", type=int, default=0, help="so many images of each split only: a smoke run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu; with torchrun one GPU a process")
    parser.add_argument("--workers", type=int, default=2, help="processes that read images, for each process that trains")
    parser.add_argument("--save-every", type=int, default=200, metavar="STEPS", help="steps between checkpoints")
    args = parser.parse_args()
    if not args.protocol.is_file():
        stop(f"no file {args.protocol}; accepted: a TOML with [mask_rcnn]")
    settings = tomllib.loads(args.protocol.read_text())["mask_rcnn"]
    for text in args.set:
        key, _, value = text.partition("=")
        if key not in settings:
            stop(f"--set {text}: unknown key; known: {', '.join(settings)}")
        try:
            settings[key] = value if isinstance(settings[key], str) else tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            stop(f"--set {text}: `{value}` is no value of TOML; {key} is {settings[key]} by default")
    for key, accepted in (("norm", ("eval", "frozen", "train")), ("amp", ("off", "bf16", "fp16"))):
        if settings[key] not in accepted:
            stop(f"{key} = {settings[key]}; accepted: {', '.join(accepted)}")
    if settings["batch"] % settings["chunk"]:
        stop(f"batch = {settings['batch']} is no multiple of chunk = {settings['chunk']}")
    if args.save_every < 1:
        stop(f"--save-every {args.save_every}; accepted: 1 or more")
    if not (args.export / "export.json").is_file():
        stop(f"no {args.export / 'export.json'}; accepted: a folder that `mcl-eval export --to torchvision` made")
    for split in (args.train, args.val):
        for path in (args.coco / split, args.coco / "annotations" / f"instances_{split}.json"):
            if not path.exists():
                stop(f"no {path}; --coco wants a folder with {args.train}/, {args.val}/ and annotations/; other splits: --train, --val")
    return args, settings


def seed_of(*numbers):
    """The seed for one place in the training. What is drawn there depends on nothing else: not on the past, nor on who draws it."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little") >> 1


# ------------------------------------------------------------------------------------------------------------ processes


class World:
    """The processes that train together; one alone without torchrun."""

    def __init__(self, args):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if args.device == "cuda" and self.size > 1:
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(args.device)
        if self.size > 1:
            distributed.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
        self.first = self.rank == 0

    def say(self, text):
        if self.first:
            print(text, flush=True)

    def sum(self, values, device):
        """The sum over all processes."""
        total = torch.tensor(values, dtype=torch.float64, device=device)
        if self.size > 1:
            distributed.all_reduce(total)
        return total.tolist()

    def gather(self, value):
        """What every process has, for the first; None for the others."""
        if self.size == 1:
            return [value]
        all_values = [None] * self.size if self.first else None
        distributed.gather_object(value, all_values)
        return all_values

    def end(self):
        if self.size > 1:
            distributed.barrier()
            distributed.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------- data


class Images(torch.utils.data.Dataset):
    """Images of a split with their boxes, masks and labels; crowds and empty boxes are left out, as in MMDetection."""

    def __init__(self, root, split, limit, settings=None):
        with contextlib.redirect_stdout(io.StringIO()):
            self.coco = COCO(root / "annotations" / f"instances_{split}.json")
        self.folder, self.settings, self.epoch = root / split, settings, 0
        self.categories = sorted(self.coco.cats)  # COCO numbers its 80 classes up to 90; labels are 1 to 80
        self.labels = {category: i + 1 for i, category in enumerate(self.categories)}
        self.ids = sorted(self.coco.imgs)
        if settings:  # training: images without objects and tiny ones teach nothing
            side = settings["min_side"]
            sides = {i: min(self.coco.imgs[i]["width"], self.coco.imgs[i]["height"]) for i in self.ids}
            self.ids = [i for i in self.ids if sides[i] >= side and self.objects(i)]
        self.ids = self.ids[:limit] if limit else self.ids
        if not self.ids:
            stop(f"{split} has no image to use")

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
        if self.settings:
            draw = torch.Generator().manual_seed(seed_of("flip", self.settings["seed"], self.epoch, at))
            if torch.rand(1, generator=draw).item() < self.settings["flip"]:
                image, masks = image.flip(-1), masks.flip(-1)
                boxes = boxes[:, [2, 1, 0, 3]] * torch.tensor([-1, 1, -1, 1]) + torch.tensor([info["width"], 0, info["width"], 0])
        labels = torch.tensor([self.labels[a["category_id"]] for a in objects], dtype=torch.int64)
        return image, {"boxes": boxes, "labels": labels, "masks": masks, "image_id": info["id"]}

    def chunks(self):
        """The images of this epoch, in lists for one forward pass each: wide ones together and high ones together, as in MMDetection."""
        size = self.settings["chunk"]
        draw = torch.Generator().manual_seed(seed_of("order", self.settings["seed"], self.epoch))
        waiting, chunks = {True: [], False: []}, []
        for at in torch.randperm(len(self), generator=draw).tolist():
            info = self.coco.imgs[self.ids[at]]
            group = waiting[info["width"] >= info["height"] or not self.settings["group_by_aspect"]]
            group.append(at)
            if len(group) == size:
                chunks.append(group[:])
                group.clear()
        rest = waiting[True] + waiting[False]
        chunks += [rest[i : i + size] for i in range(0, len(rest) - size + 1, size)]
        return chunks or [rest]


def loader_of(data, batches, workers, collate):
    """Its own generator: an iterator takes a number from the global one, which would make the draws of a resumed run others."""
    return torch.utils.data.DataLoader(
        data, batch_sampler=batches, num_workers=workers, collate_fn=collate, generator=torch.Generator().manual_seed(0)
    )


def columns(rows):
    return tuple(zip(*rows))


def only(rows):
    return rows[0]


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
        stop(f"{folder} holds a classifier; accepted: a backbone (without --with-classifier)")
    file = folder / facts["file"]
    if facts["target"] == "torchscript":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(file, map_location="cpu")
    if facts["target"] != "torchvision":
        stop(f"{folder} is for {facts['target']}; accepted: torchvision, torchscript")
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


def detector(folder, facts, settings, classes):
    """Proposals that train the heads and samples of a bin are MMDetection's: 1000 of an image, and as many as the box asks for."""
    if facts["strides"] != [4, 8, 16, 32]:
        stop(f"{folder}: {facts['arch']} has maps of strides {facts['strides']}; Mask R-CNN's anchors are for 4, 8, 16 and 32, as ImageNet networks have")
    body = body_of(folder, facts, settings["norm"])
    freeze(body, facts, settings["frozen_stages"], settings["norm"])
    maps = [str(l) for l in range(4)]
    return MaskRCNN(
        Backbone(body, facts["channels"], settings["norm"]),
        classes + 1,
        min_size=settings["min_size"],
        max_size=settings["max_size"],
        image_mean=facts["mean"],
        image_std=facts["std"],
        rpn_post_nms_top_n_train=settings["proposals"],
        box_roi_pool=MultiScaleRoIAlign(maps, 7, 0),
        mask_roi_pool=MultiScaleRoIAlign(maps, 14, 0),
    )


# ------------------------------------------------------------------------------------------------------------ training


def rate(settings, epoch, seen):
    """Linear warm-up over the first images of all, then steps down; scaled with the images of a step."""
    lr = settings["lr"] * settings["batch"] / 16 * 0.1 ** sum(epoch >= m for m in settings["milestones"])
    warm = min(1.0, seen / settings["warmup"]) if settings["warmup"] else 1.0
    return lr * (settings["warmup_factor"] * (1 - warm) + warm)


def save(path, **state):
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def autocast(settings, device):
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.split(":")[0], kinds.get(settings["amp"]), enabled=settings["amp"] != "off")


def train(model, data, args, settings, identity, world):
    per = settings["batch"] // settings["chunk"]
    if world.size > per:
        stop(f"{world.size} processes, but a step of {settings['batch']} images has {per} chunks of {settings['chunk']}; use fewer, or --set chunk=1")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, settings["lr"], settings["momentum"], weight_decay=settings["weight_decay"])
    scaler = torch.amp.GradScaler(args.device.split(":")[0], enabled=settings["amp"] == "fp16")
    path = args.out / "checkpoint.pth"
    first, done, step, seen = 0, 0, 0, 0
    if path.exists():
        saved = torch.load(path, map_location=args.device, weights_only=True)
        if saved["identity"] != identity:
            stop(f"{path} was made with other settings, data or weights; give another --out, or remove it")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        first, done, step, seen = saved["epoch"], saved["done"], saved["step"], saved["seen"]
        world.say("training is finished" if first == settings["epochs"] else f"resumed at epoch {first + 1}, after step {done} of it")
    trained = model
    if world.size > 1:
        ids = [torch.device(args.device).index] if args.device.startswith("cuda") else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch calls broadcast_buffers otherwise
            trained = DistributedDataParallel(model, ids, broadcast_buffers=settings["norm"] == "train")

    def keep(epoch, done):
        if world.first:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            save(path, **state, epoch=epoch, done=done, step=step, seen=seen, identity=identity)

    for epoch in range(first, settings["epochs"]):
        trained.train()
        data.epoch = epoch
        chunks = data.chunks()
        steps = [chunks[i : i + per] for i in range(0, len(chunks), per)]
        # A process takes every world.size-th chunk of a step. Where one is left without, it takes the first again and gives it no weight.
        turns = [[(i, i < len(s)) for i in range(world.rank, -(-len(s) // world.size) * world.size, world.size)] for s in steps]
        batches = [steps[at][i if counts else 0] for at in range(done, len(steps)) for i, counts in turns[at]]
        loader = iter(loader_of(data, batches, args.workers, columns))
        since, summed, passes, images_since = time.time(), {}, 0, 0
        for at in range(done, len(steps)):
            for i, counts in turns[at]:
                images, targets = next(loader)
                images = [image.to(args.device) for image in images]
                targets = [{k: v.to(args.device) if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
                # Which boxes are sampled, and what drop-path drops: on the CPU and on every GPU.
                torch.manual_seed(seed_of("pass", settings["seed"], epoch, at, i))
                last = (i, counts) == turns[at][-1]
                with contextlib.nullcontext() if last or world.size == 1 else trained.no_sync():
                    with autocast(settings, args.device):
                        losses = trained(images, targets)
                    loss = sum(losses.values())
                    if not torch.isfinite(loss):
                        sys.exit(f"loss is {loss.item()} at epoch {epoch + 1}, step {step}: {[t['image_id'] for t in targets]}")
                    # The gradient of a step is the mean over its chunks; DistributedDataParallel takes the mean over processes.
                    scaler.scale(loss * (world.size / len(steps[at]) if counts else 0.0)).backward()
                if counts:
                    passes += 1
                    summed = {k: summed.get(k, 0.0) + v.item() for k, v in losses.items()}
            for group in optimizer.param_groups:
                group["lr"] = rate(settings, epoch, seen)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            step, of_step = step + 1, sum(len(chunk) for chunk in steps[at])
            seen, images_since = seen + of_step, images_since + of_step
            if step % args.save_every == 0 or at + 1 == len(steps):
                names = sorted(summed) or ["loss_box_reg", "loss_classifier", "loss_mask", "loss_objectness", "loss_rpn_box_reg"]
                *totals, count = world.sum([summed.get(name, 0.0) for name in names] + [passes], args.device)
                shown = ", ".join(f"{name.removeprefix('loss_')} {total / max(count, 1):.3f}" for name, total in zip(names, totals))
                speed = images_since / (time.time() - since)
                world.say(f"epoch {epoch + 1}/{settings['epochs']}, step {step}: {shown}; {speed:.2f} images/s")
            if step % args.save_every == 0:
                keep(epoch, at + 1)
        done = 0
        keep(epoch + 1, 0)


# ---------------------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(model, args, settings, world):
    """Box and mask mAP of pycocotools, in percent; every process finds in its share of the images, the first one counts."""
    data = Images(args.coco, args.val, args.limit)
    model.eval()
    found = {"bbox": [], "segm": []}
    share = [[at] for at in range(world.rank, len(data), world.size)]
    for image, target in loader_of(data, share, args.workers, only):
        with autocast(settings, args.device):
            out = model([image.to(args.device)])[0]
        out = {k: v.float().cpu() if v.is_floating_point() else v.cpu() for k, v in out.items()}
        for box, label, score, mask in zip(out["boxes"].tolist(), out["labels"].tolist(), out["scores"].tolist(), out["masks"]):
            row = {"image_id": target["image_id"], "category_id": data.categories[label - 1], "score": score}
            found["bbox"].append(row | {"bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]]})
            rle = coco_mask.encode(np.asfortranarray((mask[0] > 0.5).numpy().astype(np.uint8)))
            found["segm"].append(row | {"segmentation": rle | {"counts": rle["counts"].decode()}})
    parts = world.gather(found)
    if not world.first:
        return None, len(data)
    scores = {}
    for kind, metric in (("bbox", "box_map"), ("segm", "mask_map")):
        # In the order of the images, whoever found them.
        rows = sorted((row for part in parts for row in part[kind]), key=lambda row: row["image_id"])
        (args.out / f"{kind}.json").write_text(json.dumps(rows))
        if not rows:
            scores[metric] = {"value": 0.0, "detail": "no detection"}
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            run = COCOeval(data.coco, data.coco.loadRes(rows), kind)
            run.params.imgIds = data.ids
            run.evaluate()
            run.accumulate()
            run.summarize()
        names = ["AP", "AP50", "AP75", "AP small", "AP medium", "AP large"]
        scores[metric] = {"value": 100 * run.stats[0], "detail": {n: round(100 * float(v), 4) for n, v in zip(names, run.stats)}}
    return scores, len(data)


# -------------------------------------------------------------------------------------------------------------- results


def rows_of(scores, facts, args, settings, seen, measured, seconds, world):
    """As `mcl-eval` writes its own measurements."""
    full = tomllib.loads(PROTOCOL.read_text())["mask_rcnn"]
    short = [f"limit={args.limit}"] * (args.limit > 0) + [f"{k}={settings[k]}" for k in full if settings[k] != full[k] and k not in ("seed", "chunk")]
    warning = [f"{seen} training and {measured} validation images, not COCO-2017"] if args.limit or seen < 100_000 else []
    for metric, score in scores.items():
        yield {
            "schema": 1, "id": "", "time": datetime.now().astimezone().isoformat(), "command": "detect", "variant": " ".join(short),
            "protocol": "export-coco",
            "protocol_hash": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16], "dataset": "coco", "metric": metric,
            "value": score["value"], "seed": settings["seed"], "n_train": seen, "n_test": measured, "subject": facts["subject"],
            "run": facts["run"] or "", "method": facts["method"], "arch": facts["arch"], "peer": facts["peer"],
            "pretrained_on": facts["pretrained_on"] or "", "epoch": facts["epoch"], "weights": facts["weights"],
            "weights_hash": facts["weights_hash"], "recipe_hash": facts["recipe_hash"], "image_size": settings["min_size"],
            "mean": facts["mean"], "std": facts["std"], "device": f"{world.size} x {args.device.split(':')[0]} ({platform.processor() or platform.machine()})",
            "threads": torch.get_num_threads(), "seconds": seconds, "version": facts["version"], "commit": facts["commit"],
            "argv": " ".join(sys.argv), "warnings": warning, "options": {"kind": "export-coco", "mask_rcnn": settings},
            "detail": score["detail"],
        }  # fmt: skip


def results_folder(args, facts):
    """The run that the export lies in (RUN/export/NETWORK/FORMAT), wherever the command was started; else the run it was made from, else --out."""
    around = args.export.resolve().parents
    beside = [Path(facts["run"])] if facts["run"] else []
    for run in [around[2]] * (len(around) > 2) + beside:
        if (run / "recipe.toml").is_file():
            return run
    return args.out


def record(folder, rows):
    """Appends the rows to results.jsonl and results.csv, but those that are there already. mcl-eval appends under the same lock."""
    same = ("command", "variant", "protocol_hash", "dataset", "metric", "value", "seed", "n_train", "n_test", "subject", "weights_hash")
    folder.mkdir(parents=True, exist_ok=True)
    lines, table = folder / "results.jsonl", folder / "results.csv"
    with open(folder / "results.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in (lines, table):  # half a line is left by a process that was killed
            whole = path.read_bytes() if path.exists() else b""
            if whole and not whole.endswith(b"\n"):
                path.write_bytes(whole[: whole.rfind(b"\n") + 1])
        there = [json.loads(line) for line in lines.read_text().splitlines() if line.strip()] if lines.exists() else []
        new = [row for row in rows if not any(all(old.get(k) == row[k] for k in same) for old in there)]
        with open(lines, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in new)
        empty = not table.exists() or table.stat().st_size == 0
        header = COLUMNS if empty else next(csv.reader(open(table)))
        with open(table, "a", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            if empty:
                out.writerow(header)
            cell = lambda v: "" if v is None else v if isinstance(v, str) else json.dumps(v, separators=(",", ":"))
            out.writerows([[cell(row.get(name)) for name in header] for row in new])
    return len(new)


def main():
    args, settings = options()
    facts = json.loads((args.export / "export.json").read_text())
    world = World(args)
    started = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(settings["seed"])
    data = Images(args.coco, args.train, args.limit, settings)
    model = detector(args.export, facts, settings, len(data.categories)).to(args.device)
    identity = json.dumps([settings, facts["weights_hash"], facts["target"], str(args.coco.resolve()), args.train, args.limit])
    train(model, data, args, settings, identity, world)
    finished = args.out / "scores.json"
    known = json.loads(finished.read_text()) if finished.exists() else {}
    if known.get("identity") == identity and known.get("val") == args.val:
        scores, measured, seconds = known["scores"], known["measured"], known["seconds"]
    else:
        scores, measured = evaluate(model, args, settings, world)
        seconds = time.time() - started
    if world.first:
        said = {"identity": identity, "val": args.val, "scores": scores, "measured": measured, "seconds": seconds}
        finished.with_suffix(".tmp").write_text(json.dumps(said))
        os.replace(finished.with_suffix(".tmp"), finished)
        rows = list(rows_of(scores, facts, args, settings, len(data), measured, seconds, world))
        folder = args.results or results_folder(args, facts)
        new = record(folder, rows)
        for row in rows:
            print(f"{row['metric']} {row['value']:.2f}")
        print(f"{new} rows -> {folder / 'results.csv'}" if new else f"the rows are in {folder / 'results.csv'} already")
    world.end()


if __name__ == "__main__":
    main()
