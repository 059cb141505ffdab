"""Which rows one matmul sees, so that the reference narrows what ranks narrow.

What a precision recipe narrows along tokens, or with one scale for a tensor, depends on the rows of one call. The
reference has all microbatches of a wave side by side; ranks have one microbatch, or a shard of one, and experts have
the rows of the ranks that share them. So with a recipe the reference makes the calls that ranks make, one after the
other, each on the rows of its rank in the order in which the rank has them; and its experts are called once for each
rank that holds some of them, because one scale is for the rows of all of a rank's experts. Everything that belongs to
a single row is the same with and without this. Where ranks route tokens of zeros (``kernels.row_padding:
routing_map``), these lie between the rows of two ranks, and so they do here.

Ranks are counted inside of a stage by their tokens: dp, then cp, then tp, whichever ranks are neighbours
(`parallel.rank_order`). R rows of a call, N tokens of a wave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moefold.blueprint.narrow_matmuls import NarrowMatmul, matmuls, module_of
from moefold.blueprint.sharding import partial_axes
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import ExpertInput, Routing
from moefold.moe.dispatch.padded_routing import routed_multiple
from moefold.moe.experts import ExpertBackend, Experts, ExpertWeights
from moefold.moe.permute import count_assignments
from moefold.nn.batch import Batch
from moefold.nn.layers import FeedForward, Linear
from moefold.nn.matmul_kernels import GroupedMatmul
from moefold.nn.matmul_policy import MatmulPolicy
from moefold.plan.dispatch_choice import dispatcher_in_use
from moefold.topology.folded_layout import FoldedLayout, fold


class CallRows(NamedTuple):
    """The tokens of every call of a wave, as indices [R] into it; each token is in one call of each kind."""

    # Of modules whose weights are cut over tp: a rank has all tokens of its context shard.
    gathered: tuple[Tensor, ...]
    # Of modules that are whole on every tp rank and see that rank's tokens.
    own: tuple[Tensor, ...]
    # Of experts: a set of ranks that hold each expert once has the tokens of all of them, those of one rank together.
    expert_blocks: tuple[tuple[Tensor, ...], ...]


def call_rows(run: RunConfig, batch: Batch) -> CallRows:
    """``batch``: all microbatches of a wave, which knows what each rank holds of them."""
    tp, ranks = run.parallel.tp, range(len(batch.shards.sizes))
    own = tuple((batch.shards.set_of_token_T == rank).nonzero().flatten() for rank in ranks)
    # Of the first stage.
    layout = fold(run.parallel, run.parallel.pp * len(ranks))
    blocks = dict.fromkeys(layout.ranks("expert_block", rank) for rank in ranks)
    return CallRows(
        gathered=tuple(torch.cat(own[first : first + tp]) for first in ranks[::tp]),
        own=own,
        expert_blocks=tuple(
            tuple(own[layout.token_place(source)] for source in source_order(run, layout, block)) for block in blocks
        ),
    )


def source_order(run: RunConfig, layout: FoldedLayout, block: Sequence[int]) -> list[int]:
    """The ranks of an expert block in the order in which an expert has their rows.

    ``all_gather`` has them in the order of ranks. By all-to-all, rows come from the ep peers first, and then from those
    of every etp peer; over two levels, first from every host to the rank of the same number.
    """
    parallel, dispatcher = run.parallel, dispatcher_in_use(run)
    if dispatcher == "all_gather":
        return list(block)
    inside = parallel.ep_inner if dispatcher == "two_level" else parallel.ep
    peers = [host * inside + index for index in range(inside) for host in range(parallel.ep // inside)]
    held = [layout.ranks("ep", rank) for rank in layout.ranks("etp", block[0])]
    return [each[peer] for each in held for peer in peers]


@dataclass
class Wave:
    """The calls of the wave that the reference is at; shared by all policies of a model."""

    rows: CallRows

    def set(self, run: RunConfig, batch: Batch) -> None:
        self.rows = call_rows(run, batch)


def call_by_call(model: nn.Module, run: RunConfig) -> Wave:
    """Every narrow module of a reference's model makes the calls of ranks from now on."""
    wave = Wave(CallRows((), (), ()))
    narrow = {module_of(matmul.weight.name): matmul for matmul in matmuls(run) if matmul.casts is not None}
    for name, module in model.named_modules():
        if name not in narrow:
            continue
        if isinstance(module, Experts):
            module.backend = _ExpertCalls(module.backend, run.parallel.ep, wave, routed_multiple(run))
        else:
            assert isinstance(module, (Linear, FeedForward))
            own_tokens = "tp" in partial_axes(narrow[name].weight) and not _has_one_scale(narrow[name])
            module.matmul_policy = _LinearCalls(module.matmul_policy, own_tokens, wave)
            if isinstance(module, FeedForward):
                module.down_matmul_policy = _LinearCalls(module.down_matmul_policy, own_tokens, wave)
    return wave


