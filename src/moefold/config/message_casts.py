"""Casts of messages between ranks, by the names of `precision.dispatch` and `precision.tp_reduce`.

A row that is sent to experts is narrowed as a recipe narrows the input of their first matmul, a gradient that is sent
to them as it narrows that of their last. Scales are powers of two: a received row is exact in bfloat16, narrowing it
once more with the same blocks changes no value, and narrowing it along tokens changes few.

Sums over tensor-parallel ranks are MegaScale-MoE's (section 5): the parts of a sum are sent to the rank that owns it,
by an all-to-all, and added there in float32. Activations have a scale per token, gradients one per channel and 128
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moefold.config.casts import Cast
from moefold.config.precision_recipes import PRECISION_RECIPES, RecipeName

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
