"""`dry_run`: the real training step of one rank of a large job, without the job and without its memory.

The code is that of training: the same local model, sharding, optimizer, schedule, clipping and update. Three things are
replaced: tensors are fake, the process group is torch's fake one, and split sizes, which training reads from the
device, are those of the balanced router.

The report has peak memory, when it occurs, its categories, and all collectives, as text and as JSON. Dry runs of
several ranks are one table.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from moefold.checks.run_all import problems
from moefold.comm.p2p import CommStream, SynchronousStream, comm_stream
from moefold.comm.process_groups import Groups, Traffic
from moefold.config.run import RunConfig
from moefold.data.samples import Sample
from moefold.dryrun.balanced_splits import BalancedSplitSizes
from moefold.dryrun.fake_world import CachedFakeMode, fake_world, materialize_fake
from moefold.dryrun.min_microbatches import enough_microbatches, fewest_microbatches, kind_and_stage, order_of
from moefold.dryrun.storage_tracker import CATEGORIES
from moefold.dryrun.trace_step import Collective, StepTrace, TrafficTable, add, collectives, trace_step
from moefold.errors import ConfigError, Problem
from moefold.nn.batch import Ahead, Batch
from moefold.parallel.parallelize import LocalModel, build_on_meta, groups_of
from moefold.pipeline.pipeline_state import PipelineState
from moefold.pipeline.step import make_optimizer, run_step
from moefold.schedule.actions import Action
from moefold.schedule.names import schedule_named
from moefold.tables import text_table
from moefold.train.batches import step_batches
from moefold.units import format_bytes, format_seconds

CPU = torch.device("cpu")


@dataclass(frozen=True)
class DryRun:
    """What one rank's step holds and sends. Bytes; categories as in `storage_tracker.CATEGORIES`."""

    world: int
    rank: int
    # Microbatches of the step, and how many of them were executed.
    microbatches: int
    executed: int
    # Rows that this rank's experts receive, relative to the average.
    imbalance: float
    # At the peak of all memory: by category, in all, and during which action; then each category's own peak.
    peak: dict[str, int]
    peak_total: int
    peak_when: str
    category_peaks: dict[str, int]
    # The most bytes of offloaded activations in the host's memory.
    host_peak: int
    # What one microbatch's forward saves for its backward, by stage; and what was saved at the peak, by
    # (stage, microbatch).
    saved_per_microbatch: dict[int, int]
    held_at_peak: dict[tuple[int, int], int]
    # Of optimizer states in the host's memory (`memory.optimizer`); in none of the above.
    host_states: int
    # Of the whole step.
    collectives: tuple[Collective, ...]
    seconds: float


# Called with the number of actions done and of all actions.
Progress = Callable[[int, int], None]


def dry_run(
    run: RunConfig,
    world: int,
    rank: int,
    microbatches: int | None = None,
    *,
    imbalance: float = 1.0,
    progress: Progress | None = None,
) -> DryRun:
    """Execute one step of ``rank`` of ``world``.

    Of a long step only as many microbatches are executed as reach all states of the whole schedule, and collectives are
    extrapolated to the whole; with ``microbatches`` the step has exactly that many, and all are executed. This rank's
    experts receive ``imbalance`` times the average number of rows.
    """
    refuse(run, world, rank, microbatches, imbalance)
    # Kernels need a GPU and real memory; their references have the same shapes.
    in_torch = replace(run, kernels=replace(run.kernels, backend="torch"))
    with fake_world(world, rank):
        groups = groups_of(run, world, rank, timedelta(seconds=1))
        return dry_run_of_rank(in_torch, groups, CPU, microbatches, imbalance=imbalance, progress=progress)


