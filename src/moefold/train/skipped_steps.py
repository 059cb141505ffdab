"""Steps that are skipped: one decision of all ranks, the reason in words, and what follows for the loss scale.

A gradient that is not finite means one of two things in float16. While the loss scale is searched for, it is how a
scale is found to be too large: the step is skipped, a lower one is tried, and nothing is wrong. At the smallest scale,
with a fixed one, or where the loss itself is not finite, it is what it is in other formats: a fault of data, weights or
hardware, whose place is looked for and which ends the run when it lasts (`train.health.max_consecutive_skips`).

A step whose rows did not fit is not skipped: it ran again (`pipeline/step.py`), and that is said here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import NamedTuple

from moefold.comm.collectives import all_reduce_ints
from moefold.comm.process_groups import Group
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.precision.loss_scaling import LossScale, can_back_off, next_loss_scale


class NotFinite(NamedTuple):
    """On how many ranks a loss, and the norm of all gradients, is not finite; the same on all ranks."""

    losses: int
    grad_norm: int


def agreed_skip_reason(local: str | None, world: Group) -> str | None:
    """All ranks skip where one of them does: a number that differs on one rank must not make it take another path."""
    (objecting,) = all_reduce_ints((int(local is not None),), world)
    return local if local is not None or not objecting else f"{objecting} other rank(s) objected"


def count_not_finite(loss: float, balance: Mapping[str, float], grad_norm: float, world: Group) -> NotFinite:
    losses = int(not all(map(isfinite, (loss, *balance.values()))))
    return NotFinite(*all_reduce_ints((losses, int(not isfinite(grad_norm))), world))


def is_searching(found: NotFinite, scale: LossScale | None, precision: PrecisionConfig) -> bool:
    """Whether a lower loss scale may cure what was found."""
    config = precision.loss_scaling
    overflow = bool(found.grad_norm) and not found.losses
    return scale is not None and config is not None and overflow and can_back_off(scale, config)


def explained(
    reason: str, found: NotFinite, scale: LossScale | None, precision: PrecisionConfig, where: Callable[[], str]
) -> str:
    """The reason with what is known about it. ``where`` looks for the place, which costs a forward pass."""
    if found == NotFinite(0, 0):
        return reason
    if scale is None:
        return f"{reason}: {where()}"
    after = loss_scale_after(scale, precision, found)
    said = f"{reason} at loss scale {scale.scale:g}, the next step has {after.scale:g}"
    return said if is_searching(found, scale, precision) else f"{said}: {where()}"


def loss_scale_after(scale: LossScale, precision: PrecisionConfig, found: NotFinite | None) -> LossScale:
    """``found`` of a step that was skipped; None after one that was taken. Finite gradients of a step that was skipped
    for another reason change nothing."""
    config = precision.loss_scaling
    if config is None or (found is not None and not found.grad_norm):
        return scale
    return next_loss_scale(scale, config, found_inf=found is not None)


def ran_again(step: int, overflow: int, run: RunConfig) -> str:
    bounds = f"row_bound {run.parallel.row_bound:g} and pair_bound {run.parallel.pair_bound:g}"
    if "page" in run.memory.retained().values():
        bounds += f", or pages of memory.page_bound {run.memory.page_bound:g}"
    return (
        f"step {step}: {overflow:,} rows did not fit into buffers of parallel.{bounds}; "
        "the step was run again with exact counts, and loss and update are of that run; larger bounds make this rarer"
    )
