"""Bits that a choice of memory or schedule must not change: the gradients of a step that makes neither choice.

With a precision recipe, an input that is kept as codes (``memory.retain.STEP: quantize``) is the operand that its
weight gradient would narrow later, and a deferred weight gradient is the same matmuls at another time. So ranks run
such a step once more, with inputs kept wide and weight gradients computed at once; the two must have the same
gradients, bit for bit. The reference has zeros for their difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from moefold.config.memory import Retention
from moefold.config.run import RunConfig
from moefold.nn.matmul_policy import Gradient, WeightGradQueue
from moefold.parallel.param_shards import local_part
from moefold.schedule.names import schedule_named

# Of quantities.
UNCHANGED = "unchanged"


def is_repeated(run: RunConfig) -> bool:
    """Whether there is such a choice."""
    schedule = schedule_named(run.parallel.schedule)
    defers = schedule.splits_backward or schedule.overlaps
    return run.precision.recipe is not None and (defers or "quantize" in run.memory.retained().values())


def plain_run(run: RunConfig) -> RunConfig:
    """The same with inputs that are kept wide."""
    wide: dict[str, Retention] = {step: "keep" for step, how in run.memory.retained().items() if how == "quantize"}
    return replace(run, memory=replace(run.memory, retain=replace(run.memory.retain, **wide)))


def compute_at_once(weight_grads: WeightGradQueue | None) -> None:
    """From now on nothing that is put into this queue waits there."""
    if weight_grads is None:
        return
    queue, put = weight_grads, weight_grads.put

    def at_once(weight: nn.Parameter, gradient: Gradient) -> None:
        put(weight, gradient)
        queue.run_all()

    weight_grads.put = at_once  # type: ignore[method-assign]


def changes(gradients: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name; NaN where either has one."""
    return {name: local_part(gradient) - local_part(plain[name]) for name, gradient in gradients.items()}
