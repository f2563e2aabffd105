#!/usr/bin/env python3
"""Writes a network of timm or torch.hub as a TorchScript file that `mcl-eval ... --torchscript FILE.pt` measures, with a JSON beside it.

    pip install torch timm
    python trace.py timm vit_small_patch16_224 --out vit_small.pt
    python trace.py timm resnet50 --weights my.pth --size 224 --out resnet50.pt
    python trace.py hub facebookresearch/dinov2 dinov2_vits14 --out dinov2.pt
    mcl-eval knn --torchscript vit_small.pt --dataset stl10 --image-size 224

timm networks are made without their classifier: what they give is the pooled feature, one vector an image. A torch.hub network is traced as it is;
where it gives tokens or several tensors, --output and --pool say here, or later in mcl-eval, what the feature is. The JSON holds the name, the side
of the images, their means and deviations, --output and --pool. The traced file is compared with the network on other images, in batches of 1 and 3,
before it is written. Tracing fixes the side of the images where a network's code does (most transformers).
"""
import argparse
import json
import sys
import warnings
from pathlib import Path

import torch

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def stop(message):
    """Wrong input: one line, exit code 2."""
    print(f'error: {" ".join(str(message).split())}', file=sys.stderr)
    sys.exit(2)


def three(text):
    numbers = [float(part) for part in text.split(',')]
    if len(numbers) != 3:
        raise argparse.ArgumentTypeError(f'{text}: three numbers are wanted, for red, green and blue')
    return numbers


def flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', choices=['timm', 'hub'])
    parser.add_argument('name', nargs='+', help='timm: the name of the network; hub: repository (or local folder) and entry')
    parser.add_argument('--out', required=True, type=Path, help='the TorchScript file to write, ending in .pt; the JSON goes beside it')
    parser.add_argument('--random', action='store_true', help='random weights instead of the published ones')
    parser.add_argument('--weights', type=Path, help='a state dict (.pth or .safetensors) to load instead of the published weights')
    parser.add_argument('--size', type=int, help='side of the images [default: what timm says, else 224]')
    parser.add_argument('--mean', type=three, help="channel means [default: what timm says, else ImageNet's]")
    parser.add_argument('--std', type=three, help='channel deviations, likewise')
    parser.add_argument('--output', help='which output is the feature, where there are several: a key, or a place from 0')
    parser.add_argument('--pool', choices=['mean', 'cls'], help='how tokens become one vector')
    parser.add_argument('--seed', type=int, default=0, help='of random weights and of the images it is tried on')
    args = parser.parse_args()
    if len(args.name) != (1 if args.source == 'timm' else 2):
        stop('timm takes one name; hub takes a repository and an entry')
    if args.out.suffix != '.pt':
        stop(f'--out {args.out}: a name that ends in .pt is wanted')
    if args.weights is not None and not args.weights.is_file():
        stop(f'--weights {args.weights}: no such file')
    if args.size is not None and args.size < 1:
        stop(f'--size {args.size}: 1 or more is wanted')
    return args


def state_dict(file):
    """The tensors of a file, under whichever of the usual names they lie."""
    try:
        if file.suffix == '.safetensors':
            from safetensors.torch import load_file
            return load_file(file)
        state = torch.load(file, map_location='cpu', weights_only=True)
    except Exception as e:
        stop(f'{file}: no state dict that can be opened ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ""})')
    while isinstance(state, dict) and (inner := [state[k] for k in ('state_dict', 'model', 'teacher') if isinstance(state.get(k), dict)]):
        state = inner[0]
    if not isinstance(state, dict):
        stop(f'{file}: holds a {type(state).__name__}; a state dict is wanted')
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    wrapped = all(name.startswith('module.') for name in tensors)
    return {name.removeprefix('module.'): value for name, value in tensors.items()} if wrapped else tensors


def make(args):
    """The network, its side, means and deviations."""
    published = not args.random and args.weights is None
    if args.source == 'timm':
        import timm
        of_size = {'img_size': args.size} if args.size else {}
        try:
            net = timm.create_model(args.name[0], pretrained=published, num_classes=0, **of_size)
        except TypeError:  # convolutional networks take images of any size
            net = timm.create_model(args.name[0], pretrained=published, num_classes=0)
        except Exception as e:
            stop(f'timm {args.name[0]}: {e}')
        known = timm.data.resolve_data_config({}, model=net)
        size, mean, std = known['input_size'][-1], known['mean'], known['std']
    else:
        repository, entry = args.name
        where = 'local' if Path(repository).is_dir() else 'github'
        try:
            net = torch.hub.load(repository, entry, source=where, pretrained=published)
        except Exception as e:
            stop(f'torch.hub {repository} {entry}: {e}')
        size, (mean, std) = 224, IMAGENET
    if args.weights is not None:
        try:
            missing, unexpected = net.load_state_dict(state_dict(args.weights), strict=False)
        except RuntimeError as e:  # other shapes
            stop(f'{args.weights} does not fit: {e}')
        unexpected = [name for name in unexpected if not name.startswith(('head.', 'fc.', 'classifier.'))]
        if missing or unexpected:
            stop(f'{args.weights} does not fit: missing {missing[:4]}, unexpected {unexpected[:4]}')
    return net.eval(), args.size or size, args.mean or list(mean), args.std or list(std)


def tensors(answer):
    if isinstance(answer, torch.Tensor):
        return [answer]
    return list(answer.values()) if isinstance(answer, dict) else list(answer)


def main():
    args = flags()
    torch.manual_seed(args.seed)
    warnings.simplefilter('ignore', torch.jit.TracerWarning)  # whether the trace holds is seen below
    net, size, mean, std = make(args)
    with torch.no_grad():
        traced = torch.jit.trace(net, torch.randn(2, 3, size, size), strict=False)
        worst = 0.0
        for batch in (1, 3):
            images = torch.randn(batch, 3, size, size)
            for ours, theirs in zip(tensors(net(images)), tensors(traced(images)), strict=True):
                worst = max(worst, ((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-12)).item())
    if worst > 1e-4:
        raise SystemExit(f'the traced network answers otherwise than the network itself, by {worst:.1e}: its code depends on its input')
    about = {'name': args.name[-1], 'image_size': size, 'mean': list(mean), 'std': list(std), 'output': args.output, 'pool': args.pool}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_suffix('.pt.tmp')
    torch.jit.save(traced, partial)
    args.out.with_suffix('.json').write_text(json.dumps(about, indent=1) + '\n')
    partial.rename(args.out)
    shapes = ', '.join(str(tuple(t.shape)) for t in tensors(net(torch.zeros(1, 3, size, size))))
    print(f'{args.out}: {args.name[-1]} at {size} x {size}, gives {shapes}; largest difference to the network {worst:.1e}')


main()
