"""Inputs of matmuls, kept narrow until their weight gradients are computed (``memory.retain.STEP: quantize``).

A weight gradient reads its input through the cast ``x_wgrad``, with blocks along tokens. Narrowing it in the forward
pass and keeping codes and scales gives the same operand as keeping it wide and narrowing it in the backward pass, bit
for bit, in about half of bfloat16's bytes. Rows that pad experts to the recipe's alignment are zeros and are not kept.

Matmuls of one tensor (queries, keys and values) keep one narrow copy together: it is found by the tensor, as long as
that is alive. Where one read makes fprop's copy as well (`both_directions.py`), that is there for the matmuls of the
last tensor, and no longer. An activation may make both copies while it is computed (``NarrowingActivation``).

Shapes: R rows sorted by expert, X columns, b blocks of c rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from moefold.config.casts import Cast
from moefold.ops.padded_runs import move_rows
from moefold.precision.both_directions import BothWays, WaitingCopies
from moefold.precision.grouped_quantize import cut, piece, whole_blocks
from moefold.precision.quantize import FLOAT8, Quantized, dequantize, pack_e2m1, unpack_e2m1


class NarrowRows(NamedTuple):
    """Codes as bytes: of 8 bits per row, [R, X]; of 4 bits two in a byte, in whole blocks, [b, X, c / 2]. Scales per
    block, [b, X]; those of whole matrices one per expert that has rows."""

    codes: Tensor
    scale: Tensor
    tensor_scale: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(each for each in self if each is not None)


def narrow_rows(rows_RX: Tensor, cast: Cast, segments: Sequence[int], quantize: Callable[..., Quantized]) -> NarrowRows:
    blocks_bXc, amax_b = cut(rows_RX.detach(), cast, segments)
    quantized = quantize(blocks_bXc, cast, amax=amax_b)
    if cast.element == "e2m1":
        # A transform mixes the rows of a block with its rows of zeros.
        codes = pack_e2m1(quantized.codes_MK)
    else:
        codes_PX = quantized.codes_MK.view(torch.uint8).transpose(1, 2).flatten(0, 1)
        codes = move_rows(codes_PX, whole_blocks(segments, cast), segments)
    first = _first_blocks(cast, segments, rows_RX.device)
    scale_bX = quantized.scale_rc.flatten(1)
    scale = (scale_bX[first] if cast.block is None else scale_bX).contiguous()
    tensor_scale = None if quantized.tensor_scale is None else quantized.tensor_scale[first]
    return NarrowRows(codes.contiguous(), scale, tensor_scale)


def narrow_rows_of(column: Quantized) -> NarrowRows:
    """From the columnwise copy of rows that are one segment, or of whole blocks."""
    scale_bX = column.scale_rc.mT.contiguous()
    if column.cast.element != "e2m1":
        return NarrowRows(column.codes_MK.view(torch.uint8).mT.contiguous(), scale_bX)
    assert column.tensor_scale is not None
    codes_bXc = column.codes_MK.unflatten(1, (-1, piece(column.cast))).transpose(0, 1)
    return NarrowRows(pack_e2m1(codes_bXc).contiguous(), scale_bX, column.tensor_scale.reshape(1))


def wide_rows(narrow: NarrowRows, cast: Cast, segments: Sequence[int], padded: Sequence[int]) -> Tensor:
    """[P, X] in float32: what a matmul computes with, each segment with rows of zeros up to its padded size."""
    whole, size = whole_blocks(segments, cast), piece(cast)
    if cast.element == "e2m1":
        codes_bXc = unpack_e2m1(narrow.codes)
    else:
        codes_PX = move_rows(narrow.codes, segments, whole)
        codes_bXc = (
            codes_PX.unflatten(0, (sum(whole) // size, size)).transpose(1, 2).contiguous().view(FLOAT8[cast.element])
        )
    scale_bX, tensor_scale = narrow.scale, narrow.tensor_scale
    if cast.scales_whole_matrix:
        blocks = [rows // size for rows in whole if rows]
        blocks_e = torch.tensor(blocks, dtype=torch.long, device=narrow.codes.device)
        scale_bX = scale_bX.repeat_interleave(blocks_e, 0, output_size=sum(blocks)) if cast.block is None else scale_bX
        if tensor_scale is not None:
            tensor_scale = tensor_scale.repeat_interleave(blocks_e, output_size=sum(blocks))
    values = dequantize(Quantized(codes_bXc, scale_bX[..., None], tensor_scale, cast))
    return move_rows(values.transpose(1, 2).flatten(0, 1), whole, padded)


def codes_of_rows(narrow: NarrowRows, cast: Cast, segments: Sequence[int], padded: Sequence[int]) -> list[Quantized]:
    """What was kept, per segment: the codes of its transpose, [X, rows], with codes of zero up to its padded size."""
    parts, size, row, block, filled = [], piece(cast), 0, 0, 0
    for rows, blocks, wanted in zip(segments, whole_blocks(segments, cast), padded, strict=True):
        blocks //= size
        of_blocks, tensor_scale = slice(block, block + blocks), None
        if cast.element == "e2m1":
            assert narrow.tensor_scale is not None
            codes = unpack_e2m1(narrow.codes[of_blocks]).transpose(0, 1).flatten(1)[:, :wanted]
            tensor_scale = narrow.tensor_scale[filled] if rows else narrow.tensor_scale.new_ones(())
        else:
            codes = narrow.codes[row : row + rows].t()
        codes = F.pad(codes, (0, wanted - codes.shape[1])).contiguous()
        if cast.block is None:
            scale = narrow.scale[filled].reshape(1, 1) if rows else narrow.scale.new_ones(1, 1)
        else:
            # Of blocks of zeros any scale will do.
            missing = -(-wanted // size) - blocks
            scale = torch.cat([narrow.scale[of_blocks], narrow.scale.new_zeros(missing, narrow.scale.shape[1])]).t()
        parts.append(Quantized(codes.view(FLOAT8.get(cast.element, torch.uint8)), scale, tensor_scale, cast))
        row, block, filled = row + rows, block + blocks, filled + bool(rows)
    return parts


def _first_blocks(cast: Cast, segments: Sequence[int], device: torch.device) -> Tensor:
    """The first block of each expert that has rows."""
    blocks = [rows // piece(cast) for rows in whole_blocks(segments, cast) if rows]
    blocks_e = torch.tensor(blocks, dtype=torch.long, device=device)
    return blocks_e.cumsum(0) - blocks_e


class NarrowInputs:
    """The narrow copies of a model's inputs, by tensor; autograd holds them, and this only while the tensor lives."""

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()
        self._rowwise, self._columnwise = WaitingCopies(), WaitingCopies()

    def keep(
        self,
        x: Tensor,
        cast: Cast,
        segments: Sequence[int],
        quantize: Callable[..., Quantized],
        both: Callable[[], BothWays] | None = None,
    ) -> tuple[Tensor, ...]:
        """``both`` makes the copy of fprop with it; None: that is made alone."""
        key = (cast, tuple(segments), x._version)
        copies: dict[object, tuple[Tensor, ...]] = self._copies.setdefault(x, {})
        if key not in copies and both is not None:
            if (column := self._columnwise.take(x, cast)) is None:
                self.offer(x, both())
                column = self._columnwise.take(x, cast)
            assert column is not None
            copies[key] = narrow_rows_of(column).tensors()
        elif key not in copies:
            copies[key] = narrow_rows(x.flatten(0, -2), cast, segments, quantize).tensors()
        return copies[key]

    def offer(self, x: Tensor, both: BothWays) -> None:
        """Copies that are there already; those of the tensor before are dropped."""
        for copies, copy in zip((self._rowwise, self._columnwise), both, strict=True):
            copies.clear()
            copies.put(x, copy)

    def rowwise(self, x: Tensor, cast: Cast | None) -> Quantized | None:
        """What fprop reads of the last tensor that was kept; None: of another one, or it was not made."""
        return self._rowwise.get(x, cast)


class NarrowingActivation:
    """An activation whose output enters a matmul that keeps it narrow: both copies are made in the same pass.

    ``plain`` is the activation alone, the reference; ``activate_both`` takes its arguments, its name and the two casts.
    """

    def __init__(
        self,
        plain: Callable[[Tensor, Tensor | None], Tensor],
        activate_both: Callable[..., tuple[Tensor, BothWays]],
        name: str,
        inputs: NarrowInputs,
        casts: tuple[Cast, Cast],
    ) -> None:
        self.plain, self.activate_both, self.name, self.inputs, self.casts = plain, activate_both, name, inputs, casts

    def __call__(self, gate_up_PG: Tensor, prob_P: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():
            # Nothing is kept.
            return self.plain(gate_up_PG, prob_P)
        out_PF, both = self.activate_both(gate_up_PG, prob_P, self.name, *self.casts)
        self.inputs.offer(out_PF, both)
        return out_PF
