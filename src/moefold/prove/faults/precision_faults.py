"""Faults of precision recipes: casts left out, in the wrong direction, or over values that do not belong together.

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.ops.padded_runs import aligned, move_rows
from moefold.precision.cast_backends import QUANTIZERS
from moefold.precision.operands import GradOperands, NarrowOperands, NarrowWeights
from moefold.prove.faults.parallel_faults import wrap

# What is kept of an input: here, the input itself.
Kept = tuple[Tensor, ...]
# Of a block, half: what a shift by so many values cuts.
_HALF = 16


def _casts(change: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
    """Of inputs and of gradients, by every backend."""
    for name, quantizers in QUANTIZERS.items():
        QUANTIZERS[name] = quantizers._replace(fake_quantize=change(quantizers.fake_quantize))


def cast_left_out_on_one_rank() -> None:
    def change(cast: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda matrix, *rest, **more: matrix if dist.get_rank() == 1 else cast(matrix, *rest, **more)

    _casts(change)


def blocks_of_rows_that_start_inside_a_block() -> None:
    """Blocks of inputs and of gradients are counted from another feature, or token, than the first."""

    def change(cast: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda matrix, *rest, **more: cast(matrix.roll(_HALF, -1), *rest, **more).roll(-_HALF, -1)

    _casts(change)


def weight_blocks_in_the_direction_of_fprop() -> None:
    """Dgrad gets the copy of fprop, whose blocks lie along the dim that is not summed there."""

    def make(narrow: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda self, weight, cast, transposed, *rest: narrow(self, weight, cast, False, *rest)

    wrap(NarrowWeights, "narrow", make)


def weight_blocks_that_start_inside_a_block() -> None:
    """As if a rank's shard began in the middle of a block of the whole matrix."""

    def make(narrow: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda self, weight, *rest: narrow(self, weight.detach().roll(_HALF, -1), *rest).roll(-_HALF, -1)

    wrap(NarrowWeights, "narrow", make)


def weight_blocks_over_two_matrices() -> None:
    """Stacked matrices (gate and up, experts) are narrowed as one matrix with all of their rows."""

    def make(narrow: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda self, weight, *rest: narrow(self, weight.detach().flatten(0, -2), *rest).reshape(weight.shape)

    wrap(NarrowWeights, "narrow", make)


def token_blocks_over_two_experts() -> None:
    """Rows are padded at the end of all experts, and not behind each of them."""

    def make(wgrad: Callable[..., GradOperands]) -> Callable[..., GradOperands]:
        def over_all(self: NarrowOperands, grad: Tensor, kept: Kept, rows: list[int] | None = None) -> GradOperands:
            if rows is None:
                return wgrad(self, grad, kept, None)
            narrow = wgrad(self, grad, kept, [sum(rows)])
            return GradOperands(narrow.grad_TY[: sum(rows)], narrow.x_TX[: sum(rows)], rows)

        return over_all

    wrap(NarrowOperands, "wgrad", make)


def padding_in_the_amax() -> None:
    """Rows of padding hold what was in memory; their gradients are zero, so that only scales see them."""

    def make(wgrad: Callable[..., GradOperands]) -> Callable[..., GradOperands]:
        def with_remains(self: NarrowOperands, grad: Tensor, kept: Kept, rows: list[int] | None = None) -> GradOperands:
            grad_TY, x_TX = grad.flatten(0, -2), kept[0].flatten(0, -2)
            sizes = [len(grad_TY)] if rows is None else rows
            padded = aligned(sizes, self.align)
            is_real = move_rows(torch.ones_like(x_TX), sizes, padded) > 0
            x_TX = torch.where(is_real, move_rows(x_TX, sizes, padded), 1e4)
            return wgrad(self, move_rows(grad_TY, sizes, padded), (x_TX,), None if rows is None else padded)

        return with_remains

    wrap(NarrowOperands, "wgrad", make)
