"""`dry_run`: the real training step of one rank of a large job, without the job and without its memory.

What runs is what training runs: the same share of the model, the same sharding, optimizer, order of microbatches,
clipping and update. Three things are handed in from outside. Tensors are fake. The process group has no peers. And how
many rows travel to which expert, which training reads from the device, is what the balanced router would make of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from moefold.checks.run_all import problems
from moefold.comm.comm_stream import SynchronousStream
from moefold.comm.ledger import Traffic
from moefold.config.run import RunConfig
from moefold.data.samples import Sample
from moefold.dryrun.balanced_splits import BalancedSplitSizes
from moefold.dryrun.collective_trace import Book, Collective, collectives, more
from moefold.dryrun.fake_world import FakeMemory, fake_world, give_fake_memory
from moefold.dryrun.min_microbatches import enough_microbatches, fewest_microbatches, order_of, what_is_done
from moefold.dryrun.trace_step import Seen, rehearse
from moefold.errors import ConfigError, Problem
from moefold.nn.batch import Ahead, Batch
from moefold.parallel.parallelize import LocalModel, build_on_meta, groups_of
from moefold.pipeline.pipeline_state import PipelineState
from moefold.pipeline.step import run_step
from moefold.schedule.actions import Action
from moefold.schedule.names import schedule_named
from moefold.train.batches import step_batches
from moefold.train.train_context import make_optimizer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class DryRun:
    """What one rank's step holds and sends. Bytes; categories as `timeline.CATEGORIES` lists them."""

    world: int
    rank: int
    # Microbatches of the step, and how many of them were carried out to learn everything about it.
    microbatches: int
    executed: int
    # Rows that arrive at this rank's experts, as a multiple of the average.
    imbalance: float
    # At the moment when most was held, by category and in all; what was going on then; each category's own most.
    peak: dict[str, int]
    peak_total: int
    peak_when: str
    most: dict[str, int]
    # What one microbatch's forward leaves for its backward, by stage; and what was left at the peak, by
    # (stage, microbatch).
    saved_per_microbatch: dict[int, int]
    held_at_peak: dict[tuple[int, int], int]
    # Of the whole step.
    collectives: tuple[Collective, ...]
    seconds: float


# Told how many actions are done, and of how many.
Progress = Callable[[int, int], None]


def dry_run(
    run: RunConfig,
    world: int,
    rank: int,
    microbatches: int | None = None,
    *,
    imbalance: float = 1.0,
    progress: Progress = lambda done, total: None,
) -> DryRun:
    """Carry out one step of ``rank`` of ``world``.

    Of a long step as many microbatches are carried out as meet all states of the whole order, and collectives are
    counted up to the whole; with ``microbatches`` the step has exactly that many, and all are carried out.
    ``imbalance`` times the average number of rows arrive at this rank's experts.
    """
    refuse(run, world, rank, microbatches, imbalance)
    began = time.perf_counter()
    with fake_world(world, rank):
        groups = groups_of(run, world, rank, timedelta(seconds=1))
        batches = step_batches(FullDocuments(run), 0, run, groups, CPU).batches
        shape = batches[0]
        host = BalancedSplitSizes(run, groups.layout, rank, shape.lengths, shape.context_size, imbalance)
        # Kernels need a GPU and memory that is there; what they compute is known from their twins.
        in_torch = replace(run, kernels=replace(run.kernels, backend="torch"))
        local_model = build_on_meta(in_torch, groups, CPU, host)
        if local_model.comm_stream is not None:
            local_model = replace(local_model, comm_stream=SynchronousStream())
        whole, here = microbatches or len(batches), groups["pp"].index
        executed = microbatches or enough_microbatches(run, here, whole)
        with FakeMemory() as memory:
            give_fake_memory(local_model.model, CPU)
            optimizer = make_optimizer(local_model)
            fakes = [fake_batch(batches[number % len(batches)], memory) for number in range(executed)]
            seen = second_step(local_model, optimizer, fakes, progress)
        return dry_run_of(local_model, whole, executed, imbalance, seen, time.perf_counter() - began)