def _has_one_scale(matmul: NarrowMatmul) -> bool:
    """Per tensor: tp ranks compare their amaxes, so that their calls are narrowed as one."""
    casts = [] if matmul.casts is None else [cast for _, cast in matmul.casts.items() if cast is not None]
    return any(cast.block is None and cast.scale != "none" for cast in casts)


class _LinearCalls:
    def __init__(self, inner: MatmulPolicy, own_tokens: bool, wave: Wave) -> None:
        self.inner, self.own_tokens, self.wave = inner, own_tokens, wave

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        calls = self.wave.rows.own if self.own_tokens else self.wave.rows.gathered
        return _in_order([self.inner.linear(x[rows_R], weight) for rows_R in calls], calls)

    def grouped(
        self, matmul: GroupedMatmul, rows: Tensor, weight: Tensor, rows_per_expert_e: Tensor, host: list[int] | None
    ) -> Tensor:
        raise NotImplementedError("experts are called by `_ExpertCalls`")


def _in_order(parts: list[Tensor], calls: tuple[Tensor, ...]) -> Tensor:
    """Rows of all calls, back in the order of the wave."""
    return torch.cat(parts)[torch.cat(calls).argsort()]


class _ExpertCalls:
    """``multiple``: of the rows that one rank sends to one expert."""

    def __init__(self, inner: ExpertBackend, ep: int, wave: Wave, multiple: int) -> None:
        self.inner, self.ep, self.wave, self.multiple = inner, ep, wave, multiple

    def __call__(self, expert_in: ExpertInput, weights: ExpertWeights) -> Tensor:
        calls, size = self.wave.rows.expert_blocks, weights.gate_up.shape[0] // self.ep
        held = [(first, _experts(weights, slice(first, first + size))) for first in range(0, size * self.ep, size)]
        parts = [
            torch.stack([self._call(expert_in, sources, first, size, some) for first, some in held]).sum(0)
            for sources in calls
        ]
        return _in_order(parts, tuple(torch.cat(sources) for sources in calls))

    def _call(
        self, expert_in: ExpertInput, sources: tuple[Tensor, ...], first: int, size: int, weights: ExpertWeights
    ) -> Tensor:
        """The rows of all ``sources``, one rank after the other."""
        padded = [_pad(*_rows_for(expert_in, rows_R, first, size), size, self.multiple) for rows_R in sources]
        rows = torch.cat([rows for rows, _ in padded])
        fields = zip(*(routing[:3] for _, routing in padded), strict=True)
        routing = Routing(*(torch.cat(field) for field in fields))
        counts_e = count_assignments(routing, size)
        out = self.inner(ExpertInput(rows, routing, counts_e, counts_e.tolist(), None, None), weights)
        of_ranks = out.split([len(rows) for rows, _ in padded])
        return torch.cat([part[: len(rows_R)] for part, rows_R in zip(of_ranks, sources, strict=True)])


def _experts(weights: ExpertWeights, some: slice) -> ExpertWeights:
    # Matmuls take any tensor for a weight; these hand their gradients on to the whole ones.
    return weights._replace(
        gate_up=weights.gate_up[some],  # type: ignore[arg-type]
        down=weights.down[some],  # type: ignore[arg-type]
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias[some],
        down_bias=None if weights.down_bias is None else weights.down_bias[some],
    )


def _rows_for(expert_in: ExpertInput, rows_R: Tensor, first: int, size: int) -> tuple[Tensor, Routing]:
    """These rows, with their assignments to ``size`` experts from ``first`` on."""
    experts, probs, kept, _ = expert_in.assignments
    expert_RK = experts[rows_R] - first
    kept_RK = (expert_RK >= 0) & (expert_RK < size)
    if kept is not None:
        kept_RK &= kept[rows_R]
    return expert_in.rows_RL[rows_R], Routing(expert_RK, probs[rows_R], kept_RK)


def _pad(rows_RL: Tensor, routing: Routing, size: int, multiple: int) -> tuple[Tensor, Routing]:
    """Behind the rows of a rank, a row of zeros for every one that an expert lacks to a multiple."""
    experts, probs, kept, _ = routing
    assert kept is not None
    counts = count_assignments(routing, size).tolist()
    lacking = [expert for expert, count in enumerate(counts) for _ in range(-count % multiple)]
    pad_experts = torch.tensor(lacking, dtype=experts.dtype)[:, None].expand(-1, experts.shape[1])
    # Of the K assignments of a row, the first one counts.
    pad_kept = torch.arange(experts.shape[1]).expand(len(lacking), -1) == 0
    pad_probs = probs.new_zeros(pad_experts.shape)
    padded = Routing(torch.cat([experts, pad_experts]), torch.cat([probs, pad_probs]), torch.cat([kept, pad_kept]))
    return torch.cat([rows_RL, rows_RL.new_zeros(len(lacking), rows_RL.shape[1])]), padded
