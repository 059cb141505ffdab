"""A moefold run as a workload, and a workload as the command that starts it.

The planner predicts workloads; the trainer reads runs. Only this file translates between them. One key of a run may be
two facts of a workload: a schedule that pairs forwards with backwards overlaps the experts' communication
(`ep_overlap`), one that splits the backward defers weight gradients (`delay_wgrad`). `beyond_moefold` lists what a
workload has and moefold does not offer.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from math import gcd
from typing import get_args

from moefold.blueprint.model_shape import shape_of
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import BYTES, RecomputedPhase
from moefold.config.precision import Format as RunFormat
from moefold.config.run import RunConfig
from moefold.errors import LayoutError, Problem
from moefold.hardware.cluster import Cluster
from moefold.plan.dispatch_choice import PlannedDispatcher, planned_as
from moefold.plan.traffic import expert_reach
from moefold.plan.workload import Batch, Dispatcher, Dtypes, Format, Options, ParallelDegrees, Recomputed, Workload
from moefold.schedule.names import SCHEDULES, schedule_named
from moefold.topology.folded_layout import FoldedLayout, fold

_FORMATS: Mapping[RunFormat, Format] = {"float64": "float32", "float32": "float32", "bfloat16": "bf16"}
_RECOMPUTED: Mapping[RecomputedPhase, Recomputed] = {
    "attention": "attention",
    "feed_forward": "feed_forward",
    "experts": "experts",
}
RUN_DISPATCHERS: tuple[Dispatcher, ...] = get_args(PlannedDispatcher)
RUN_RECOMPUTED: tuple[Recomputed, ...] = tuple(_RECOMPUTED[phase] for phase in get_args(RecomputedPhase))


def workload_of_run(run: RunConfig, cluster: Cluster, imbalance: float = 1.0) -> Workload:
    """What this run would be on this cluster. ``imbalance``: rows of the busiest rank over the mean."""
    layout = fold(run.parallel, cluster.num_gpus)
    return Workload(
        model=shape_of(run.model),
        cluster=cluster,
        degrees=_degrees(run.parallel, layout),
        batch=_batch(run, layout.size("dp")),
        dtypes=dtypes_of_run(run),
        options=_options(run, imbalance),
    )


def question_of_run(run: RunConfig, cluster: Cluster, imbalance: float = 1.0) -> Workload:
    """The run's model, batch and formats without a layout of its own: what a search begins with."""
    return Workload(
        model=shape_of(run.model),
        cluster=cluster,
        degrees=ParallelDegrees(sharding="zero3"),
        batch=Batch(run.data.seq_len, 1, run.data.global_batch),
        dtypes=dtypes_of_run(run),
        options=_options(run, imbalance),
    )


def dtypes_of_run(run: RunConfig) -> Dtypes:
    """Weights are their own masters; gradients and both moments have their format."""
    each = float(BYTES[run.precision.params])
    return Dtypes(_FORMATS[run.precision.compute], each, each, master_bytes=0.0, moments_bytes=2 * each)


def _degrees(parallel: ParallelConfig, layout: FoldedLayout) -> ParallelDegrees:
    return ParallelDegrees(
        tp=parallel.tp,
        cp=parallel.cp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        ep=parallel.ep,
        etp=parallel.etp,
        dp=layout.size("dp"),
        schedule=parallel.schedule,
        stages=parallel.stages,
        sharding="zero3",
        replicate=parallel.dp_replicate,
    )


def _batch(run: RunConfig, dp: int) -> Batch:
    data = run.data
    one_round = data.micro_batch * dp
    if data.packing != "bin_packed" and data.global_batch % one_round:
        message = f"{data.global_batch} sequences do not divide over micro_batch * dp = {data.micro_batch} * {dp}"
        raise LayoutError(Problem("data.global_batch", message, f"use a multiple of {one_round}"))
    # Packed documents fill microbatches of this size about as often.
    return Batch(data.seq_len, data.micro_batch, max(1, round(data.global_batch / one_round)))


def _options(run: RunConfig, imbalance: float) -> Options:
    parallel, moe = run.parallel, run.model.moe
    order = schedule_named(parallel.schedule)
    spread = moe is not None and parallel.ep * parallel.etp > 1
    return Options(
        framework="moefold",
        dispatcher=_dispatcher(run) if spread else "local",
        ep_overlap=order.overlaps,
        delay_wgrad=order.splits_backward,
        recompute=frozenset(_RECOMPUTED[phase] for phase in run.memory.recompute),
        imbalance=imbalance,
        drops=moe is not None and moe.capacity is not None,
        weighted_inside=moe is None or moe.weight_at == "activation",
    )


def _dispatcher(run: RunConfig) -> Dispatcher:
    """Adaptive is the one that it comes to; a variant is the one whose formulas it shares."""
    return planned_as(run)


# ---- and back ----


