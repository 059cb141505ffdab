"""Weights of a flat bucket as codes of one byte: narrowed in shards, gathered narrow (``precision.gather: narrow``).

Each rank narrows the range of main weights that it updates, and the codes are gathered: a quarter of the bytes of
float32. A range may end inside of a block, so the largest magnitudes of all blocks are maximised over the ranks first.
Every rank then computes the same scales from them.

    start     the largest magnitudes of this rank's range; their all-reduce starts
    finish    waits for it; scales of all blocks, and codes of this rank's range

Codes and scales are those of the whole weight narrowed in one process, bit for bit, and go to matmuls as they are
(`NarrowWeights`): no weight is narrowed twice, and none is held wide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor
from torch.distributed import Work

from moefold.blueprint.flat_layout import FlatBucket, FlatParameter, boxes_of_range
from moefold.comm.collectives import start_all_reduce_max
from moefold.comm.process_groups import Group
from moefold.config.casts import Cast
from moefold.precision.quantize import FLOAT8, Quantized
from moefold.precision.quantize_parts import codes_of, merge_amax, scales_of


@dataclass
class FlatCodes:
    """``codes``: of the whole bucket, as bytes. ``amax`` and ``scale``: of the blocks of its parameters, one after the
    other. ``owned``: the range that this rank narrows."""

    layout: FlatBucket
    cast: Cast
    shard: Group
    owned: range
    codes: Tensor
    amax: Tensor
    scale: Tensor
    reducing: list[Work] = field(default_factory=list)

    def start(self, main: Tensor) -> None:
        self.amax.zero_()
        for where, amax, cut in self._owned_parts():
            for box, values in _by_box(where, cut, main, self.owned.start):
                merge_amax(amax, values, box, self.cast)
        self.reducing = start_all_reduce_max(self.amax, self.shard)

    def finish(self, main: Tensor) -> None:
        for work in self.reducing:
            work.wait()
        self.reducing.clear()
        scale, encode = scales_of(self.amax, self.cast)
        self.scale.copy_(scale)
        encoded = dict(zip(self._names(), self._per_parameter(encode), strict=True))
        for where, _, cut in self._owned_parts():
            for box, values in _by_box(where, cut, main, self.owned.start):
                codes = codes_of(values, box, encoded[where.name], self.cast).view(torch.uint8).flatten()
                start = where.start + _offset(where.shape, box)
                self.codes[start : start + codes.numel()] = codes

    def quantized(self) -> dict[str, Quantized]:
        """Every parameter's codes and scales, as views of the buffers."""
        elements = self.codes.view(FLOAT8[self.cast.element])
        return {
            where.name: Quantized(elements[where.start : where.stop].view(where.shape), scale, None, self.cast)
            for where, scale in zip(self.layout.parameters, self._per_parameter(self.scale), strict=True)
        }

    def _names(self) -> list[str]:
        return [where.name for where in self.layout.parameters]

    def _per_parameter(self, blocks: Tensor) -> list[Tensor]:
        shapes = [self.cast.scale_shape(where.shape) for where in self.layout.parameters]
        parts = blocks.split([prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _owned_parts(self) -> list[tuple[FlatParameter, Tensor, range]]:
        """Parameters of which this rank has elements: their magnitudes, and which elements of the bucket these are."""
        return [
            (where, amax, cut)
            for where, amax in zip(self.layout.parameters, self._per_parameter(self.amax), strict=True)
            if (cut := range(max(self.owned.start, where.start), min(self.owned.stop, where.stop)))
        ]


def flat_codes(layout: FlatBucket, cast: Cast, shard: Group, codes: Tensor) -> FlatCodes:
    """``codes`` is the bucket's buffer of weights."""
    owned = layout.owned(shard.size, shard.index)
    blocks = torch.empty(2, layout.num_scales, device=codes.device)
    return FlatCodes(layout, cast, shard, owned, codes, blocks[0], blocks[1])


def _by_box(where: FlatParameter, cut: range, main: Tensor, first: int) -> list[tuple[tuple[slice, ...], Tensor]]:
    """The boxes of a range of a parameter, each with its values in ``main``, whose first element is ``first``."""
    found, start = [], cut.start - first
    for box in boxes_of_range(where.shape, cut.start - where.start, cut.stop - where.start):
        sizes = [part.stop - part.start for part in box]
        found.append((box, main[start : start + prod(sizes)].view(sizes)))
        start += prod(sizes)
    return found


def _offset(shape: tuple[int, ...], box: tuple[slice, ...]) -> int:
    """Of the box's first element in the row-major parameter."""
    place = 0
    for size, part in zip(shape, box, strict=True):
        place = place * size + part.start
    return place
