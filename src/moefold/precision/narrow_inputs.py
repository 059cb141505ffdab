"""Inputs of matmuls, kept narrow until their weight gradients are computed (``memory.retain.STEP: quantize``).

A weight gradient reads its input through the cast ``x_wgrad``, with blocks along tokens. Narrowing it in the forward
pass and keeping codes and scales gives the same operand as keeping it wide and narrowing it in the backward pass, bit
for bit, in about half of bfloat16's bytes. Rows that pad experts to the recipe's alignment are zeros and are not kept.

Matmuls of one tensor (queries, keys and values) keep one narrow copy together: it is found by the tensor, as long as
that is alive.

Shapes: R rows sorted by expert, X columns, b blocks along the rows of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from moefold.config.casts import Cast
from moefold.precision.quantize import FLOAT8, Quantized, dequantize, pack_e2m1, unpack_e2m1

# A Hadamard transform mixes this many rows, those of zeros too.
_TRANSFORMED = 16


class NarrowRows(NamedTuple):
    """Codes as bytes, each column's rows side by side; scales of an expert's blocks follow those of the one before."""

    codes_XR: Tensor
    scale_Xb: Tensor
    # two_level: of each expert.
    tensor_scale_e: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(each for each in self if each is not None)


def narrow_rows(rows_RX: Tensor, cast: Cast, segments: Sequence[int], quantize: Callable[..., Quantized]) -> NarrowRows:
    """Each segment's rows through the cast, along the rows."""
    parts = []
    for part_RX in rows_RX.detach().split(list(segments)):
        missing = _kept_size(len(part_RX), cast) - len(part_RX)
        parts.append(quantize(F.pad(part_RX, (0, 0, 0, missing)).t(), cast))
    codes_XR = torch.cat([_as_bytes(part, cast) for part in parts], dim=1)
    scale_Xb = torch.cat([_plain(part.scale_rc) for part in parts], dim=1)
    tensor_scales = [part.tensor_scale for part in parts if part.tensor_scale is not None]
    return NarrowRows(codes_XR, scale_Xb, torch.stack(tensor_scales) if tensor_scales else None)


def wide_rows(narrow: NarrowRows, cast: Cast, segments: Sequence[int], padded: Sequence[int]) -> Tensor:
    """[P, X] in float32: what a matmul computes with, each segment with rows of zeros up to its padded size."""
    kept = [_kept_size(size, cast) for size in segments]
    per_byte = 2 if cast.element == "e2m1" else 1
    # An expert without rows has no block.
    blocks = [-(-size // cast.block_of(1, size)[1]) for size in kept]
    ends = zip(accumulate(size // per_byte for size in kept), accumulate(blocks), strict=True)
    parts, code, block = [], 0, 0
    for expert, (code_end, block_end) in enumerate(ends):
        codes = narrow.codes_XR[:, code:code_end]
        typed = unpack_e2m1(codes) if cast.element == "e2m1" else codes.view(FLOAT8[cast.element])
        scale = narrow.scale_Xb[:, block:block_end]
        tensor_scale = None if narrow.tensor_scale_e is None else narrow.tensor_scale_e[expert]
        scale = scale.view(torch.float8_e4m3fn) if cast.scale == "two_level" else scale
        values = dequantize(Quantized(typed, scale, tensor_scale, cast))
        parts.append(F.pad(values, (0, padded[expert] - kept[expert])).t())
        code, block = code_end, block_end
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _kept_size(size: int, cast: Cast) -> int:
    return -(-size // _TRANSFORMED) * _TRANSFORMED if cast.hadamard or cast.element == "e2m1" else size


def _as_bytes(quantized: Quantized, cast: Cast) -> Tensor:
    codes = quantized.codes_MK
    return pack_e2m1(codes) if cast.element == "e2m1" else codes.view(torch.uint8)


def _plain(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e4m3fn else scale


class NarrowInputs:
    """The narrow copies of a model's inputs, by tensor; autograd holds them, and this only while the tensor lives."""

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()

    def keep(
        self, x: Tensor, cast: Cast, segments: Sequence[int], quantize: Callable[..., Quantized]
    ) -> tuple[Tensor, ...]:
        key = (cast, tuple(segments), x._version)
        copies: dict[object, tuple[Tensor, ...]] = self._copies.setdefault(x, {})
        if key not in copies:
            copies[key] = narrow_rows(x.flatten(0, -2), cast, segments, quantize).tensors()
        return copies[key]
