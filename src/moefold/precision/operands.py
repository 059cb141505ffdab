"""The two operands of each matmul of a linear layer, as the matmul gets them.

``WideOperands`` are the input, the gradient and the weight in the dtype of the input. ``NarrowOperands`` go through the
casts of a recipe: to the format and back, so that any matmul of wide numbers computes what one of narrow numbers would,
with sums in float32 (in float64 where the run computes in it). Products of two E4M3 or E2M1 numbers are exact in
float32, so this differs from a narrow GEMM by the order of its sums alone.

A weight is narrowed once per step and kept (codes and scales), until ``NarrowWeights.forget`` says that it has changed.
Where quantizers have it, an operand's two copies are made from one read (`both_directions.py`).

Shapes: x is [..., X], a gradient [..., Y], a weight [..., F, X] with Y = ... * F: matrices that are stacked (gate and
up, experts) are narrowed one by one, and blocks of a gradient's columns end where these matrices end. So a shard of
every matrix has blocks of the whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.config.casts import Cast
from moefold.config.precision_recipes import Operand, PrecisionRecipe
from moefold.ops.padded_runs import aligned, move_rows
from moefold.precision.amax import OWN_AMAXES, Amaxes, amax_of
from moefold.precision.both_directions import BothWays, WaitingCopies, rows_are_whole, share_a_read
from moefold.precision.grouped_quantize import along_features, along_tokens
from moefold.precision.narrow_inputs import NarrowInputs, NarrowRows, wide_rows
from moefold.precision.quantize import Quantized, dequantize, fake_quantize, quantize


class GradOperands(NamedTuple):
    """Of a weight gradient: dY and X, and rows per expert, which padding may have changed."""

    grad_TY: Tensor
    x_TX: Tensor
    rows_per_expert: list[int] | None


class WgradAmaxes(NamedTuple):
    """Of dY and X, one per matrix; None: each matrix its own."""

    grad: Tensor | None = None
    x: Tensor | None = None


class Operands(Protocol):
    """``rows_per_expert``: of rows sorted by expert, where a scale may be that of an expert's rows; None otherwise."""

    def fprop(self, x: Tensor, weight: Tensor, rows_per_expert: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """X and W of Y = X W^T."""
        ...

    def dgrad(self, grad: Tensor, weight: Tensor, rows_per_expert: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """dY and W of dX = dY W."""
        ...

    def keep(self, x: Tensor, rows_per_expert: list[int] | None = None) -> tuple[Tensor, ...]:
        """What is saved of X in the forward pass for ``wgrad``."""
        ...

    def wgrad_amaxes(
        self, grad: Tensor, kept: tuple[Tensor, ...], rows_per_expert: list[int] | None = None
    ) -> WgradAmaxes:
        """What ``wgrad`` needs to know of other ranks. To be called in the backward pass itself, where all ranks are at
        the same place: a weight gradient that is deferred is computed whenever its rank has time."""
        ...

    def wgrad(
        self,
        grad: Tensor,
        kept: tuple[Tensor, ...],
        amaxes: WgradAmaxes,
        rows_per_expert: list[int] | None = None,
    ) -> GradOperands:
        """dY and X of dW = dY^T X, X from what was kept of it; of rows sorted by expert, per expert."""
        ...


class WideOperands:
    def fprop(self, x: Tensor, weight: Tensor, rows_per_expert: list[int] | None = None) -> tuple[Tensor, Tensor]:
        return x, _values(weight).to(x.dtype)

    def dgrad(self, grad: Tensor, weight: Tensor, rows_per_expert: list[int] | None = None) -> tuple[Tensor, Tensor]:
        return grad, _values(weight).to(grad.dtype)

    def keep(self, x: Tensor, rows_per_expert: list[int] | None = None) -> tuple[Tensor, ...]:
        return (x,)

    def wgrad_amaxes(
        self, grad: Tensor, kept: tuple[Tensor, ...], rows_per_expert: list[int] | None = None
    ) -> WgradAmaxes:
        return WgradAmaxes()

    def wgrad(
        self,
        grad: Tensor,
        kept: tuple[Tensor, ...],
        amaxes: WgradAmaxes,
        rows_per_expert: list[int] | None = None,
    ) -> GradOperands:
        return GradOperands(grad, kept[0], rows_per_expert)


WIDE = WideOperands()


def _values(weight: Tensor) -> Tensor:
    """Codes are no values without their scales."""
    if weight.dtype.itemsize == 1:
        raise TypeError(f"a weight of {tuple(weight.shape)} is gathered as {weight.dtype} codes, but used as it is")
    return weight


class Quantizers(NamedTuple):
    """Of the reference, or of another backend. In one pass where that is there: ``quantize_both``, the casts of a
    matrix and of its transpose; ``activate_both``, a gated activation and both casts of its output; ``requantize``, the
    cast of a transpose from the codes of the matrix."""

    quantize: Callable[..., Quantized] = quantize
    fake_quantize: Callable[..., Tensor] = fake_quantize
    quantize_both: Callable[..., BothWays] | None = None
    activate_both: Callable[..., tuple[Tensor, BothWays]] | None = None
    requantize: Callable[[Quantized, Cast], Quantized] | None = None
    dequantize: Callable[[Quantized], Tensor] = dequantize


REFERENCE = Quantizers()


class NarrowOperands:
    """Of one weight. ``weights`` is shared by all modules of a model, and so is ``inputs``, which keeps them narrow
    (None: they are kept as they are). ``seed`` is of stochastic rounding; ``amaxes`` says whose amax decides the scales
    of a whole matrix. ``ahead`` has copies for fprop that were made together with the inputs; ``arrives_narrow`` says
    that inputs are numbers of that cast already, so that their other copy follows from the codes."""

    def __init__(
        self,
        recipe: PrecisionRecipe,
        weights: NarrowWeights,
        quantizers: Quantizers = REFERENCE,
        seed: int = 0,
        inputs: NarrowInputs | None = None,
        amaxes: Amaxes = OWN_AMAXES,
        ahead: WaitingCopies | None = None,
        arrives_narrow: bool = False,
    ) -> None:
        self.ahead, self.arrives_narrow = ahead, arrives_narrow
        self.casts, self.align = recipe.casts, recipe.align
        self.weights, self.quantizers, self.seed, self.amaxes = weights, quantizers, seed, amaxes
        # What is not narrowed, or to bfloat16 without a scale, is kept as it is.
        cast = recipe.casts.x_wgrad
        self.inputs = None if cast is None or cast.element == "bf16" else inputs
        # Of gradients along tokens, made with those along features.
        self._grad_copies = WaitingCopies()

    def fprop(self, x: Tensor, weight: Tensor, rows_per_expert: list[int] | None = None) -> tuple[Tensor, Tensor]:
        wide = _sums_in(x)
        made = self._made_ahead(x)
        if made is None:
            rows = x.reshape(-1, x.shape[-1])
            narrow = self._along_features(rows, self.casts.x_fprop, rows_per_expert, "x")
        else:
            narrow = self.quantizers.dequantize(made)
        return narrow.reshape(x.shape).to(wide), self._weight(weight, self.casts.w_fprop, False).to(wide)

    def dgrad(self, grad: Tensor, weight: Tensor, rows_per_expert: list[int] | None = None) -> tuple[Tensor, Tensor]:
        wide, stacked = _sums_in(grad), grad.shape[-1] // weight.shape[-2]
        both = self._both_ways(grad, self.casts.dy_dgrad, self.casts.dy_wgrad, rows_per_expert, weight.shape[-2])
        if both is None or not weight.requires_grad:
            segments = None if rows_per_expert is None else [rows * stacked for rows in rows_per_expert]
            rows = grad.reshape(-1, weight.shape[-2])
            narrow = self._along_features(rows, self.casts.dy_dgrad, segments, "dy")
        else:
            row, column = both()
            self._grad_copies.put(grad, column)
            narrow = self.quantizers.dequantize(row)
        return narrow.reshape(grad.shape).to(wide), self._weight(weight, self.casts.w_dgrad, True).to(wide)

    def keep(self, x: Tensor, rows_per_expert: list[int] | None = None) -> tuple[Tensor, ...]:
        cast = self.casts.x_wgrad
        if self.inputs is None or cast is None:
            return (x,)
        rows = [x[..., 0].numel()] if rows_per_expert is None else rows_per_expert
        both = self._both_ways(x, self.casts.x_fprop, cast, rows_per_expert, x.shape[-1])
        made = None if self.ahead is None else self.ahead.get(x, self.casts.x_fprop)
        if made is not None:
            # One copy is there: the other is made of its codes, or alone.
            requantize = self.quantizers.requantize if both is not None and self.arrives_narrow else None
            both = None if requantize is None else partial(_and_columnwise, made, cast, requantize)
        return self.inputs.keep(x, cast, rows, self.quantizers.quantize, both)

    def wgrad_amaxes(
        self, grad: Tensor, kept: tuple[Tensor, ...], rows_per_expert: list[int] | None = None
    ) -> WgradAmaxes:
        of_grad = self._amaxes_along_tokens(grad, self.casts.dy_wgrad, rows_per_expert, "dy")
        # What was kept narrow has its scales.
        of_x = None
        if self.inputs is None:
            of_x = self._amaxes_along_tokens(kept[0], self.casts.x_wgrad, rows_per_expert, "x")
        return WgradAmaxes(of_grad, of_x)

    def wgrad(
        self,
        grad: Tensor,
        kept: tuple[Tensor, ...],
        amaxes: WgradAmaxes,
        rows_per_expert: list[int] | None = None,
    ) -> GradOperands:
        """Padded with rows of zeros to the recipe's alignment, per expert: a block that is partly zeros has the scale
        of its other values."""
        grad_TY = grad.flatten(0, -2)
        rows = [len(grad_TY)] if rows_per_expert is None else rows_per_expert
        padded = aligned(rows, self.align)
        made = self._grad_copies.take(grad, self.casts.dy_wgrad)
        if made is None:
            grad_in = self._along_tokens(move_rows(grad_TY, rows, padded), self.casts.dy_wgrad, padded, amaxes.grad)
        else:
            grad_in = self.quantizers.dequantize(made).t()
        if self.inputs is None or self.casts.x_wgrad is None:
            x_TX = move_rows(kept[0].flatten(0, -2), rows, padded)
            x_in = self._along_tokens(x_TX, self.casts.x_wgrad, padded, amaxes.x)
        else:
            x_in = wide_rows(NarrowRows(*kept), self.casts.x_wgrad, rows, padded)
        wide = _sums_in(grad)
        return GradOperands(grad_in.to(wide), x_in.to(wide), None if rows_per_expert is None else padded)

    def _made_ahead(self, x: Tensor) -> Quantized | None:
        """fprop's copy of an input, where it was made with the input or with the copy that is kept."""
        made = None if self.ahead is None else self.ahead.take(x, self.casts.x_fprop)
        return self.inputs.rowwise(x, self.casts.x_fprop) if made is None and self.inputs is not None else made

    def _both_ways(
        self, x: Tensor, row: Cast | None, column: Cast | None, rows_per_expert: list[int] | None, columns: int
    ) -> Callable[[], BothWays] | None:
        """Makes both copies of x from one read; None: one by one. ``columns`` is where matrices end that are stacked
        along the columns of x."""
        quantize_both = self.quantizers.quantize_both
        if quantize_both is None or not x.numel() or not share_a_read(row, column):
            return None
        assert row is not None and column is not None and row.block is not None
        rows = [x[..., 0].numel()] if rows_per_expert is None else rows_per_expert
        ends_in_a_block = columns != x.shape[-1] and columns % row.block[1]
        is_reduced = row.scales_whole_matrix and self.amaxes is not OWN_AMAXES
        if ends_in_a_block or is_reduced or not rows_are_whole(row, rows, self.align):
            return None
        return lambda: quantize_both(x.detach().flatten(0, -2), row, column, seed=self.seed)

    def _along_features(
        self, rows_TX: Tensor, cast: Cast | None, segments: Sequence[int] | None, operand: Operand
    ) -> Tensor:
        if cast is None:
            return rows_TX
        segments = [len(rows_TX)] if segments is None or cast.delayed else segments
        parts = rows_TX.split(list(segments))
        amaxes = self._amaxes_of(parts, cast, operand)
        if amaxes is None:
            return along_features(rows_TX, cast, segments, self.quantizers.fake_quantize, self.seed)
        return torch.cat(self._narrow(parts, cast, amaxes))

    def _along_tokens(
        self, rows_TX: Tensor, cast: Cast | None, segments: Sequence[int], amaxes: Tensor | None
    ) -> Tensor:
        if cast is None:
            return rows_TX
        segments = _scaled_together(rows_TX, cast, segments)
        if amaxes is None:
            return along_tokens(rows_TX, cast, segments, self.quantizers.fake_quantize, self.seed)
        parts = [part.t() for part in rows_TX.split(list(segments))]
        return torch.cat([part.t() for part in self._narrow(parts, cast, amaxes)])

    def _amaxes_along_tokens(
        self, rows: Tensor, cast: Cast | None, rows_per_expert: list[int] | None, operand: Operand
    ) -> Tensor | None:
        """Of rows as they are: those of zeros that pad them have no larger number."""
        if cast is None:
            return None
        rows_TX = rows.flatten(0, -2)
        segments = _scaled_together(rows_TX, cast, rows_per_expert)
        return self._amaxes_of([part.t() for part in rows_TX.split(segments)], cast, operand)

    def _amaxes_of(self, matrices: Sequence[Tensor], cast: Cast, operand: Operand) -> Tensor | None:
        """Where ranks hold parts of matrices, they agree on the amaxes of all in one message; None: each its own."""
        if not cast.scales_whole_matrix:
            return None
        return self.amaxes.of(operand, cast, lambda: torch.stack([amax_of(matrix, cast) for matrix in matrices]))

    def _narrow(self, matrices: Sequence[Tensor], cast: Cast, amaxes: Tensor) -> list[Tensor]:
        pairs = zip(matrices, amaxes.unbind(), strict=True)
        return [self.quantizers.fake_quantize(matrix, cast, seed=self.seed, amax=amax) for matrix, amax in pairs]

    def _weight(self, weight: Tensor, cast: Cast | None, transposed: bool) -> Tensor:
        return self.weights.narrow(weight, cast, transposed, self.quantizers, self.amaxes)


def _scaled_together(rows_TX: Tensor, cast: Cast, segments: Sequence[int] | None) -> list[int]:
    """Delayed scales are those of the rows of all experts."""
    return [len(rows_TX)] if segments is None or cast.delayed else list(segments)


def _and_columnwise(row: Quantized, column: Cast, requantize: Callable[[Quantized, Cast], Quantized]) -> BothWays:
    return BothWays(row, requantize(row, column))


def _sums_in(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class NarrowWeights:
    """Codes and scales of weights, narrowed once per step: by parameter, cast, and whether it was transposed.

    A weight that is changed in place outside of a training step is noticed by torch's version counter; FSDP's gathering
    does not count as a change, so the step itself calls ``forget``.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, Cast, bool], tuple[Tensor, int, Quantized]] = {}
        self._gathered: dict[int, tuple[Tensor, Quantized]] = {}

    def gathered(self, weight: Tensor, quantized: Quantized) -> None:
        """From now on this weight's codes and scales are these buffers, which whoever gathers them fills anew when the
        weight has changed (``precision.gather: narrow``)."""
        self._gathered[id(weight)] = (weight, quantized)

    def codes_of(self, weight: Tensor) -> Quantized | None:
        """What was gathered of this weight; None where it is narrowed here."""
        found = self._gathered.get(id(weight))
        return None if found is None else found[1]

    def narrow(
        self,
        weight: Tensor,
        cast: Cast | None,
        transposed: bool,
        quantizers: Quantizers,
        amaxes: Amaxes = OWN_AMAXES,
    ) -> Tensor:
        """In the shape of the weight, with blocks along its last dim, or along the one before."""
        if cast is None:
            return weight
        if cast.element == "bf16":
            return weight.bfloat16().float()
        # One copy serves both directions where it can.
        transposed = transposed and not cast.is_square
        values = quantizers.dequantize(self.codes(weight, cast, transposed, quantizers, amaxes))
        return values.transpose(-2, -1) if transposed else values

    def codes(
        self, weight: Tensor, cast: Cast, transposed: bool, quantizers: Quantizers, amaxes: Amaxes = OWN_AMAXES
    ) -> Quantized:
        """Of the weight, or of its transpose; a square cast has those of the weight alone."""
        if (gathered := self.codes_of(weight)) is not None:
            assert gathered.cast == cast
            return gathered
        kept = self._kept.get(key := (id(weight), cast, transposed))
        if kept is None or kept[1] != weight._version:
            values = _values(weight).detach()
            matrices = values.transpose(-2, -1) if transposed else values
            # The weight is kept too, so that its id stays its own.
            if quantizers.quantize_both is not None and share_a_read(cast, cast) and not cast.scales_whole_matrix:
                for way, copy in zip((False, True), quantizers.quantize_both(values, cast, cast), strict=True):
                    self._kept[id(weight), cast, way] = (weight, weight._version, copy)
                kept = self._kept[key]
            else:
                amax = amaxes.of("w", cast, lambda: amax_of(matrices, cast)) if cast.scales_whole_matrix else None
                quantized = quantizers.quantize(matrices, cast, amax=amax)
                kept = self._kept[key] = (weight, weight._version, quantized)
        return kept[2]

    def copies(self) -> Iterator[Tensor]:
        """Codes and scales that are kept beside weights."""
        for _, _, quantized in self._kept.values():
            yield quantized.codes_MK
            yield quantized.scale_rc
            if quantized.tensor_scale is not None:
                yield quantized.tensor_scale

    def forget(self) -> None:
        """Weights have changed."""
        self._kept.clear()
