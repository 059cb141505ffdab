"""The plan of a step for any kind of samples: a function of the configuration and of their lengths alone."""

from __future__ import annotations

from collections.abc import Sequence

from moefold.batching.doc_cost import cost_of
from moefold.batching.document_packing import pack, plan_step
from moefold.batching.step_plan import StepPlan, Wave
from moefold.config.run import RunConfig
from moefold.schedule.names import schedule_named
from moefold.topology.folded_layout import FoldedLayout


def plan_for(run: RunConfig, sizes: Sequence[int], layout: FoldedLayout) -> StepPlan:
    """Which samples of the step form which microbatch, from their lengths alone."""
    data, dp, cp = run.data, layout.size("dp"), layout.size("cp")
    if data.packing != "bin_packed":
        return in_order(len(sizes), data.micro_batch, dp, cp)
    room, cost = data.micro_batch * data.seq_len, cost_of(run)
    if run.parallel.dynamic_cp:
        # A rank's tokens under a static cp, but at least so many that all ranks together hold a whole microbatch.
        plan = plan_step(sizes, dp * cp, max(room // cp, -(-room // (dp * cp))), cost)
    else:
        plan = pack(sizes, room, dp, cp, cost)
    schedule, stages = schedule_named(run.parallel.schedule), run.parallel.pp * run.parallel.vpp
    return plan.with_at_least(schedule.microbatches_per_stage * stages)


def in_order(num_samples: int, micro_batch: int, dp: int, cp: int) -> StepPlan:
    """``micro_batch`` consecutive samples form a microbatch, ``dp`` consecutive microbatches a wave."""
    bins = [tuple(range(first, first + micro_batch)) for first in range(0, num_samples, micro_batch)]
    return StepPlan(tuple(Wave(cp, tuple(bins[first : first + dp])) for first in range(0, len(bins), dp)))
