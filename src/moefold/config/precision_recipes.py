"""Precision recipes: how each operand of the three matmuls of a linear layer is narrowed, by name.

    fprop   Y  = X W^T     sums over the columns of X and W
    dgrad   dX = dY W      sums over the columns of dY, the rows of W
    wgrad   dW = dY^T X    sums over tokens

Every operand is in two matmuls and is cast for each of them, because blocks lie along the dim that is summed: these are
the rowwise and the columnwise copy of other libraries. A square block serves both.

Messages between ranks have casts too, by the names of `precision.dispatch` and `precision.tp_reduce`. A row that is
sent to experts is narrowed as a recipe narrows the input of their first matmul, a gradient that is sent to them as it
narrows that of their last. Scales are powers of two: a received row is exact in bfloat16, narrowing it once more with
the same blocks changes no value, and narrowing it along tokens changes few. Sums over tensor-parallel ranks are
MegaScale-MoE's (section 5): the parts of a sum are sent to the rank that owns it, by an all-to-all, and added there in
float32. Activations have a scale per token, gradients one per channel and 128 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from moefold.config.casts import Cast

NarrowRecipe = Literal["fp8_tensor", "fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"]
RecipeName = Literal["bf16", NarrowRecipe]
# Of the three matmuls: the input, the weight, the gradient of the output.
Operand = Literal["x", "w", "dy"]
RECIPE_NAMES: tuple[RecipeName, ...] = get_args(RecipeName)


@dataclass(frozen=True)
class LinearCasts:
    """Each with its blocks along the summed dim; None: as `precision.compute` has it."""

    x_fprop: Cast | None
    w_fprop: Cast | None
    dy_dgrad: Cast | None
    w_dgrad: Cast | None
    dy_wgrad: Cast | None
    x_wgrad: Cast | None

    def items(self) -> Iterator[tuple[str, Cast | None]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True)
class PrecisionRecipe:
    casts: LinearCasts
    # Tensor cores take rows per expert, and tokens, in multiples of this.
    align: int


def _both_ways(x: Cast, w: Cast, dy: Cast) -> LinearCasts:
    """One cast per operand, for both of its matmuls."""
    return LinearCasts(x, w, dy, w, dy, x)


_BF16 = Cast("bf16", None, "none")
_E4M3, _E5M2 = Cast("e4m3", None, "float32"), Cast("e5m2", None, "float32")
_ROW, _SQUARE = Cast("e4m3", (1, 128), "power_of_two"), Cast("e4m3", (128, 128), "power_of_two")
_WHOLE_ROW = Cast("e4m3", (1, 0), "power_of_two")
_MX = Cast("e4m3", (1, 32), "e8m0_rceil")
_FP4, _FP4_SQUARE = Cast("e2m1", (1, 16), "two_level"), Cast("e2m1", (16, 16), "two_level")
_FP4_STOCHASTIC = replace(_FP4, rounding="stochastic")

# What enters down projections in fprop instead of the recipe's cast. per_token: the activation widens the range of
# values, and differently per token, so each token has a scale (1 x h, as in MegaScale-MoE).
DownInput = Literal["recipe", "per_token"]
DOWN_INPUTS: dict[DownInput, Cast] = {"per_token": Cast("e4m3", (1, 0), "float32")}

PRECISION_RECIPES: dict[RecipeName, PrecisionRecipe] = {
    # Operands rounded to bfloat16; where `precision.compute` is bfloat16, nothing changes.
    "bf16": PrecisionRecipe(_both_ways(_BF16, _BF16, _BF16), 1),
    # Gradients have the wider exponent ("hybrid"). A scale per tensor, of this step or of the steps before.
    "fp8_tensor": PrecisionRecipe(_both_ways(_E4M3, _E4M3, _E5M2), 16),
    "fp8_delayed": PrecisionRecipe(
        _both_ways(replace(_E4M3, delayed=True), replace(_E4M3, delayed=True), replace(_E5M2, delayed=True)), 16
    ),
    # torchao's: a scale per row of every operand, along what is summed.
    "fp8_rowwise": PrecisionRecipe(_both_ways(_WHOLE_ROW, _WHOLE_ROW, _WHOLE_ROW), 16),
    # DeepSeek-V3's: 1 x 128 for activations and gradients, 128 x 128 for weights.
    "fp8_blockwise": PrecisionRecipe(_both_ways(_ROW, _SQUARE, _ROW), 16),
    "mxfp8": PrecisionRecipe(_both_ways(_MX, _MX, _MX), 32),
    # Square blocks for weights; the Hadamard transform on both operands of wgrad, where it cancels; gradients are
    # rounded stochastically.
    "nvfp4": PrecisionRecipe(
        LinearCasts(
            _FP4,
            _FP4_SQUARE,
            _FP4_STOCHASTIC,
            _FP4_SQUARE,
            replace(_FP4_STOCHASTIC, hadamard=True),
            replace(_FP4, hadamard=True),
        ),
        128,
    ),
}

# ---- messages ----

DispatchFormat = Literal["mxfp8", "fp8_blockwise"]
TpReduceFormat = Literal["fp8_all_to_all"]


@dataclass(frozen=True)
class MessageCasts:
    """Of values in the forward pass, and of gradients in the backward pass."""

    forward: Cast
    backward: Cast


def _of_rows(name: RecipeName) -> MessageCasts:
    casts = PRECISION_RECIPES[name].casts
    assert casts.x_fprop is not None and casts.dy_dgrad is not None
    return MessageCasts(casts.x_fprop, casts.dy_dgrad)


DISPATCH_CASTS: dict[DispatchFormat, MessageCasts] = {
    "mxfp8": _of_rows("mxfp8"),
    "fp8_blockwise": _of_rows("fp8_blockwise"),
}
TP_REDUCE_CASTS: dict[TpReduceFormat, MessageCasts] = {
    "fp8_all_to_all": MessageCasts(Cast("e4m3", (1, 0), "float32"), Cast("e4m3", (128, 1), "float32")),
}
