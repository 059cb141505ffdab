"""A step over time, for the picture: the order of microbatches with every stage's predicted forward and backward.

The step's predicted time comes from a closed form; this puts the same stages' times through the simulator, for as many
microbatches as a picture can show. Each action also knows which share of it is exposed communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moefold.plan.op_sizes import sizes_of
from moefold.plan.stage_contents import stages_of_shape, written_stages
from moefold.plan.timing.constants import CURRENT
from moefold.plan.timing.layer_time import Passes, Seconds
from moefold.plan.timing.step_time import stage_passes
from moefold.plan.timing.throughput import rates_of
from moefold.plan.workload import Workload
from moefold.schedule.actions import Action, Kind
from moefold.schedule.names import schedule_named
from moefold.schedule.simulate import Durations, Timeline, simulate
from moefold.schedule.timeline_picture import cells_of, label

# Of one rank: what can be looked at.
MOST_BOXES = 140
# Chrome's traces count in microseconds.
_MICROSECONDS = 1e6


@dataclass(frozen=True)
class StepTimeline:
    """`timeline` is of the first `shown` microbatches of `microbatches`, in seconds."""

    timeline: Timeline
    shown: int
    microbatches: int
    # (stage, is a forward) -> the share of its time that is exposed communication.
    communication: Mapping[tuple[int, bool], float]

    def exposed(self, action: Action) -> float:
        """Of the whole action, the share that waits for other ranks; of a pair, both parts' mean."""
        shares = [self.communication[part.stage, part.kind is Kind.FORWARD] for part in action.parts]
        weights = [1.0 if part.kind is not Kind.BACKWARD_WEIGHT else 0.0 for part in action.parts]
        return sum(share * weight for share, weight in zip(shares, weights)) / len(shares)


def step_timeline(workload: Workload, most_boxes: int = MOST_BOXES) -> StepTimeline:
    parallel = workload.parallel
    stages = stages_of_shape(workload.model, parallel.pp * parallel.vpp, written_stages(workload))
    rates = rates_of(workload, CURRENT, float(workload.run.data.seq_len))
    passes = stage_passes(workload, stages, sizes_of(workload), rates, CURRENT)
    factor = 1.0 if workload.rescaling is None else workload.rescaling.factor
    each = [Passes(Seconds(), Seconds()).plus(passes[which], factor) for which in stages.which]
    shown = _shown(workload, most_boxes)
    order = schedule_named(parallel.schedule).build(parallel.pp, parallel.vpp, shown)
    durations = Durations(
        forward=[stage.forward.total for stage in each],
        # Input and weight gradients cost about the same.
        backward_input=[stage.backward.total / 2 for stage in each],
        backward_weight=[stage.backward.total / 2 for stage in each],
    )
    return StepTimeline(simulate(order, durations), shown, workload.microbatches, _shares(each))


def _shown(workload: Workload, most_boxes: int) -> int:
    """Whole rounds of the pipeline, at least one."""
    parallel, count = workload.parallel, workload.microbatches
    fits = max(parallel.pp, most_boxes // (2 * parallel.vpp) // parallel.pp * parallel.pp, 2)
    needed = schedule_named(parallel.schedule).microbatches_per_stage * parallel.pp * parallel.vpp
    return min(count, max(fits, needed))


def _shares(each: list[Passes]) -> dict[tuple[int, bool], float]:
    def share(seconds: Seconds) -> float:
        waiting = seconds.tensor + seconds.expert + seconds.context + seconds.sharded
        return waiting / seconds.total if seconds.total else 0.0

    found = {}
    for stage, passes in enumerate(each):
        found[stage, True], found[stage, False] = share(passes.forward), share(passes.backward)
    return found


def step_trace(step: StepTimeline) -> dict[str, Any]:
    """For chrome://tracing or ui.perfetto.dev: a row per pipeline rank, and below it what it waits for others."""
    events: list[dict[str, Any]] = []
    order = step.timeline.order
    for rank in range(order.num_ranks):
        for row, name in ((2 * rank, f"rank {rank}"), (2 * rank + 1, f"rank {rank} exposed communication")):
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": row, "args": {"sort_index": row}})
        for action, (start, stop) in cells_of(step.timeline, rank):
            whole = (stop - start) * _MICROSECONDS
            waits = whole * step.exposed(action)
            event = {"ph": "X", "pid": 0, "ts": start * _MICROSECONDS, "cat": action.kind.value}
            args = {"stage": action.stage, "microbatch": action.microbatch, "exposed_us": waits}
            events.append(event | {"tid": 2 * rank, "name": label(order, action), "dur": whole, "args": args})
            if waits > 0:
                # Drawn at the action's end; where inside it the waits really lie differs by layer.
                at = stop * _MICROSECONDS - waits
                events.append(event | {"tid": 2 * rank + 1, "ts": at, "name": "waiting", "dur": waits, "args": {}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
