"""Measurements with several ranks: collectives over gloo, sharded parameters, and ranks that share cores.

All groups of one size communicate at once, as in training: with four ranks, both pairs. Small and large messages tell
latency and bandwidth apart.

Parts of a model that are distributed over ranks are timed, forward and backward together, beside the same part on one
rank. The difference of the two times is the cost of distributing: collectives, copies, permuting what was received,
merging.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from moefold.attention.sdpa import attend
from moefold.bench.clock import REPEATS, Progress, Reference, Trial, barrier, ratios, repeat, seconds
from moefold.bench.single_rank import (
    CONTEXT,
    CROWDED,
    DOCUMENTS,
    MESSAGES,
    PARAMETERS,
    REPETITIONS,
    ROUTED,
    RUNS,
    TOKENS,
    random_batch,
    single_rank_model,
)
from moefold.comm.collectives import all_gather_no_grad, all_reduce_no_grad, reduce_scatter_no_grad
from moefold.comm.process_groups import Group, Groups, Ledger
from moefold.config.parallel import ParallelConfig
from moefold.moe.dispatch.all_to_all import AllToAllDispatcher
from moefold.moe.dispatch.base import Dispatcher, ExpertInput, LocalDispatcher, Routing
from moefold.moe.permute import gather_probs, gather_rows, group_by_expert, unpermute_rows
from moefold.nn.batch import context_shard, whole_batch
from moefold.parallel.context_parallel import ContextParallelCore, ring_groups
from moefold.parallel.param_shards import DATA_GROUPS
from moefold.pipeline.runtime import run_schedule
from moefold.topology.folded_layout import fold

# Rows of a message or a parameter.
_ROWS = 64


def measure_together(rank: int, world: int, rounds: int, progress: Progress | None) -> dict[str, float]:
    """In units of the reference, by name: "tokens 2 4096" is operation, group size and message bytes."""
    found: dict[str, float] = {}
    for group in group_sizes(world):
        found |= ratios(_wires(rank, world, group), rounds, f"messages among {group} of {world} ranks", progress)
    return found


def group_sizes(world: int) -> list[int]:
    return [size for size in (2, 4, 8, 16, 32) if size <= world and world % size == 0]


def measure_crowds(rank: int, world: int, rounds: int, progress: Progress | None) -> dict[str, float]:
    """Slowdown of independent work when 1, 2, 4, ... ranks do it at once, relative to one rank.

    "run 2" is a small run, "reference 2" the reference. Numbers of ranks alternate; ranks that do not compute wait.
    """
    local_model, batch, reference = single_rank_model(RUNS[CROWDED]), random_batch(RUNS[CROWDED]), Reference()
    # The reference as often in a row as elsewhere: the scheduler moves ranks between cores slowly, so few matmuls share
    # them less evenly.
    works: list[tuple[str, Trial]] = [
        ("run", partial(run_schedule, local_model, [batch])),
        *[("reference", partial(repeat, reference, REPEATS))] * 4,
    ]
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        for name, work in works:
            alone = 0.0
            for ranks in crowd_sizes(world):
                barrier()
                taken = seconds(work) if rank < ranks else 0.0
                barrier()
                mean = _mean(taken, ranks)
                alone = mean if ranks == 1 else alone
                found.setdefault(f"{name} {ranks}", []).append(mean / alone)
        if progress is not None:
            progress(f"up to {world} ranks at once", number + 1, rounds)
    return {name: median(taken) for name, taken in found.items()}


def crowd_sizes(world: int) -> list[int]:
    return [ranks for ranks in (1, 2, 4, 8, 16, 32, 64) if ranks <= world]


def _mean(taken: float, ranks: int) -> float:
    """Over the ranks that computed; the others contribute 0."""
    total = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / ranks


def _wires(rank: int, world: int, size: int) -> dict[str, Trial]:
    """Ranks that share cores reach a collective one after the other, so there work and message alternate."""
    group = _groups(rank, world, tp=size)["tp"]
    shards = _groups(rank, world, tp=world // size)
    contexts_by_size = _groups(rank, world, cp=size).contexts
    routed = _groups(rank, world, ep=size)
    parts: dict[str, Trial] = {}
    for total in MESSAGES:
        parts |= _named(size, total, _messages(group, total))
    for total in PARAMETERS:
        parts |= _named(size, total, sharded(shards, total))
    for number in DOCUMENTS:
        parts |= _named(size, number, contexts(contexts_by_size, size, number))
    for number in TOKENS:
        parts |= _named(size, number, experts(routed["ep"], routed["etp"], number))
    work: Trial = Reference() if world > (os.cpu_count() or 1) else idle
    return {f"work {size}": _alternating(work)} | {name: _alternating(work, part) for name, part in parts.items()}


def idle() -> None:
    """No work: ranks that have a core each arrive together anyway."""


def _named(size: int, amount: int, trials: dict[str, Trial]) -> dict[str, Trial]:
    return {f"{operation} {size} {amount}": trial for operation, trial in trials.items()}


def _groups(rank: int, world: int, **degrees: Any) -> Groups:
    return Groups(fold(ParallelConfig(**degrees), world), rank, Ledger(), timedelta(seconds=60))


def _alternating(*works: Trial) -> Trial:
    def trial() -> None:
        for _ in range(REPETITIONS):
            for work in works:
                work()

    return trial


def _messages(group: Group, total: int) -> dict[str, Trial]:
    whole = torch.ones(_ROWS, total // 4 // _ROWS)
    sizes = (_ROWS // group.size,) * group.size
    mine = whole[: sizes[0]].clone()
    peer = group.ranks[group.index ^ 1]

    def tokens() -> None:
        all_gather_no_grad(mine, sizes, group)
        reduce_scatter_no_grad(whole, sizes, group)

    def send() -> None:
        arriving = torch.empty_like(whole)
        works = [dist.isend(whole, peer, group=group.connected), dist.irecv(arriving, peer, group=group.connected)]
        for work in works:
            if work is not None:
                work.wait()

    return {
        "tokens": tokens,
        "send": send,
        "sum": lambda: all_reduce_no_grad(whole, group),
    }


# ---- distributed parts of a model ----


def contexts(groups: Mapping[int, Group], size: int, number: int) -> dict[str, Trial]:
    """Attention over ``number`` documents per rank that ``size`` ranks shard, and over as many on one rank."""
    heads, kv_heads, dim, length = CONTEXT.heads, CONTEXT.kv_heads, CONTEXT.dim, CONTEXT.length
    tokens = torch.zeros(length * number * size, dtype=torch.int64)
    whole = whole_batch(
        tokens, tokens, (length,) * number * size, context_size=size, step_labels=1, step_tokens=1, step_sequences=1
    )
    batch, core = context_shard(whole, groups[size].index), ContextParallelCore(ring_groups(groups))
    q = torch.randn(length * number, heads, dim, requires_grad=True)
    k, v = (torch.randn(length * number, kv_heads, dim, requires_grad=True) for _ in range(2))
    own = (length,) * number

    def over_ranks() -> None:
        core(q, k, v, batch, scale=dim**-0.5, window=None, sinks_H=None).sum().backward()

    return {"context": over_ranks, "one context": lambda: attend(q, k, v, own, dim**-0.5).sum().backward()}


def experts(ep: Group, etp: Group, tokens: int) -> dict[str, Trial]:
    """Dispatch and combine with experts on other ranks, and with all experts on this rank."""
    x = torch.randn(tokens, ROUTED.dim, requires_grad=True)
    # Every expert gets the same number of assignments, from tokens all over the batch.
    chosen = torch.randperm(tokens * ROUTED.top_k).view(tokens, ROUTED.top_k) % ROUTED.experts
    weight = torch.full((tokens, ROUTED.top_k), 0.5, requires_grad=True)

    def dispatch_and_combine(dispatcher: Dispatcher) -> Trial:
        def trial() -> None:
            arrived = dispatcher.dispatch(x, Routing(chosen, weight))
            dispatcher.combine(_permute_and_scale(arrived), arrived.ticket).sum().backward()

        return trial

    return {
        "exchange": dispatch_and_combine(AllToAllDispatcher(ROUTED.experts, ep, etp)),
        "one exchange": dispatch_and_combine(LocalDispatcher(ROUTED.experts)),
    }


def _permute_and_scale(arrived: ExpertInput) -> Tensor:
    """What experts do with rows besides their matmuls."""
    groups = group_by_expert(arrived.assignments, len(arrived.host_rows), sum(arrived.host_rows))
    prob_R = gather_probs(arrived.assignments.probs, groups.assignment_N)
    rows_RD = gather_rows(arrived.rows_RL, groups.token_N) * prob_R[:, None]
    return unpermute_rows(rows_RD, groups.token_N, arrived.rows_RL.shape[0])


class _FixedGradients(torch.autograd.Function):
    """An identity whose backward gives the weights these gradients at no cost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *ctx.gradients


class _Matrices(nn.Module):
    """Two parameters, as a layer has."""

    def __init__(self, total: int) -> None:
        super().__init__()
        columns = max(1, total // 4 // _ROWS // 2)
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(_ROWS, columns)) for _ in range(2))
        self.gradients = [torch.ones(_ROWS, columns) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _FixedGradients.apply(x, self.gradients, *self.weights)
        return out


def sharded(groups: Groups, total: int) -> dict[str, Trial]:
    """Unshard of ``total`` bytes of parameters; forward with backward: unshard twice and reduce_scatter gradients."""
    mesh = groups.device_mesh("cpu", *DATA_GROUPS["attention"])
    assert mesh is not None
    module = _Matrices(total)
    # FSDP keeps its root module unsharded until backward; a layer is never the root.
    outer = nn.Sequential(module)
    for each in (module, outer):
        fully_shard(each, mesh=mesh)
        each.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        each.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    x = torch.ones(4, requires_grad=True)

    def gather() -> None:
        with torch.no_grad():
            outer(x)

    return {"parameters": gather, "passes": lambda: outer(x).sum().backward()}
