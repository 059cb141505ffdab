"""Random bits for stochastic rounding that depend on the element, and not on which rank holds it or what ran before.

Stochastic rounding is right on average: a value between two neighbours of the format becomes the upper one with the
probability of its distance from the lower one. The random bits are a hash of a key (the run's seed, the step and the
parameter's name) and of the element's index in the global tensor, as in counter-based generators (Salmon et al. 2011).
So any layout rounds every element in the same way, a resumed run continues to the bit, and no generator has a state.

The hash is the finalizer of MurmurHash3 (Appleby 2011), in 32-bit integers, which CPUs and GPUs multiply fast. One hash
gives 16 bits for each of the two moments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

Box = tuple[slice, ...]

# As signed 32-bit numbers: torch multiplies modulo 2**32.
_FIRST, _SECOND, _PAGE = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32), 0x9E3779B9 - (1 << 32)
# Bits of one random number; a hash has two.
NOISE_BITS = 16


def noise_key(seed: int, step: int, name: str) -> int:
    """A signed 32-bit number."""
    digest = hashlib.sha256(f"moments/{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def element_hash(indices: Tensor, key: int, size: int) -> Tensor:
    """32 random bits for each index of a global tensor of ``size`` elements, as int32."""
    mixed = indices.to(torch.int32).bitwise_xor_(key)
    if size > 1 << 32:
        # The upper half of an index is zero in smaller tensors.
        mixed.add_((indices >> 32).to(torch.int32).mul_(_PAGE))
    mixed.bitwise_xor_(_shifted(mixed, 16)).mul_(_FIRST)
    mixed.bitwise_xor_(_shifted(mixed, 13)).mul_(_SECOND)
    return mixed.bitwise_xor_(_shifted(mixed, 16))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Right by so many bits, with zeros from the left; torch's own shift repeats the sign."""
    return (bits >> by).bitwise_and_((1 << (32 - by)) - 1)


def noise(hashed: Tensor, number: int) -> Tensor:
    """The 16 random bits with this ``number`` (0 or 1) of each hash, as int32 from 0 to 65535."""
    return _shifted(hashed, NOISE_BITS) if number else hashed.bitwise_and((1 << NOISE_BITS) - 1)


def global_indices(
    shape: Sequence[int], boxes: Sequence[Box], start: int, stop: int, device: torch.device | str
) -> Tensor:
    """Indices in the flattened global tensor of ``shape``, of the elements ``start`` to ``stop`` of all ``boxes``.

    The elements of a box are in row-major order, and the boxes follow each other.
    """
    found, first = [], 0
    for box in boxes:
        size = prod(part.stop - part.start for part in box)
        low, high = max(start, first), min(stop, first + size)
        if low < high:
            found.append(_indices_in_box(shape, box, low - first, high - first, device))
        first += size
    if not found:
        return torch.empty(0, dtype=torch.int64, device=device)
    return found[0] if len(found) == 1 else torch.cat(found)


def _indices_in_box(shape: Sequence[int], box: Box, start: int, stop: int, device: torch.device | str) -> Tensor:
    """Dims that the box has whole are joined to the dim before, so that a contiguous box needs no division."""
    dims = _joined(shape, box)
    position = torch.arange(start, stop, dtype=torch.int64, device=device)
    if not dims:
        return position
    index = torch.zeros_like(position) if len(dims) > 1 else None
    stride = 1
    for number, (size, first, length) in enumerate(reversed(dims)):
        outermost = number == len(dims) - 1
        coordinate = position if outermost else position % length
        if not outermost:
            position = position // length
        step = coordinate.add_(first).mul_(stride)
        index = step if index is None else index.add_(step)
        stride *= size
    assert index is not None
    return index


def _joined(shape: Sequence[int], box: Box) -> list[tuple[int, int, int]]:
    """(size of the dim, first index, length of the slice) of as few dims as describe the box."""
    dims: list[tuple[int, int, int]] = []
    for size, part in zip(shape, box, strict=True):
        length = part.stop - part.start
        if dims and length == size:
            before = dims.pop()
            dims.append((before[0] * size, before[1] * size, before[2] * size))
        else:
            dims.append((size, part.start, length))
    return dims
