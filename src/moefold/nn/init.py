"""Init that does not depend on the layout: value = f(seed, global name, global index).

Every element is a hash of its global index, so a rank can fill its own shard of a tensor, of any shape, and the full
tensor is the same as if one process had filled it. A normal number is a sum of eight 16-bit uniform ones: integer
arithmetic throughout and one multiplication at the end, so the bits are the same on every device and for every
sharding of the tensor. (The sum is bounded by 4.9 standard deviations; init does not need the tail.)
"""

from __future__ import annotations

import hashlib
from math import prod, sqrt

import torch
from torch import Tensor

from moefold.ops.splitmix64 import logical_shift, mix64

Box = tuple[slice, ...]

_TERMS = 8
_CENTRE = _TERMS * (2**16 - 1) / 2
_SPREAD = sqrt(_TERMS * (2**32 - 1) / 12)  # of a sum of uniform integers 0 .. 2**16 - 1
_CHUNK = 1 << 22  # bounds the memory of the index arithmetic


def normal_part(seed: int, name: str, shape: tuple[int, ...], box: Box, std: float, into: Tensor) -> None:
    """Fill ``into`` with the elements of the global tensor ``name`` that lie in ``box``."""
    key = _key(seed, name)
    flat = into.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        stop = min(start + _CHUNK, flat.numel())
        index = _global_index(torch.arange(start, stop, device=into.device), shape, box)
        first, second = mix64(index * 2 + key), mix64(index * 2 + 1 + key)
        terms = [(word >> shift) & 0xFFFF for word in (first, second) for shift in (0, 16, 32, 48)]
        total = torch.stack(terms).sum(0)
        flat[start:stop] = ((total.double() - _CENTRE) * (std / _SPREAD)).to(into.dtype)


def uniform_part(seed: int, name: str, shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """The elements of a tensor of numbers between 0 and 1, in steps of 2**-32, that lie in ``box``."""
    sizes = [part.stop - part.start for part in box]
    index = _global_index(torch.arange(prod(sizes), device=device), shape, box)
    return (logical_shift(mix64(index * 2 + _key(seed, name)), 32).double() * 2.0**-32).view(sizes)


def _key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _global_index(local: Tensor, shape: tuple[int, ...], box: Box) -> Tensor:
    """The indices in the flattened global tensor of the elements of a flattened box."""
    index = torch.zeros_like(local)
    sizes = [part.stop - part.start for part in box]
    for dim, part in enumerate(box):
        coordinate = local // prod(sizes[dim + 1 :]) % sizes[dim] + part.start
        index += coordinate * prod(shape[dim + 1 :])
    return index


def init_values(kind: str, seed: int, name: str, shape: tuple[int, ...], box: Box, std: float, into: Tensor) -> None:
    """Norm weights are one, or zero where one is added to them; biases, sinks and B of adapters zero, everything else
    normal.

    Linear attention's decays start with many time scales. A of adapters has the variance of PEFT's uniform numbers,
    1 / (3 in), and not ``std``.
    """
    if kind in ("norm", "decay_bias"):
        into.fill_(1.0)
    elif kind == "log_decay":
        # Decays of exp(-A): A is uniform between 0.01 and 16, as in the published model's code.
        into.copy_((uniform_part(seed, name, shape, box, into.device) * (16 - 0.01) + 0.01).log())
    elif kind in ("centred_norm", "bias", "sink", "buffer", "lora_b"):
        into.zero_()
    elif kind == "lora_a":
        normal_part(seed, name, shape, box, 1.0 / sqrt(3.0 * shape[-1]), into)
    else:
        normal_part(seed, name, shape, box, std, into)
