"""What a checkpoint is made of: boxes of global tensors.

A tensor has a global name, shape and dtype that no layout changes. A rank writes the boxes of which it is the primary
replica: one slice per dim of the global tensor. A rank of another layout reads other boxes, each from the written ones
that it intersects. So a checkpoint does not depend on ranks beyond "this file has these boxes", and any layout can read
it. `compare` reads two sources, whose layouts may differ, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Box = tuple[slice, ...]

# The names that safetensors files use.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Records that belong to a rank, not to the model: another world size ignores them.
RANK_RECORDS = ("rng/",)


@dataclass(frozen=True)
class TensorSpec:
    """A global tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ChunkSpec:
    """A box of a global tensor, without its numbers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box

    @property
    def sizes(self) -> tuple[int, ...]:
        return sizes_of(self.box)

    @property
    def corner(self) -> tuple[int, ...]:
        """Of several boxes of one tensor, it tells which."""
        return _corner(self.box)

    @property
    def num_elements(self) -> int:
        return prod(self.sizes)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Chunk:
    """A rank's shard of a global tensor: ``tensor`` holds exactly the elements of ``box``."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor

    @property
    def spec(self) -> ChunkSpec:
        return ChunkSpec(self.name, self.tensor.dtype, self.shape, self.box)


class TensorSource(Protocol):
    """Anything that global tensors can be read from, whole or by the box."""

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, box: Box | None = None) -> Tensor: ...


def is_rank_record(name: str) -> bool:
    return name.startswith(RANK_RECORDS)


def whole(shape: Sequence[int]) -> Box:
    return tuple(slice(0, size) for size in shape)


def sizes_of(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def volume(box: Box) -> int:
    return prod(sizes_of(box))


def intersection(a: Box, b: Box) -> Box | None:
    """The common elements of two boxes; None if there are none."""
    both = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return both if all(part.start < part.stop for part in both) else None


def inside(part: Box, outer: Box) -> Box:
    """``part`` in coordinates relative to the corner of ``outer``."""
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(part, outer, strict=True))


def cover_fault(outer: Box, boxes: Sequence[Box]) -> tuple[tuple[int, ...], int] | None:
    """None if every element of ``outer`` is in exactly one box and none is outside of it; else the first that is not,
    and in how many boxes too many it is: -1 if it is in none.

    Count the boxes that an element is in, minus one inside ``outer``: a step function, zero everywhere if and only if
    its mixed difference over all dims is. That difference is +1 or -1 at each box's corners and 0 elsewhere, so the
    corners are sorted and their signs added up: O(n log n) for n boxes, where comparing pairs is quadratic. At the
    first corner that is left, the function has its sign's value.
    """
    boxes = [box for box in boxes if volume(box)]
    if not volume(outer):
        return None if not boxes else (_corner(boxes[0]), 1)
    bounds = np.array([[(part.start, part.stop) for part in box] for box in (outer, *boxes)], np.int64)
    bounds = bounds.reshape(len(boxes) + 1, len(outer), 2)
    weights = np.array([-1] + [1] * len(boxes), np.int64)
    # Dims in which every box is as long as ``outer`` tell nothing.
    cut = np.flatnonzero((bounds != bounds[:1]).any(axis=(0, 2)))
    sides = list(product((0, 1), repeat=len(cut)))
    corners = np.concatenate([bounds[:, cut, side] for side in sides])
    signs = np.concatenate([weights * (-1) ** sum(side) for side in sides])
    order = np.lexsort(corners.T[::-1]) if len(cut) else np.arange(len(corners))
    corners, signs = corners[order], signs[order]
    starts = np.flatnonzero(np.append(True, (corners[1:] != corners[:-1]).any(axis=1)))
    sums = np.add.reduceat(signs, starts)
    left = np.flatnonzero(sums)
    if not len(left):
        return None
    point = list(_corner(outer))
    for dim, index in zip(cut, corners[starts[left[0]]], strict=True):
        point[dim] = int(index)
    return tuple(point), int(sums[left[0]])


def _corner(box: Box) -> tuple[int, ...]:
    return tuple(part.start for part in box)


@dataclass(frozen=True)
class TensorComparison:
    """``verdict`` is "equal bits", "different", "another shape", "another dtype", "only here" or "only there"."""

    name: str
    verdict: str
    # The largest difference of two numbers; None where there is nothing to subtract, or something not finite.
    largest: float | None = None

    @property
    def same(self) -> bool:
        return self.verdict == "equal bits"


def compare(here: TensorSource, there: TensorSource) -> Iterator[TensorComparison]:
    """One tensor at a time, in the order of their names."""
    names_here, names_there = set(here.names()), set(there.names())
    for name in sorted(names_here | names_there):
        if name not in names_there:
            yield TensorComparison(name, "only here")
        elif name not in names_here:
            yield TensorComparison(name, "only there")
        elif here.shape(name) != there.shape(name):
            yield TensorComparison(name, "another shape")
        elif here.dtype(name) != there.dtype(name):
            yield TensorComparison(name, "another dtype")
        else:
            yield _compared(name, here.read(name), there.read(name))


def _compared(name: str, a: Tensor, b: Tensor) -> TensorComparison:
    # As bytes: two NaNs of equal bits are the same, zero and minus zero are not.
    if torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)):
        return TensorComparison(name, "equal bits", 0.0)
    largest = float((a.double() - b.double()).abs().max())
    return TensorComparison(name, "different", largest if largest == largest and largest != float("inf") else None)
