"""ECHO around another dispatcher: rows beyond a rank's share go to clones of their experts on ranks with fewer.

Per microbatch and layer:

    counts      every rank gathers how many rows each rank has for each expert: [W, E] numbers
    plan        computed alike everywhere, on the device (`moe/echo_plan.py`)
    rows        the routing map is rewritten from experts to places, and the dispatcher inside moves rows as always
    weights     one all-to-all from the homes of hot experts to the slots of their clones, in the dtype of compute
    gradients   the same all-to-all the other way; each home adds them to those of its own rows

The optimizer, checkpoints and the balance losses see the experts at home and nothing else. A clone lives from the
microbatch's dispatch to its backward.

The exchange of weights has its sizes on the host, where torch's all-to-all wants them. They are read after the
dispatcher's own counts, so that the device has computed the plan when the host asks for it. If no rank has a clone,
no weights are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.comm.collectives import Sizes, all_gather_no_grad, all_to_all_rows
from moefold.comm.process_groups import Group
from moefold.moe.dispatch.base import Carried, Dispatcher, ExpertInput, Routing, SplitSizeSource, counts_of
from moefold.moe.echo_plan import ClonePlan, places_of_rows, plan_clones
from moefold.moe.permute import flat_experts
from moefold.ops.segments import rank_within_key
from moefold.plan.clone_loads import EchoSizes


class _Counts(NamedTuple):
    """``placed``: the routing map with places for experts; its probs are not those that travel."""

    placed: Routing
    inner: Carried
    exchange: CloneExchange | None


class _Rows(NamedTuple):
    """What the dispatcher inside sends or has received."""

    inner: Carried
    exchange: CloneExchange | None


class EchoDispatcher(Dispatcher):
    """``inner`` is built for all places; ``block``: all ranks that send rows to these experts."""

    def __init__(
        self, inner: Dispatcher, sizes: EchoSizes, min_rows: int, ep: Group, block: Group, host: SplitSizeSource
    ) -> None:
        self.inner, self.sizes, self.min_rows = inner, sizes, min_rows
        self.ep, self.block, self.host = ep, block, host

    def dispatch_counts(self, routing: Routing) -> _Counts:
        plan, rows_before_E = self._plan(routing)
        number_N = rank_within_key(flat_experts(routing, self.sizes.num_experts), self.sizes.num_experts + 1)
        number_tK = number_N.view_as(routing.experts)
        number_tK = number_tK + rows_before_E.index_select(0, routing.experts.flatten()).view_as(number_tK)
        place_tK = places_of_rows(routing.experts, number_tK, plan, self.sizes)
        placed = Routing(place_tK, routing.probs.detach(), routing.kept)
        inner = self.inner.dispatch_counts(placed)
        return _Counts(placed, inner, clone_exchange(self.host.cloned(plan.expert_N), self.sizes, self.ep))

    def dispatch_prepare(self, x_tL: Tensor, routing: Routing, counts: _Counts) -> _Rows:
        placed = counts.placed._replace(probs=routing.probs)
        return _Rows(self.inner.dispatch_prepare(x_tL, placed, counts.inner), counts.exchange)

    def dispatch_exchange(self, sent: _Rows) -> _Rows:
        return sent._replace(inner=self.inner.dispatch_exchange(sent.inner))

    def dispatch_finish(self, received: _Rows) -> ExpertInput:
        expert_in = self.inner.dispatch_finish(received.inner)
        if received.exchange is None:
            return own_experts_only(expert_in, self.sizes.experts_each)
        return expert_in._replace(clones=received.exchange)

    def combine_prepare(self, expert_out_RL: Tensor, ticket: Carried) -> Tensor:
        return self.inner.combine_prepare(expert_out_RL, ticket)

    def combine_exchange(self, rows_RL: Tensor, ticket: Carried) -> Tensor:
        return self.inner.combine_exchange(rows_RL, ticket)

    def combine_finish(self, rows_NL: Tensor, ticket: Carried) -> Tensor:
        return self.inner.combine_finish(rows_NL, ticket)

    def _plan(self, routing: Routing) -> tuple[ClonePlan, Tensor]:
        """The plan, and rows of each expert on the source ranks before this one."""
        counts_E = counts_of(routing, self.sizes.num_experts).long()
        counts_WE = all_gather_no_grad(counts_E[None], (1,) * self.block.size, self.block)
        return plan_clones(counts_WE.sum(0), self.sizes, self.min_rows), counts_WE[: self.block.index].sum(0)


def own_experts_only(expert_in: ExpertInput, num_experts: int) -> ExpertInput:
    """Without the slots, in which there are no rows."""
    return expert_in._replace(
        rows_per_expert_e=expert_in.rows_per_expert_e[:num_experts],
        rows_per_expert=expert_in.host_rows[:num_experts],
    )


class _Sent(NamedTuple):
    """Of the weights that leave this rank: their numbers among its experts, in the order of the message."""

    experts: tuple[int, ...]
    send: Sizes


class _Arrived(NamedTuple):
    """Of the weights that come: their slots, in the order of the message."""

    slots: tuple[int, ...]
    recv: Sizes


@dataclass(frozen=True)
class CloneExchange:
    """One microbatch's exchange of weights over the ep group (``moe.dispatch.base.CloneWeights``)."""

    group: Group
    num_slots: int
    sent: _Sent
    arrived: _Arrived

    def __call__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        clones: tuple[Tensor, ...] = _CloneWeights.apply(self, dtype, *weights)
        return clones