def second_step(
    local_model: LocalModel,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    progress: Progress = lambda done, total: None,
) -> Seen:
    """Watch a step after one that is as short as can be: from then on optimizer states exist."""
    first = fewest_microbatches(local_model.run, len(batches))
    here = local_model.groups["pp"].index
    total = sum(len(order_of(local_model.run, number).actions[here]) for number in (first, len(batches)))
    done = 0

    def on_action(flight: PipelineState, action: Action) -> None:
        nonlocal done
        done += 1
        progress(done, total)

    run_step(local_model, optimizer, batches[:first], on_action=on_action)
    return rehearse(local_model, optimizer, batches, on_action)


def refuse(run: RunConfig, world: int, rank: int, microbatches: int | None, imbalance: float) -> None:
    found = problems(run, world)
    if not 0 <= rank < world:
        found.append(Problem("rank", f"there is no rank {rank} among {world}", f"choose from 0 to {world - 1}"))
    parallel = run.parallel
    if not found and microbatches is not None:
        found += schedule_named(parallel.schedule).problems(parallel.pp, parallel.vpp, microbatches)
    if not imbalance > 0:
        found.append(Problem("imbalance", f"{imbalance} times the average is no load", "use 1.0 for even loads"))
    moe = run.model.moe
    decides_together = moe is not None and (
        moe.capacity is not None or moe.router.kind in ("sinkhorn", "expert_choice")
    )
    if run.data.packing == "padded" and decides_together:
        found.append(
            Problem(
                "data.packing",
                "padded documents under capacities, sinkhorn or expert choice: training reads their number of real "
                "tokens from the device, where a dry run has nothing to read",
                "use concat, which has the same shapes",
            )
        )
    if found:
        raise ConfigError(*found)


class FullDocuments:
    """Samples for which every document is as long as a sample may be; what its tokens say does not matter."""

    def __init__(self, run: RunConfig) -> None:
        self.seq_len = run.data.seq_len

    def length(self, index: int) -> int:
        return self.seq_len

    def sample(self, index: int) -> Sample:
        return Sample(np.zeros(self.seq_len + 1, np.int64), (0,), f"dry:{index}")


def fake_batch(batch: Batch, memory: FakeMemory) -> Batch:
    def fake(tensor: Tensor) -> Tensor:
        return memory.from_tensor(tensor)

    return replace(
        batch,
        tokens_T=fake(batch.tokens_T),
        labels_T=fake(batch.labels_T),
        positions_T=fake(batch.positions_T),
        real_T=None if batch.real_T is None else fake(batch.real_T),
        ahead=tuple(Ahead(fake(further.tokens_T), fake(further.labels_T)) for further in batch.ahead),
    )


def dry_run_of(
    local_model: LocalModel, whole: int, executed: int, imbalance: float, seen: Seen, seconds: float
) -> DryRun:
    run, groups = local_model.run, local_model.groups
    # The batches of microbatches that were left out are there in a whole step, too.
    left_out = (whole - executed) * seen.bytes_of_batch
    saved: dict[int, int] = {}
    for (stage, _), size in seen.saved.items():
        saved[stage] = max(saved.get(stage, 0), size)
    return DryRun(
        world=groups.layout.world,
        rank=groups.rank,
        microbatches=whole,
        executed=executed,
        imbalance=imbalance,
        peak=seen.peak.then | {"other": seen.peak.then["other"] + left_out},
        peak_total=seen.peak.total + left_out,
        peak_when=seen.peak.when,
        most=seen.peak.most | {"other": seen.peak.most["other"] + left_out},
        saved_per_microbatch=dict(sorted(saved.items())),
        held_at_peak=dict(sorted(seen.held_at_peak.items())),
        collectives=collectives(whole_book(run, whole, seen, groups["pp"].index)),
        seconds=seconds,
    )


def whole_book(run: RunConfig, whole: int, seen: Seen, here: int) -> Book:
    """The collectives of the whole step: those of the actions that were not carried out are those of their like.

    Microbatches have one shape, so the same thing done for another one sends the same. The last of its kind stands for
    the rest: the first may have found something gathered already, or not yet.
    """
    carried_out = Counter(what_is_done(action) for action, _ in seen.of_action)
    missing = Counter(what_is_done(action) for action in order_of(run, whole).actions[here])
    missing.subtract(carried_out)
    like = {what_is_done(action): book for action, book in seen.of_action}
    total = dict(seen.book)
    for what, times in missing.items():
        for key, traffic in like[what].items() if times else ():
            total[key] = more(total.get(key, Traffic()), traffic, times)
    return total