def beyond_moefold(workload: Workload) -> list[str]:
    """What this workload has that moefold cannot run, in words; empty if it can."""
    options, degrees = workload.options, workload.degrees
    found = []
    if options.dispatcher not in (*RUN_DISPATCHERS, "local"):
        found.append(f"the {options.dispatcher} dispatcher")
    if workload.dtypes.format not in _FORMATS.values():
        found.append(f"matmuls in {workload.dtypes.format}")
    if extra := sorted(options.recompute - set(RUN_RECOMPUTED)):
        found.append(f"recomputing {', '.join(extra)}")
    if options.graphs != "none":
        found.append(f"{options.graphs} graphs")
    if degrees.sharding != "zero3" and degrees.dp * degrees.cp > 1:
        found.append(f"{degrees.sharding} sharding (moefold cuts weights too: zero3)")
    if options.offloaded or options.optimizer_on_host:
        found.append("offloading to the host")
    if order_of(workload) is None:
        found.append(f"{_traits(workload)} over {degrees.vpp} stages per rank")
    return found


def order_of(workload: Workload) -> str | None:
    """The name of moefold's schedule for this workload; None if there is none."""
    degrees, wanted = workload.degrees, (workload.options.ep_overlap, workload.options.delay_wgrad)

    def suits(name: str) -> bool:
        schedule = SCHEDULES[name]
        fits = not schedule.problems(degrees.pp, degrees.vpp, workload.batch.microbatches)
        return fits and (schedule.overlaps, schedule.splits_backward) == wanted

    if degrees.schedule in SCHEDULES and suits(degrees.schedule):
        return degrees.schedule
    return next((name for name in ("1f1b", "interleaved", *SCHEDULES) if suits(name)), None)


def _traits(workload: Workload) -> str:
    options = workload.options
    named = ("overlapped expert communication" * options.ep_overlap, "deferred weight gradients" * options.delay_wgrad)
    return f"{workload.degrees.schedule} with {' and '.join(filter(None, named)) or 'plain passes'}"


def changes_to_run(workload: Workload, run: RunConfig) -> dict[str, str]:
    """The dotted keys in which the run differs from this workload, with the workload's values as on a command line."""
    degrees, batch = workload.degrees, workload.batch
    recompute = [phase for phase in get_args(RecomputedPhase) if _RECOMPUTED[phase] in workload.options.recompute]
    wanted: dict[str, object] = {f"parallel.{axis}": getattr(degrees, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
    wanted |= {
        "parallel.vpp": degrees.vpp,
        "parallel.schedule": order_of(workload) or degrees.schedule,
        "parallel.stages": degrees.stages,
        "parallel.dp_replicate": degrees.replicate,
        # Where no two ranks hold the same experts there is nothing to copy.
        "parallel.edp_replicate": degrees.replicate if degrees.edp > 1 else 1,
        "data.micro_batch": batch.sequences,
        "data.global_batch": batch.sequences * batch.microbatches * degrees.dp,
        "data.seq_len": batch.seq_len,
        "memory.recompute": tuple(recompute),
    }
    if workload.options.dispatcher in RUN_DISPATCHERS:
        wanted["parallel.dispatcher"] = workload.options.dispatcher
        # Ranks of an ep group that share a domain of fast links.
        two_level = workload.options.dispatcher == "two_level"
        wanted["parallel.ep_inner"] = gcd(degrees.ep, expert_reach(workload).inside) if two_level else 1
    if workload.dtypes.format != _FORMATS[run.precision.compute] and workload.dtypes.format in _FORMATS.values():
        wanted["precision.compute"] = "bfloat16" if workload.dtypes.format == "bf16" else "float32"
    return {path: _word(value) for path, value in wanted.items() if _value_at(run, path) != value}


def launch_words(workload: Workload, name: str, changes: Mapping[str, str]) -> list[str]:
    """What to type once per node, in pieces that belong together. ``name`` is the run's recipe or file."""
    cluster = workload.cluster
    per_node = min(cluster.gpu.per_node, cluster.num_gpus)
    nodes = -(-cluster.num_gpus // per_node)
    meet = ["--standalone"]
    if nodes > 1:
        meet = [f"--nnodes {nodes}", "--rdzv-backend c10d", "--rdzv-endpoint $HEAD:29500"]
    started = [f"--nproc-per-node {per_node}", "-m moefold.cli.main", f"train {shlex.quote(name)}"]
    return ["torchrun", *meet, *started, *(f"--{path} {shlex.quote(value)}" for path, value in changes.items())]


def folded(words: Sequence[str], dim: int) -> str:
    """The command over several lines, as a shell reads it."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 3 > dim:
            lines.append("    ")
        lines[-1] += word if not lines[-1].strip() else f" {word}"
    return " \\\n".join(lines)


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)


def _value_at(run: RunConfig, path: str) -> object:
    value: object = run
    for name in path.split("."):
        value = getattr(value, name)
    return value