def clone_exchange(expert_of_slot: list[int], sizes: EchoSizes, ep: Group) -> CloneExchange | None:
    """From the experts in the slots of all ranks, on the host; None if there are no clones anywhere."""
    if all(expert < 0 for expert in expert_of_slot):
        return None
    each, slots, ranks = sizes.experts_each, sizes.slots, range(ep.size)
    of_rank = [expert_of_slot[rank * slots : (rank + 1) * slots] for rank in ranks]
    # An empty slot has expert -1, whose home would be rank -1.
    leaving = [[expert % each for expert in of_rank[rank] if expert // each == ep.index] for rank in ranks]
    coming = [[slot for slot, expert in enumerate(of_rank[ep.index]) if expert // each == rank] for rank in ranks]
    return CloneExchange(
        ep,
        slots,
        _Sent(tuple(expert for experts in leaving for expert in experts), tuple(map(len, leaving))),
        _Arrived(tuple(slot for arrived in coming for slot in arrived), tuple(map(len, coming))),
    )


class _Context(Protocol):
    """``like``: shapes and dtypes of the weights."""

    exchange: CloneExchange
    like: list[tuple[torch.Size, torch.dtype]]
    needs_input_grad: tuple[bool, ...]

    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...


class _CloneWeights(torch.autograd.Function):
    """All weights of an expert are one row of the message, those of its gradients too. Frozen ones have none."""

    @staticmethod
    def forward(ctx: _Context, exchange: CloneExchange, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.like = exchange, [(weight.shape, weight.dtype) for weight in weights]
        ctx.set_materialize_grads(False)
        sent, arrived = exchange.sent, exchange.arrived
        rows_NX = _joined([weight.detach() for weight in weights], sent.experts, dtype)
        rows_NX = all_to_all_rows(rows_NX, send=sent.send, recv=arrived.recv, group=exchange.group)
        clones = tuple(weight.new_zeros(exchange.num_slots, *weight.shape[1:], dtype=dtype) for weight in weights)
        for slot, row_X in zip(arrived.slots, rows_NX, strict=True):
            _add_row([clone[slot] for clone in clones], row_X)
        ctx.mark_non_differentiable(
            *(clone for clone, weight in zip(clones, weights, strict=True) if not weight.requires_grad)
        )
        return clones

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        exchange, needed = ctx.exchange, ctx.needs_input_grad[2:]
        sent, arrived = exchange.sent, exchange.arrived
        some = next(grad for grad in grads if grad is not None)
        trained = [
            some.new_zeros(exchange.num_slots, *shape[1:]) if grad is None else grad
            for grad, (shape, _), is_needed in zip(grads, ctx.like, needed, strict=True)
            if is_needed
        ]
        rows_NX = _joined(trained, arrived.slots, some.dtype)
        rows_NX = all_to_all_rows(rows_NX, send=arrived.recv, recv=sent.send, group=exchange.group)
        if not sent.experts:
            return None, None, *[None] * len(grads)
        homes = [
            some.new_zeros(shape, dtype=dtype) if is_needed else None
            for (shape, dtype), is_needed in zip(ctx.like, needed, strict=True)
        ]
        # One after the other: an expert may have several clones, and sums have one order.
        for expert, row_X in zip(sent.experts, rows_NX, strict=True):
            _add_row([home[expert] for home in homes if home is not None], row_X)
        return None, None, *homes


def _joined(weights: Sequence[Tensor], numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[numbers, X]: of each number its parts of all weights side by side."""
    dim = sum(weight[:1].numel() for weight in weights)
    rows_NX = weights[0].new_empty(len(numbers), dim, dtype=dtype)
    for number, row_X in zip(numbers, rows_NX, strict=True):
        _set_row([weight[number] for weight in weights], row_X)
    return rows_NX


def _set_row(parts: Sequence[Tensor], row_X: Tensor) -> None:
    for part, piece in zip(parts, row_X.split([part.numel() for part in parts]), strict=True):
        piece.copy_(part.flatten())


def _add_row(parts: Sequence[Tensor], row_X: Tensor) -> None:
    for part, piece in zip(parts, row_X.split([part.numel() for part in parts]), strict=True):
        part.add_(piece.view_as(part))
