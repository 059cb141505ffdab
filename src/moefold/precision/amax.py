"""Whose amax decides a scale of a whole tensor: of one matrix here, or of all ranks that hold parts of it.

A matrix that tensor parallelism cuts has one scale, as in one process, if its parts' largest magnitudes are compared
first (``SharedAmaxes``). How that is done is handed in: nothing here knows of other ranks. Data-parallel and
context-parallel ranks have other tokens, and scales of their own, as in Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from moefold.config.casts import Cast
from moefold.config.precision_recipes import Operand
from moefold.precision.quantize import hadamard

# From this rank's amaxes to the largest over the ranks that hold other parts.
ReduceAmax = Callable[[Tensor], Tensor]
# By the name of an axis; None where one rank holds everything.
ReduceOver = Callable[[str], ReduceAmax | None]


class Amaxes(Protocol):
    def of(self, operand: Operand, cast: Cast, own: Callable[[], Tensor]) -> Tensor | None:
        """The amaxes to narrow with, in the shape of ``own()``, those of the matrices here; None: each its own."""
        ...


class SharedAmaxes:
    """``reduce`` has the operands of which other ranks hold parts."""

    def __init__(self, reduce: Mapping[Operand, ReduceAmax]) -> None:
        self.reduce = reduce

    def of(self, operand: Operand, cast: Cast, own: Callable[[], Tensor]) -> Tensor | None:
        reduce = self.reduce.get(operand)
        return None if reduce is None else reduce(own())


OWN_AMAXES = SharedAmaxes({})


def amax_of(x_MK: Tensor, cast: Cast) -> Tensor:
    """The largest magnitude of each matrix of a stack, in float32, as a cast sees it; of none, 0. One that is not
    finite makes it NaN."""
    if not x_MK.numel():
        return torch.zeros(x_MK.shape[:-2], device=x_MK.device)
    x_MK = hadamard(x_MK.float()).bfloat16() if cast.hadamard else x_MK
    amax = torch.linalg.vector_norm(x_MK.detach(), torch.inf, (-2, -1)).float()
    return torch.where(torch.isfinite(amax), amax, torch.nan)