def dry_run_stages(
    run: RunConfig,
    world: int,
    microbatches: int | None = None,
    *,
    imbalance: float = 1.0,
    progress: Progress | None = None,
) -> list[DryRun]:
    """The first rank of every pipeline rank; the other ranks of a stage hold as much, but for uneven shards."""
    found = []
    for stage in range(run.parallel.pp):
        rank = stage * (world // run.parallel.pp)
        found.append(dry_run(run, world, rank, microbatches, imbalance=imbalance))
        if progress is not None:
            progress(stage + 1, run.parallel.pp)
    return found


def dry_run_of_rank(
    run: RunConfig,
    groups: Groups,
    device: torch.device,
    microbatches: int | None = None,
    *,
    imbalance: float = 1.0,
    progress: Progress | None = None,
    under: AbstractContextManager[object] | None = None,
) -> DryRun:
    """The same inside a world of fake ranks; ``under`` is a context for everything that touches the device."""
    began = time.perf_counter()
    batches = step_batches(FullDocuments(run), 0, run, groups, CPU).batches
    shape = batches[0]
    split_sizes = BalancedSplitSizes(run, groups.layout, groups.rank, shape.lengths, shape.context_size, imbalance)
    local_model = build_on_meta(run, groups, device, split_sizes, make_stream=_stream_of_one_thread)
    whole, here = microbatches or len(batches), groups["pp"].index
    executed = microbatches or enough_microbatches(run, here, whole)
    with CachedFakeMode() as mode, under or nullcontext():
        local_model.sharding.allocate(device, materialize_fake)
        optimizer = make_optimizer(local_model)
        fakes = [fake_batch(batches[number % len(batches)], mode, device) for number in range(executed)]
        trace = second_step(local_model, optimizer, fakes, progress)
    return dry_run_of(local_model, whole, executed, imbalance, trace, time.perf_counter() - began)


def second_step(
    local_model: LocalModel,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    progress: Progress | None = None,
) -> StepTrace:
    """Trace a step after a first one that creates the optimizer states: as short as possible, or, with graphs, with all
    microbatches: slots are captured in the step after their first."""
    first = len(batches) if local_model.graphs else fewest_microbatches(local_model.run, len(batches))
    here = local_model.groups["pp"].index
    total = sum(len(order_of(local_model.run, number).actions[here]) for number in (first, len(batches)))
    done = 0

    def on_action(state: PipelineState, action: Action) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    run_step(local_model, optimizer, batches[:first], on_action=on_action)
    return trace_step(local_model, optimizer, batches, on_action)


def refuse(run: RunConfig, world: int, rank: int, microbatches: int | None, imbalance: float) -> None:
    found = problems(run, world)
    if not 0 <= rank < world:
        found.append(Problem("rank", f"there is no rank {rank} among {world}", f"choose from 0 to {world - 1}"))
    parallel = run.parallel
    if not found and microbatches is not None:
        found += schedule_named(parallel.schedule).problems(parallel.pp, parallel.vpp, microbatches)
    if not imbalance > 0:
        found.append(Problem("imbalance", f"{imbalance} times the average is not positive", "use 1.0 for even loads"))
    moe = run.model.moe
    reads_token_count = moe is not None and (
        moe.capacity is not None or moe.router.kind in ("sinkhorn", "expert_choice")
    )
    if run.data.packing == "padded" and reads_token_count:
        found.append(
            Problem(
                "data.packing",
                "padded documents under capacities, sinkhorn or expert choice: training reads their number of real "
                "tokens from the device, which a dry run cannot",
                "use concat, which has the same shapes",
            )
        )
    if run.precision.gather == "narrow" and parallel.sharding == "fsdp":
        found.append(
            Problem(
                "precision.gather",
                "FSDP gathers codes of tensors of a class of their own, which a dry run's tensors cannot have",
                "use null, or parallel.sharding: flat; `moefold plan` counts the bytes of codes",
            )
        )
    if found:
        raise ConfigError(*found)


class FullDocuments:
    """Samples of one document of full length; token values do not matter."""

    has_loss_mask = False

    def __init__(self, run: RunConfig) -> None:
        self.seq_len = run.data.seq_len

    def length(self, index: int) -> int:
        return self.seq_len

    def sample(self, index: int) -> Sample:
        return Sample(np.zeros(self.seq_len + 1, np.int64), (0,), f"dry:{index}")


def fake_batch(batch: Batch, mode: CachedFakeMode, device: torch.device = CPU) -> Batch:
    def fake(tensor: Tensor) -> Tensor:
        return mode.from_tensor(tensor).to(device)

    return replace(
        batch,
        tokens_S=fake(batch.tokens_S),
        labels_S=fake(batch.labels_S),
        positions_S=fake(batch.positions_S),
        real_S=None if batch.real_S is None else fake(batch.real_S),
        ahead=tuple(Ahead(fake(further.tokens_S), fake(further.labels_S)) for further in batch.ahead),
    )


def dry_run_of(
    local_model: LocalModel, whole: int, executed: int, imbalance: float, trace: StepTrace, seconds: float
) -> DryRun:
    run, groups = local_model.run, local_model.groups
    # Batches of the microbatches that were not executed are in memory in a whole step, too.
    left_out = (whole - executed) * trace.bytes_of_batch
    saved: dict[int, int] = {}
    for (stage, _), size in trace.saved.items():
        saved[stage] = max(saved.get(stage, 0), size)
    return DryRun(
        world=groups.layout.world,
        rank=groups.rank,
        microbatches=whole,
        executed=executed,
        imbalance=imbalance,
        peak=trace.peak.by_category | {"other": trace.peak.by_category["other"] + left_out},
        peak_total=trace.peak.total + left_out,
        peak_when=trace.peak.when,
        category_peaks=trace.peak.category_peaks | {"other": trace.peak.category_peaks["other"] + left_out},
        host_peak=trace.peak.host,
        saved_per_microbatch=dict(sorted(saved.items())),
        held_at_peak=dict(sorted(trace.held_at_peak.items())),
        host_states=trace.host_states,
        collectives=collectives(traffic_of_step(run, whole, trace, groups["pp"].index)),
        seconds=seconds,
    )


def traffic_of_step(run: RunConfig, whole: int, trace: StepTrace, here: int) -> TrafficTable:
    """Collectives of the whole step: an action that was not executed has those of one of its kind and stage that was.

    Microbatches have one shape, so they send the same. The last executed action of a kind is used: the first may have
    found parameters already unsharded.
    """
    executed = Counter(kind_and_stage(action) for action, _ in trace.by_action)
    missing = Counter(kind_and_stage(action) for action in order_of(run, whole).actions[here])
    missing.subtract(executed)
    by_kind = {kind_and_stage(action): traffic for action, traffic in trace.by_action}
    total = dict(trace.traffic)
    for kind, times in missing.items():
        for key, traffic in by_kind[kind].items() if times else ():
            total[key] = add(total.get(key, Traffic()), traffic, times)
    return total


def report(found: DryRun) -> str:
    return "\n".join(
        [
            f"rank {found.rank} of {found.world:,}: {format_bytes(found.peak_total)} at most, during the "
            f"{found.peak_when}",
            "",
            _memory(found),
            "",
            _microbatches(found),
            "",
            _collectives(found),
            "",
            *_notes(found),
        ]
    )


# One column per category, one row per rank.
STAGE_COLUMNS = ("rank", "GiB", *CATEGORIES)


def stage_row(rank: int, total: int, peak: Mapping[str, int]) -> tuple[str, ...]:
    """In GiB at the rank's peak."""
    return (f"{rank}", *(f"{size / 2**30:.1f}" for size in (total, *(peak[name] for name in CATEGORIES))))


def stages_report(found: Sequence[DryRun]) -> str:
    rows = [stage_row(each.rank, each.peak_total, each.peak) for each in found]
    title = f"one rank of every pipeline rank, of {found[0].world:,}: GiB at its peak, in all and by category"
    return "\n".join([title, "", text_table(STAGE_COLUMNS, rows), "", *_notes(found[0])[:1]])


def _memory(found: DryRun) -> str:
    rows = [
        (name, format_bytes(size), f"{size / found.peak_total:.1%}", format_bytes(found.category_peaks[name]))
        for name, size in found.peak.items()
    ]
    return text_table(("memory", "at the peak", "fraction", "own peak"), rows)


def _microbatches(found: DryRun) -> str:
    """By stage: what one microbatch saves for backward, and how many microbatches were in flight at the peak."""
    rows = []
    for stage, saved in found.saved_per_microbatch.items():
        # A microbatch that holds less than half has had its backward, or has only received its input.
        held = [microbatch for (of, microbatch), size in found.held_at_peak.items() if of == stage and 2 * size > saved]
        rows.append((stage, format_bytes(saved), len(held), ", ".join(map(str, held)) or "none"))
    return text_table(("stage", "one microbatch saves", "in flight at the peak", "which"), rows)


def _collectives(found: DryRun) -> str:
    rows = [(each.name, each.group, f"{each.count:,}", format_bytes(each.bytes)) for each in found.collectives]
    return text_table(("collective", "group", "calls", "bytes in"), rows)


def _notes(found: DryRun) -> list[str]:
    if found.executed < found.microbatches:
        executed = (
            f"{found.executed} of {found.microbatches} microbatches were executed: they reach every state "
            "of the whole step; collectives are counted for the whole step"
        )
    else:
        executed = f"all {found.microbatches} microbatches were executed"
    even = "every expert gets the same number of rows"
    load = (
        even
        if found.imbalance == 1
        else f"this rank's experts get {found.imbalance:g} times the average number of rows"
    )
    host = [f"optimizer states in the host's memory: {format_bytes(found.host_states)}"] if found.host_states else []
    host += [f"offloaded activations in the host's memory: {format_bytes(found.host_peak)}"] if found.host_peak else []
    return [f"{executed}; {load}", *host, f"took {format_seconds(found.seconds)}"]


def dry_run_json(found: DryRun) -> dict[str, Any]:
    return {
        "world": found.world,
        "rank": found.rank,
        "microbatches": found.microbatches,
        "executed": found.executed,
        "imbalance": found.imbalance,
        "peak": found.peak,
        "peak_total": found.peak_total,
        "peak_when": found.peak_when,
        "category_peaks": found.category_peaks,
        "host_peak": found.host_peak,
        "saved_per_microbatch": [{"stage": stage, "bytes": size} for stage, size in found.saved_per_microbatch.items()],
        "held_at_peak": [
            {"stage": stage, "microbatch": microbatch, "bytes": size}
            for (stage, microbatch), size in found.held_at_peak.items()
        ],
        "host_states": found.host_states,
        "collectives": [each._asdict() for each in found.collectives],
        "seconds": found.seconds,
    }


def _stream_of_one_thread(device: torch.device) -> CommStream:
    """Fake tensors belong to a thread, which a CPU's communication stream would leave."""
    return comm_stream(device) if device.type == "cuda" else SynchronousStream()
