"""Values that the planner predicts and this trainer does not have.

Other frameworks have more number formats, shardings, dispatchers and ways to save memory than moefold. The
configuration can say them, so that `moefold plan` describes every workload in the same words, and training them is
refused here. Each row of `PLANNED_ONLY` names a key, the values of it that can be trained, and words for any other; a
feature that the trainer gets becomes one more value of its row, or removes the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import get_args

from moefold.config.memory import RecomputedPhase
from moefold.config.parallel import DispatcherName, EngineDispatcher
from moefold.config.precision import Format
from moefold.config.run import RunConfig
from moefold.errors import Problem
from moefold.schedule.graph_regions import SCOPE_PHASES


@dataclass(frozen=True)
class PlannedOnly:
    """One key. Where it is a tuple, each of its items must be one of `trained`."""

    path: str
    trained: tuple[object, ...]
    # What any other value is, with the value in it.
    words: str
    # What would work, where the trained values do not say it.
    fix: str = ""

    def values(self, run: RunConfig) -> tuple[object, ...]:
        """Those of this run that cannot be trained."""
        value = attrgetter(self.path)(run)
        return tuple(item for item in (value if isinstance(value, tuple) else (value,)) if item not in self.trained)

    def described(self, values: tuple[object, ...]) -> str:
        return self.words.format(", ".join(map(str, values)))


PLANNED_ONLY = (
    PlannedOnly("parallel.dispatcher", get_args(DispatcherName) + get_args(EngineDispatcher), "the {} dispatcher"),
    PlannedOnly(
        "precision.recipe",
        (None, "bf16", "fp8_tensor", "fp8_delayed", "fp8_blockwise", "mxfp8", "nvfp4"),
        "the recipe {}",
    ),
    PlannedOnly("precision.params", get_args(Format), "weights in {}"),
    PlannedOnly(
        "precision.gradients",
        (None,),
        "gradients in a format of their own ({})",
        "use null: gradients are in precision.params",
    ),
    PlannedOnly(
        "precision.master",
        (None, "remainder"),
        "master weights ({}) beside the weights",
        "use null: weights of precision.params are their own",
    ),
    PlannedOnly(
        "precision.moments",
        (None, "float32", "bfloat16", "float8"),
        "moments in {}",
        "use null: moments are in precision.params; or float32, bfloat16, float8",
    ),
    PlannedOnly("memory.recompute", get_args(RecomputedPhase), "recomputing {}"),
    PlannedOnly("memory.offload", (), "offloading {} to the host", "use [], or recompute phases with memory.recompute"),
    PlannedOnly("memory.offload_layers", (0,), "offloading {} layers to the host"),
    PlannedOnly("kernels.graphs", ("none", "partial"), "{} graphs"),
    PlannedOnly("kernels.graph_scope", tuple(SCOPE_PHASES), "graphs of {}"),
    PlannedOnly("parallel.sharding", ("fsdp", "flat"), "{} sharding"),
    PlannedOnly(
        "parallel.overlap",
        ("shared_experts", "tensor_parallel", "ulysses"),
        "overlapping {} under any schedule",
        "use [], shared_experts, tensor_parallel or ulysses, and a schedule that overlaps, such as 1f1b_overlapped",
    ),
)


def planned_only(run: RunConfig) -> Iterator[tuple[PlannedOnly, tuple[object, ...]]]:
    """Rows of the table that keep this run from being trained, each with the run's values."""
    for row in PLANNED_ONLY:
        if values := row.values(run):
            yield row, values


def values_can_be_trained(run: RunConfig) -> list[Problem]:
    return [
        Problem(
            row.path,
            f"{row.described(values)}: this trainer does not have it; plan only",
            row.fix or f"use {', '.join(map(str, row.trained))}",
        )
        for row, values in planned_only(run)
    ]


RULES = (values_can_be_trained,)
