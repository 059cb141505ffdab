"""The operands of a recipe's matmuls as codes and scales, for GEMMs that take these (``kernels.narrow_gemm``).

`operands.py` widens what it has narrowed, so that any matmul computes with it: the reference. Here nothing is widened.
All three products have one form, A B^T with both matrices [., K], where K is summed and blocks lie along it:

    fprop   Y  = X W^T     X    [T, X]     W    [Y, X]
    dgrad   dX = dY W      dY   [T, Y]     W^T  [X, Y]
    wgrad   dW = dY^T X    dY^T [Y, T]     X^T  [X, T]

Matrices that are stacked in a weight (gate and up) are one matrix, unless each has scales of its own: then they are
several, and the products are put side by side (fprop) or summed (dgrad).

Shapes: T rows of all experts, sorted by expert; X columns in, Y out; e experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.config.casts import Cast
from moefold.config.precision_recipes import Operand
from moefold.ops.padded_runs import aligned, move_rows
from moefold.precision.amax import Amaxes
from moefold.precision.both_directions import rows_are_whole
from moefold.precision.narrow_inputs import NarrowRows, codes_of_rows
from moefold.precision.operands import GradOperands, NarrowOperands, NarrowWeights, Quantizers, WgradAmaxes
from moefold.precision.quantize import Quantized


class RowCodes(NamedTuple):
    """Of a linear layer one matrix, of experts one per expert; ``whole`` has all of them where no scale is that of an
    expert, one after the other. ``dtype`` is that of the product."""

    each: list[Quantized]
    whole: Quantized | None
    dtype: torch.dtype


class CodeOperands(NarrowOperands):
    """As ``NarrowOperands``, with codes for values: rows as ``RowCodes``, a weight as a list of stacks [e, ., K], of
    which a linear layer has one matrix each."""

    weights: CodeWeights

    def fprop(  # type: ignore[override]
        self, x: Tensor, weight: Tensor, rows_per_expert: list[int] | None = None
    ) -> tuple[RowCodes, list[Quantized]]:
        cast = _narrowed(self.casts.x_fprop)
        made = self._made_ahead(x)
        rows = x.reshape(-1, x.shape[-1])
        x_in = (
            self._rows(rows, cast, rows_per_expert, x.dtype) if made is None else _cut(made, rows_per_expert, x.dtype)
        )
        return x_in, self._matrices(weight, self.casts.w_fprop, False, rows_per_expert is not None)

    def dgrad(  # type: ignore[override]
        self, grad: Tensor, weight: Tensor, rows_per_expert: list[int] | None = None
    ) -> tuple[RowCodes, list[Quantized]]:
        cast, columns = _narrowed(self.casts.dy_dgrad), weight.shape[-2]
        both = self._both_ways(grad, cast, self.casts.dy_wgrad, rows_per_expert, columns)
        if both is None or not weight.requires_grad:
            # Blocks end where a stacked matrix does.
            stacked = grad.shape[-1] // columns
            segments = None if rows_per_expert is None else [rows * stacked for rows in rows_per_expert]
            grad_in = _side_by_side(self._rows(grad.reshape(-1, columns), cast, segments, grad.dtype, "dy"), stacked)
        else:
            row, column = both()
            self._grad_copies.put(grad, column)
            grad_in = _cut(row, rows_per_expert, grad.dtype)
        return grad_in, self._matrices(weight, self.casts.w_dgrad, True, rows_per_expert is not None)

    def wgrad(
        self,
        grad: Tensor,
        kept: tuple[Tensor, ...],
        amaxes: WgradAmaxes,
        rows_per_expert: list[int] | None = None,
    ) -> GradOperands:
        dy, x = _narrowed(self.casts.dy_wgrad), _narrowed(self.casts.x_wgrad)
        grad_TY = grad.flatten(0, -2)
        rows = [len(grad_TY)] if rows_per_expert is None else rows_per_expert
        padded = aligned(rows, self.align)
        made = self._grad_copies.take(grad, dy)
        if made is None:
            grad_in = self._columns(move_rows(grad_TY, rows, padded), dy, padded, amaxes.grad)
        else:
            grad_in = RowCodes(split_columns(made, padded), made, torch.float32)
        if self.inputs is None:
            x_in = self._columns(move_rows(kept[0].flatten(0, -2), rows, padded), x, padded, amaxes.x)
        else:
            x_in = RowCodes(codes_of_rows(NarrowRows(*kept), x, rows, padded), None, torch.float32)
        return GradOperands(grad_in, x_in, None if rows_per_expert is None else padded)  # type: ignore[arg-type]

    def _rows(
        self, rows_TX: Tensor, cast: Cast, segments: list[int] | None, dtype: torch.dtype, operand: Operand = "x"
    ) -> RowCodes:
        """Blocks along features."""
        if not cast.scales_whole_matrix:
            return _cut(self.quantizers.quantize(rows_TX, cast, seed=self.seed), segments, dtype)
        if segments is None or cast.delayed:
            amaxes = self._amaxes_of([rows_TX], cast, operand)
            return _cut(self._matrix_codes([rows_TX], cast, amaxes)[0], segments, dtype)
        parts = rows_TX.split(segments)
        return RowCodes(self._matrix_codes(parts, cast, self._amaxes_of(parts, cast, operand)), None, dtype)

    def _columns(self, rows_TX: Tensor, cast: Cast, segments: list[int], amaxes: Tensor | None) -> RowCodes:
        """Blocks along tokens: codes of the transpose."""
        blocks = cast.block is not None and cast.block[1] != 0
        one = cast.delayed or len(segments) == 1 or (blocks and rows_are_whole(cast, segments, self.align))
        parts = [rows_TX.t()] if one else [part.t() for part in rows_TX.split(segments)]
        if cast.scales_whole_matrix:
            codes = self._matrix_codes(parts, cast, amaxes)
        else:
            codes = [self.quantizers.quantize(part, cast, seed=self.seed) for part in parts]
        each, whole = (split_columns(codes[0], segments), codes[0]) if one else (codes, None)
        return RowCodes(each, whole, torch.float32)

    def _matrix_codes(self, matrices: Sequence[Tensor], cast: Cast, amaxes: Tensor | None) -> list[Quantized]:
        given = [None] * len(matrices) if amaxes is None else amaxes.unbind()
        pairs = zip(matrices, given, strict=True)
        return [self.quantizers.quantize(matrix, cast, seed=self.seed, amax=amax) for matrix, amax in pairs]

    def _matrices(self, weight: Tensor, cast: Cast | None, transposed: bool, experts: bool) -> list[Quantized]:
        return self.weights.matrices(weight, _narrowed(cast), transposed, experts, self.quantizers, self.amaxes)


def _narrowed(cast: Cast | None) -> Cast:
    """`narrow_gemms_get_codes` refuses others."""
    assert cast is not None and cast.element != "bf16"
    return cast


def _cut(whole: Quantized, segments: list[int] | None, dtype: torch.dtype) -> RowCodes:
    each = [whole] if segments is None else split_rows(whole, segments)
    return RowCodes(each, whole, dtype)


def _side_by_side(rows: RowCodes, stacked: int) -> RowCodes:
    """[T, n * F] of [T * n, F]."""

    def joined(part: Quantized) -> Quantized:
        codes = part.codes_MK.reshape(len(part.codes_MK) // stacked, stacked * part.codes_MK.shape[1])
        if part.cast.block is None:
            return replace(part, codes_MK=codes)
        return replace(
            part, codes_MK=codes, scale_rc=part.scale_rc.reshape(len(codes), stacked * part.scale_rc.shape[1])
        )

    return RowCodes(
        [joined(part) for part in rows.each], None if rows.whole is None else joined(rows.whole), rows.dtype
    )


def chunks_of_columns(rows: RowCodes, stacked: int) -> list[RowCodes]:
    """What belongs to each of the matrices that are side by side."""

    def chunks(part: Quantized) -> list[Quantized]:
        own = part.cast.block is None
        scales = [part.scale_rc] * stacked if own else part.scale_rc.chunk(stacked, -1)
        pairs = zip(part.codes_MK.chunk(stacked, -1), scales, strict=True)
        return [replace(part, codes_MK=codes, scale_rc=scale) for codes, scale in pairs]

    each = [chunks(part) for part in rows.each]
    whole = [None] * stacked if rows.whole is None else chunks(rows.whole)
    return [RowCodes([parts[place] for parts in each], whole[place], rows.dtype) for place in range(stacked)]


def split_rows(whole: Quantized, segments: Sequence[int]) -> list[Quantized]:
    """Views; of a matrix with a scale of its own, each part has it."""
    codes = whole.codes_MK.split(list(segments))
    own = [whole.scale_rc] * len(codes) if whole.cast.block is None else whole.scale_rc.split(list(segments))
    return [replace(whole, codes_MK=part, scale_rc=scale) for part, scale in zip(codes, own, strict=True)]


def split_columns(whole: Quantized, segments: Sequence[int]) -> list[Quantized]:
    """The same along K; no block is cut."""
    if len(segments) == 1:
        return [whole]
    block = whole.cast.block
    parts = []
    for first, end in pairwise((0, *accumulate(segments))):
        scale = whole.scale_rc
        if block is not None and block[1]:
            assert first % block[1] == 0, f"{segments} columns cut blocks of {whole.cast}"
            scale = scale[:, first // block[1] : -(-end // block[1])]
        parts.append(replace(whole, codes_MK=whole.codes_MK[:, first:end], scale_rc=scale))
    return parts


class CodeWeights(NarrowWeights):
    """Weights as GEMMs read them: matrices [., K] whose codes lie along K, made once per step. Codes that are gathered
    are laid out again by every matmul."""

    def __init__(self) -> None:
        super().__init__()
        self._laid_out: dict[tuple[int, Cast, bool], tuple[Tensor, int, list[Quantized]]] = {}

    def matrices(
        self, weight: Tensor, cast: Cast, transposed: bool, experts: bool, quantizers: Quantizers, amaxes: Amaxes
    ) -> list[Quantized]:
        """``experts``: the first dim of the weight is that of experts, else there is one."""
        own_copy = transposed and not cast.is_square
        if self.codes_of(weight) is not None:
            return lay_out(self.codes(weight, cast, False, quantizers, amaxes), transposed, not own_copy, experts)
        laid_out = self._laid_out.get(key := (id(weight), cast, transposed))
        if laid_out is None or laid_out[1] != weight._version:
            codes = self.codes(weight, cast, own_copy, quantizers, amaxes)
            matrices = lay_out(codes, transposed, not own_copy, experts)
            laid_out = self._laid_out[key] = (weight, weight._version, matrices)
            if own_copy:
                # Its only reader has it now.
                del self._kept[key]
        return laid_out[2]

    def copies(self) -> Iterator[Tensor]:
        """Each once: what was laid out may be a view of what was narrowed."""
        found = {each.untyped_storage()._cdata: each for each in super().copies()}
        for _, _, matrices in self._laid_out.values():
            for matrix in matrices:
                for each in (matrix.codes_MK, matrix.scale_rc, matrix.tensor_scale):
                    if each is not None:
                        found.setdefault(each.untyped_storage()._cdata, each)
        yield from found.values()

    def forget(self) -> None:
        super().forget()
        self._laid_out.clear()


def lay_out(codes: Quantized, transposed: bool, turn: bool, experts: bool) -> list[Quantized]:
    """Of a stack [(e,) ..., M, K], ``transposed`` if it is of the transposes; ``turn``: they are to be transposed."""
    cast = codes.cast
    stack_enMK, scale_enrc = (_four_dims(each, experts) for each in (codes.codes_MK, codes.scale_rc))
    if transposed and turn:
        stack_enMK, scale_enrc = stack_enMK.mT, scale_enrc.mT
    shape = stack_enMK.shape
    # Matrices are joined along the dim in which they are stacked: along K if transposed. A block of 0 is a whole row.
    dim = 1 if transposed else 0
    block = (0, 0) if cast.block is None else cast.block
    apart = cast.scales_whole_matrix or not block[dim] or shape[2 + dim] % block[dim]
    if shape[1] == 1 or apart:
        scale_en = None if codes.tensor_scale is None else codes.tensor_scale.reshape(shape[:2])
        return [
            Quantized(
                codes_eMK.contiguous(), scale_erc.contiguous(), None if scale_en is None else scale_en[:, place], cast
            )
            for place, (codes_eMK, scale_erc) in enumerate(zip(stack_enMK.unbind(1), scale_enrc.unbind(1), strict=True))
        ]
    if transposed:
        # Side by side, along K.
        joined = [each.transpose(1, 2).flatten(2) for each in (stack_enMK, scale_enrc)]
    else:
        joined = [each.flatten(1, 2) for each in (stack_enMK, scale_enrc)]
    return [Quantized(joined[0].contiguous(), joined[1].contiguous(), None, cast)]


def _four_dims(stack: Tensor, experts: bool) -> Tensor:
    """[e, n, M, K]: experts, and what is stacked of each."""
    experts_here = stack.shape[0] if experts else 1
    return stack.reshape(experts_here, -1 if stack.numel() else 1, *stack.shape[-2:])
