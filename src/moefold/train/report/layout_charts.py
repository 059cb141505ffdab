"""A run's layout in pictures: what each pipeline rank does when, and what its memory holds.

Both come from the configuration in the start line, through the planner: the trainer runs the same order of actions. The
time axis is the measured median step; how the ranks share it assumes that a backward takes twice as long as a forward.
The memory is predicted, line group by line group, and a line marks what rank 0 measured.
"""

from __future__ import annotations

from html import escape

from moefold.config.loading import run_from_mapping
from moefold.config.run import RunConfig
from moefold.errors import MoefoldError
from moefold.hardware.cluster import cluster_of
from moefold.plan.memory.peak import memory_at
from moefold.plan.prediction import MemoryPrediction
from moefold.plan.report.pictures import MEMORY_COLORS, timeline_figure
from moefold.plan.timing.step_timeline import MOST_BOXES, StepTimeline
from moefold.plan.workload import Workload, workload_of_run
from moefold.schedule.names import schedule_named
from moefold.schedule.simulate import Durations, simulate
from moefold.schedule.timeline_picture import shown
from moefold.train.report.history import History
from moefold.train.report.summary import summary
from moefold.units import format_bytes

_MOST_RANKS = 16
# Of a simulated step: enough for the bubble's share, few enough for any run.
_MOST_SIMULATED = 2_000


def layout(history: History) -> str:
    """The section, or nothing where the start line does not say the layout."""
    workload = _workload(history)
    if workload is None:
        return ""
    facts = summary(history)
    charts = _timeline(workload, facts["step_seconds"]) + _memory(workload, facts["memory_bytes"])
    return f'<h2>Layout</h2><div class="charts">{charts}</div>'


def _workload(history: History) -> Workload | None:
    config, world = history.start.get("config"), history.start.get("world")
    if not isinstance(config, dict) or not isinstance(world, int) or not 0 < world < 1 << 24:
        return None
    try:
        run: RunConfig = run_from_mapping(config)
        # Which GPU is asked for does not matter: neither picture has its speed or its size.
        return workload_of_run(run, cluster_of("H100", world))
    except MoefoldError:
        return None


def _timeline(workload: Workload, step_seconds: float | None) -> str:
    parallel, microbatches = workload.parallel, workload.microbatches
    if parallel.pp == 1 or not step_seconds:
        return ""
    schedule, stages = schedule_named(parallel.schedule), parallel.pp * parallel.vpp
    few = max(parallel.pp, MOST_BOXES // (2 * parallel.vpp) // parallel.pp * parallel.pp)
    few = min(microbatches, max(few, schedule.microbatches_per_stage * stages))
    many = min(microbatches, max(few, _MOST_SIMULATED // stages // parallel.pp * parallel.pp))
    finish = simulate(schedule.build(parallel.pp, parallel.vpp, many), _durations(1.0)).finish
    unit = step_seconds * many / microbatches / finish
    timeline = simulate(schedule.build(parallel.pp, parallel.vpp, few), _durations(unit))
    quiet = {(stage, forward): 0.0 for stage in range(stages) for forward in (True, False)}
    note = (
        "The time is the measured median step; how it is shared out is computed from the order of actions, with a "
        "backward twice as long as a forward. Ranks were not timed one by one."
    )
    return timeline_figure(StepTimeline(timeline, few, microbatches, quiet), "What each pipeline rank does", note)


def _durations(unit: float) -> Durations:
    return Durations(forward=unit, backward_input=unit, backward_weight=unit)


def _memory(workload: Workload, measured: int | None) -> str:
    ranks = shown(workload.parallel.pp, _MOST_RANKS)
    held = {rank: memory_at(workload, rank) for rank in ranks if rank is not None}
    scale = max([_allocated(each) for each in held.values()] + [measured or 0]) * 1.02
    rows = "".join(
        "<span></span><span class=soft>...</span><span class=amount></span>"
        if rank is None
        else _track(held[rank], scale, measured if rank == 0 else None)
        for rank in ranks
    )
    first = held[0]
    keys = "".join(
        f'<span class="key"><i class="c{color}"></i>{group} {format_bytes(first.of(group))}</span>'
        for group, color in MEMORY_COLORS.items()
        if group != "overhead" and first.of(group)
    )
    note = "Predicted bytes of tensors at the peak; amounts beside the colours are pipeline rank 0's."
    if measured:
        note += f" The red line is what rank 0 measured: {format_bytes(measured)}; on a CPU the whole process counts."
    return (
        '<figure class="wide"><figcaption><b>Memory of every pipeline rank</b></figcaption>'
        f'<div class="held">{rows}</div><div class="keys">{keys}</div><p class=note>{escape(note)}</p></figure>'
    )


def _allocated(memory: MemoryPrediction) -> float:
    """Without what a GPU's allocator and runtime need."""
    return memory.total - memory.of("overhead")


def _track(memory: MemoryPrediction, scale: float, measured: int | None) -> str:
    parts = "".join(
        f'<i class="c{color}" style="flex:0 0 {100 * memory.of(group) / scale:.2f}%" '
        f'title="{group} {format_bytes(memory.of(group))}"></i>'
        for group, color in MEMORY_COLORS.items()
        if group != "overhead" and memory.of(group)
    )
    line = f'<span class="full" style="left:{100 * measured / scale:.2f}%"></span>' if measured else ""
    return (
        f'<span>rank {memory.pipeline_rank}</span><span class="track"><span class="bar">{parts}</span>{line}</span>'
        f'<span class="amount">{format_bytes(_allocated(memory))}</span>'
    )
