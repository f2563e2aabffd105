#!/usr/bin/env python3
"""Small state dicts as torch.save writes them, for the reader of tests/weights.rs. Written with torch 2.13.0; no random numbers.

    pip install torch==2.13.0
    python tests/golden/make_state_dicts.py

`mixed.pth`: every type that weights come in, a transposed view, a slice that shares its storage, a scalar, an empty tensor, a Parameter,
inside {'state_dict': ..., 'epoch': 3}. `legacy.pth`: the same in the format before torch 1.6. The value at flat index j is j - 2 (in the
type), but for `flag`, which is j % 2. `form-*.pth`: two small tensors nested as RepDistiller, mdistiller and others nest a state dict.
"""
import argparse
from collections import OrderedDict
from pathlib import Path
import torch

ramp = lambda *shape: (torch.arange(torch.Size(shape).numel()) - 2).reshape(shape)
shared = torch.arange(-2, 10).float()
state = OrderedDict(
    float=ramp(2, 3).float(), double=ramp(3).double(), half=ramp(4).half(), bfloat16=ramp(4).bfloat16(), long=ramp(2, 2), int=ramp(2).int(),
    short=ramp(3).short(), char=ramp(3).char(), byte=(ramp(3) + 2).byte(), flag=torch.arange(3) % 2 == 1, scalar=torch.tensor(-2),
    transposed=ramp(2, 3).float().t().contiguous().t(), sliced=shared[:4].view(2, 2), offset=(shared[4:8] - 0), tail=shared[4:],
    empty=torch.zeros(0, 3), parameter=torch.nn.Parameter(ramp(2).float()))
here = Path(__file__).parent
torch.save({'state_dict': state, 'epoch': 3, 'best': 0.5}, here / 'mixed.pth')
torch.save({'state_dict': state, 'epoch': 3, 'best': 0.5}, here / 'legacy.pth', _use_new_zipfile_serialization=False)

small = OrderedDict({'conv.weight': ramp(2, 3).float(), 'fc.bias': ramp(2).float()})
under = lambda prefix: {f'{prefix}{name}': tensor for name, tensor in small.items()}
forms = {
    'student': {'epoch': 240, 'model': small, 'best_acc': torch.tensor(71.5)},
    'teacher': {'opt': argparse.Namespace(model='net', lr=0.05), 'model': small, 'best_acc': torch.tensor(71.5),
                'optimizer': {'state': {0: {'momentum_buffer': torch.ones(3)}}, 'param_groups': [{'lr': 0.05, 'params': [0]}]}},
    'distiller': {'epoch': 3, 'model': {**under('module.student.'), **under('module.teacher.')}, 'best_acc': 71.5},
    'deep': {'checkpoint': {'snet': small, 'acc': torch.tensor(1.0)}, 'args': None},
    'pair': {'model_s': small, 'model_t': small, 'acc': torch.tensor(1.0)},
}
for name, form in forms.items():
    torch.save(form, here / f'form-{name}.pth')
