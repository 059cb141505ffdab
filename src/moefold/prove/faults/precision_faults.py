"""Faults of precision recipes: casts left out, in the wrong direction, or over values that do not belong together;
codes that are kept, gathered or sent beside scales of others; bits that keeping and deferring must not change.

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.config.casts import Cast
from moefold.moe import grouped_experts
from moefold.moe.dispatch import all_to_all, padded_routing
from moefold.moe.dispatch.base import RowCodecs
from moefold.nn.matmul_policy import WeightGradQueue
from moefold.ops.padded_runs import aligned, move_rows
from moefold.parallel import flat_codes
from moefold.parallel.flat_codes import FlatCodes
from moefold.precision import operands
from moefold.precision.cast_backends import QUANTIZERS
from moefold.precision.narrow_inputs import NarrowInputs
from moefold.precision.operands import GradOperands, NarrowOperands, NarrowWeights, WgradAmaxes
from moefold.precision.row_messages import NarrowRowCodec
from moefold.prove.faults.parallel_faults import put, wrap

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
        def over_all(
            self: NarrowOperands, grad: Tensor, kept: Kept, amaxes: WgradAmaxes, rows: list[int] | None = None
        ) -> GradOperands:
            if rows is None:
                return wgrad(self, grad, kept, amaxes, None)
            narrow = wgrad(self, grad, kept, amaxes, [sum(rows)])
            return GradOperands(narrow.grad_TY[: sum(rows)], narrow.x_TX[: sum(rows)], rows)

        return over_all

    wrap(NarrowOperands, "wgrad", make)


def padding_in_the_amax() -> None:
    """Rows of padding hold what was in memory; their gradients are zero, so that only scales see them."""

    def make(wgrad: Callable[..., GradOperands]) -> Callable[..., GradOperands]:
        def with_remains(
            self: NarrowOperands, grad: Tensor, kept: Kept, amaxes: WgradAmaxes, rows: list[int] | None = None
        ) -> GradOperands:
            grad_TY, x_TX = grad.flatten(0, -2), kept[0].flatten(0, -2)
            sizes = [len(grad_TY)] if rows is None else rows
            padded = aligned(sizes, self.align)
            is_real = move_rows(torch.ones_like(x_TX), sizes, padded) > 0
            x_TX = torch.where(is_real, move_rows(x_TX, sizes, padded), 1e4)
            return wgrad(self, move_rows(grad_TY, sizes, padded), (x_TX,), amaxes, None if rows is None else padded)

        return with_remains

    wrap(NarrowOperands, "wgrad", make)


# ---- kept, gathered and sent as codes ----


def kept_codes_with_a_stale_scale() -> None:
    """Scales of the input before, of the same shape, are beside the codes of this one."""

    def make(keep: Callable[..., Kept]) -> Callable[..., Kept]:
        before: dict[object, Tensor] = {}

        def stale(self: NarrowInputs, x: Tensor, cast: Cast, segments: list[int], *rest: object) -> Kept:
            codes, scale, *others = keep(self, x, cast, segments, *rest)
            key = (cast, tuple(segments), codes.shape)
            earlier, before[key] = before.get(key, scale), scale
            return (codes, earlier, *others)

        return stale

    wrap(NarrowInputs, "keep", make)


def kept_inputs_scaled_in_another_precision() -> None:
    """Far below the tolerance of gradients."""

    def make(wide_rows: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *of_rows: wide_rows(*of_rows).double() * (1 + 2.0**-48)

    wrap(operands, "wide_rows", make)


def deferred_gradients_newest_first() -> None:
    """Sums over microbatches have another order."""

    def make(run_one: Callable[..., bool]) -> Callable[..., bool]:
        def newest(self: WeightGradQueue) -> bool:
            self._waiting.rotate(1)
            return run_one(self)

        return newest

    wrap(WeightGradQueue, "run_one", make)


def gathered_codes_with_the_scale_of_another_block() -> None:
    def make(finish: Callable[..., None]) -> Callable[..., None]:
        def shifted(self: FlatCodes, main: Tensor) -> None:
            finish(self, main)
            self.scale.copy_(self.scale.roll(1))

        return shifted

    wrap(FlatCodes, "finish", make)


def amaxes_of_shards_not_maximised() -> None:
    """A block that two ranks share has the scale of either part."""
    put(flat_codes, "start_all_reduce_max", lambda *_: [])


def padding_of_the_permutation_in_the_amax() -> None:
    """The row that padding reads is not zero; nobody reads what is computed for it."""

    def make(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def with_remains(x: Tensor, token_N: Tensor, padded: bool = True) -> Tensor:
            return gather(torch.cat([x, x.new_full((1, *x.shape[1:]), 1e4)]), token_N, padded)

        return with_remains

    wrap(grouped_experts, "gather_rows", make)


def rows_of_zeros_for_half_of_the_multiple() -> None:
    """Blocks along tokens then hold rows of two ranks."""

    def make(pad: Callable[..., object]) -> Callable[..., object]:
        return lambda routing, num_experts, multiple: pad(routing, num_experts, multiple // 2)

    wrap(padded_routing, "pad_routing", make)


def sent_codes_with_the_scales_of_the_next_row() -> None:
    def make(unpack: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def shifted(self: NarrowRowCodec, packed_NB: Tensor, like: Tensor) -> Tensor:
            codes, scales = packed_NB[:, : like.shape[-1]], packed_NB[:, like.shape[-1] :]
            return unpack(self, torch.cat([codes, scales.roll(1, 0)], 1), like)

        return shifted

    wrap(NarrowRowCodec, "unpack", make)


def gradients_sent_to_experts_as_they_are() -> None:
    def make(codecs: Callable[..., RowCodecs]) -> Callable[..., RowCodecs]:
        return lambda run: codecs(run)._replace(backward=None)

    wrap(all_to_all, "row_codecs", make)


# With the case that each is tried on, and how it happens in real code.
FAULTS = (
    (cast_left_out_on_one_rank, "narrow", "a rank's module falls back to wide matmuls"),
    (
        blocks_of_rows_that_start_inside_a_block,
        "narrow",
        "a kernel counts blocks from the first value of its tile, not of the matrix",
    ),
    (weight_blocks_in_the_direction_of_fprop, "narrow", "one narrow copy of a weight is used in both directions"),
    (
        weight_blocks_that_start_inside_a_block,
        "narrow",
        "a shard is narrowed by itself, and begins between two ends of blocks",
    ),
    (token_blocks_over_two_experts, "narrow", "rows of all experts are one matrix for the cast along tokens"),
    (padding_in_the_amax, "narrow", "padding is not zero where a scale is found"),
    (weight_blocks_over_two_matrices, "narrow squares", "stacked matrices are flattened before they are narrowed"),
    (kept_codes_with_a_stale_scale, "narrow codes", "a buffer of scales is used again before its codes were read"),
    (
        kept_inputs_scaled_in_another_precision,
        "narrow codes",
        "codes that were kept are not multiplied by their scales as others are",
    ),
    (deferred_gradients_newest_first, "narrow codes", "the order of a sum depends on when a schedule has a gap"),
    (
        gathered_codes_with_the_scale_of_another_block,
        "narrow codes",
        "scales of a bucket are counted from another parameter",
    ),
    (amaxes_of_shards_not_maximised, "narrow codes", "each rank finds the scales of its own range"),
    (
        padding_of_the_permutation_in_the_amax,
        "narrow codes",
        "the permutation leaves what was in memory in rows of padding",
    ),
    (rows_of_zeros_for_half_of_the_multiple, "narrow rows", "tokens of zeros are counted for another format"),
    (sent_codes_with_the_scales_of_the_next_row, "narrow rows", "rows and scales are sent in two orders"),
    (
        gradients_sent_to_experts_as_they_are,
        "narrow rows",
        "combine's backward is not narrowed as the local dispatcher's is",
    ),
)
