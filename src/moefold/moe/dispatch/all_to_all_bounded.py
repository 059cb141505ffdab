"""Dropless all-to-all without a host read: buffers of a fixed number of rows, and counts that stay on the device.

Every rank sends every peer the same number of rows, ``bounds.pair``, empty ones behind those that hold a token; so
splits are known before anything is routed. Counts per expert go beside them. From these the receiver computes on the
device which row of the messages belongs at which place in the order of the experts, and gathers them into a buffer of
``bounds.rank`` rows; grouped GEMMs read the end of each expert's rows from the device. Rows past the last expert's are
zeros on the way in. What GEMMs leave there is undefined, and nothing reads it: neither ``combine`` nor any backward.

    x_tL -- slots of W pairs -- all-to-all -- order of the experts -- GEMMs -- slots -- all-to-all -- sum per token

Nothing is dropped in silence. ``ExpertInput.overflow`` counts rows that did not fit, of a pair or of this rank. The
step sums it over ranks and layers, reads it once, and where it is not zero discards its gradients and runs once more
with exact counts (`pipeline/step.py`): ``lifted`` makes this dispatcher the plain all-to-all for that long.

Rows have the same order as with ``all_to_all``, and sums are made in the same order, so values are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.blueprint.row_bounds import RowBounds, row_bounds
from moefold.comm.collectives import (
    all_gather_no_grad,
    all_gather_rows,
    all_to_all_counts,
    all_to_all_rows,
    reduce_scatter_rows,
)
from moefold.comm.message_codecs import RowCodec
from moefold.comm.process_groups import Groups
from moefold.config.run import RunConfig
from moefold.moe.dispatch import all_to_all
from moefold.moe.dispatch.all_to_all import AllToAllDispatcher
from moefold.moe.dispatch.base import (
    Carried,
    Dispatcher,
    ExpertInput,
    Routing,
    SplitSizeSource,
    counts_of,
    most_rank_tokens,
)
from moefold.moe.permute import apply_with_transpose, gather_probs, gather_rows, group_padded
from moefold.ops.segments import segment_sum


class Slots(NamedTuple):
    """Where the assignments of this rank's tokens are in its messages. N = t K assignments, X slots of all pairs."""

    # One past the last for empty slots.
    token_X: Tensor
    assignment_X: Tensor
    # The last slot, which is empty, for assignments that were dropped or did not fit.
    slot_N: Tensor
    first_t: Tensor


class Places(NamedTuple):
    """Rows of messages in the order of the experts. Y slots of all sources, R places."""

    # The last slot, which is empty, for places past the last expert's.
    slot_R: Tensor
    # Any place for empty slots.
    place_Y: Tensor
    is_empty_Y: Tensor
    rows_per_expert_e: Tensor
    # Rows that do not fit into R places.
    overflow: Tensor


class _Counts(NamedTuple):
    """Rows for every expert from this rank; and from every source, for each expert of this rank."""

    sent_E: Tensor
    rows_from_Se: Tensor


class _Rows(NamedTuple):
    """One row and one prob per slot: of this rank's tokens as sent, of all sources as received."""

    rows_XL: Tensor
    prob_X: Tensor
    slots: Slots
    counts: _Counts


class _Ticket(NamedTuple):
    slots: Slots
    places: Places


class _Exact(NamedTuple):
    """A value of the plain all-to-all, while bounds are lifted."""

    value: Carried


class BoundedAllToAllDispatcher(Dispatcher):
    def __init__(self, exact: AllToAllDispatcher, bounds: RowBounds) -> None:
        self.exact, self.bounds = exact, bounds
        self.ep, self.etp, self.codecs = exact.ep, exact.etp, exact.codecs
        self.num_experts, self.num_local = exact.num_experts, exact.num_local
        # While a step is run again.
        self.is_lifted = False

    def dispatch_counts(self, routing: Routing) -> _Counts | _Exact:
        """Exchanged on the device; nobody reads them."""
        if self.is_lifted:
            return _Exact(self.exact.dispatch_counts(routing))
        sent_E = counts_of(routing, self.num_experts)
        received_We = all_to_all_counts(sent_E, self.ep).view(self.ep.size, self.num_local)
        return _Counts(sent_E, all_gather_no_grad(received_We, (self.ep.size,) * self.etp.size, self.etp))

    def dispatch_prepare(self, x_tL: Tensor, routing: Routing, counts: _Counts | _Exact) -> _Rows | _Exact:
        if isinstance(counts, _Exact):
            return _Exact(self.exact.dispatch_prepare(x_tL, routing, counts.value))
        slots = slots_of(routing, self.num_experts, self.ep.size, self.bounds.pair)
        return _Rows(fill_slots(x_tL, slots), gather_probs(routing.probs, slots.assignment_X), slots, counts)

    def dispatch_exchange(self, sent: _Rows | _Exact) -> _Rows | _Exact:
        if isinstance(sent, _Exact):
            return _Exact(self.exact.dispatch_exchange(sent.value))
        rows_YL = self._send(sent.rows_XL, self.codecs.forward)
        return _Rows(rows_YL, self._send(sent.prob_X), sent.slots, sent.counts)

    def dispatch_finish(self, received: _Rows | _Exact) -> ExpertInput:
        if isinstance(received, _Exact):
            expert_in = self.exact.dispatch_finish(received.value)
            none = expert_in.rows_per_expert_e.new_zeros(())
            return expert_in._replace(ticket=_Exact(expert_in.ticket), overflow=none)
        (pair, rank), (sent_E, rows_from_Se) = self.bounds, received.counts
        places = places_of(rows_from_Se, pair, rank)
        rows_RL, prob_R = compact(received.rows_XL, places), compact(received.prob_X, places)
        ends_e = places.rows_per_expert_e.cumsum(0)
        expert_R = torch.searchsorted(ends_e, torch.arange(rank, device=rows_RL.device), right=True)
        # For backends that look: rows past the last expert's are no assignments.
        kept_R1 = (expert_R < self.num_local)[:, None]
        sent_W = sent_E.view(self.ep.size, self.num_local).sum(1)
        return ExpertInput(
            rows_RL,
            Routing(expert_R.clamp(max=self.num_local - 1)[:, None], prob_R[:, None], kept_R1),
            places.rows_per_expert_e,
            None,
            None,
            _Ticket(received.slots, places),
            by_expert=True,
            overflow=(sent_W - (pair - 1)).clamp(min=0).sum() + places.overflow,
        )

    def combine_prepare(self, expert_out_RL: Tensor, ticket: _Ticket | _Exact) -> Tensor:
        if isinstance(ticket, _Exact):
            return self.exact.combine_prepare(expert_out_RL, ticket.value)
        return spread(expert_out_RL, ticket.places)

    def combine_exchange(self, rows_YL: Tensor, ticket: _Ticket | _Exact) -> Tensor:
        if isinstance(ticket, _Exact):
            return self.exact.combine_exchange(rows_YL, ticket.value)
        even, codec = (self.bounds.pair,) * self.ep.size, self.codecs.backward
        own_XL = reduce_scatter_rows(rows_YL, (sum(even),) * self.etp.size, self.etp, grad_codec=codec)
        return all_to_all_rows(own_XL, send=even, recv=even, group=self.ep, grad_codec=codec)

    def combine_finish(self, rows_XL: Tensor, ticket: _Ticket | _Exact) -> Tensor:
        if isinstance(ticket, _Exact):
            return self.exact.combine_finish(rows_XL, ticket.value)
        return sum_slots(rows_XL, ticket.slots)

    def _send(self, rows_X: Tensor, codec: RowCodec | None = None) -> Tensor:
        even = (self.bounds.pair,) * self.ep.size
        received = all_to_all_rows(rows_X, send=even, recv=even, group=self.ep, codec=codec)
        return all_gather_rows(received, (sum(even),) * self.etp.size, self.etp, codec=codec)


@contextmanager
def lifted(dispatchers: Iterable[BoundedAllToAllDispatcher]) -> Iterator[None]:
    """Without bounds: counts are read on the host, and no row is left out."""
    held = list(dispatchers)
    try:
        for dispatcher in held:
            dispatcher.is_lifted = True
        yield
    finally:
        for dispatcher in held:
            dispatcher.is_lifted = False


# ---- indices, computed on the device; no shape depends on data ----


def slots_of(routing: Routing, num_experts: int, num_ranks: int, pair: int) -> Slots:
    """Each rank's assignments in the order of its experts, in the first ``pair`` - 1 slots of its part."""
    num_tokens, top_k = routing.experts.shape
    device, num_assignments = routing.experts.device, num_tokens * top_k
    groups = group_padded(routing, num_experts, pair - 1, num_experts // num_ranks)
    # The empty slot at the end of every part.
    token_X, assignment_X = (
        torch.cat([number.view(num_ranks, -1), number.new_full((num_ranks, 1), empty)], dim=1).flatten()
        for number, empty in ((groups.token_N, num_tokens), (groups.assignment_N, num_assignments))
    )
    last = num_ranks * pair - 1
    slot_N = torch.full((num_assignments + 1,), last, device=device)
    slot_N = slot_N.scatter_(0, assignment_X, torch.arange(last + 1, device=device))[:num_assignments]
    first_t = torch.arange(0, num_assignments, top_k, device=device)
    return Slots(token_X, assignment_X, slot_N, first_t)


def places_of(rows_from_Se: Tensor, pair: int, rank: int) -> Places:
    """From what each source sends to each expert, which its part of the messages has in this order."""
    (num_sources, num_local), device = rows_from_Se.shape, rows_from_Se.device
    num_slots = num_sources * pair
    # Of each source's part: where an expert's rows end and begin. What does not fit is at the end of it.
    stop_Se = rows_from_Se.cumsum(1).clamp(max=pair - 1)
    start_Se = torch.cat([stop_Se.new_zeros(num_sources, 1), stop_Se[:, :-1]], dim=1)
    # Runs in the order of experts and then of sources: how far each moves from its slot to its place.
    size_U = (stop_Se - start_Se).t().flatten()
    end_U = size_U.cumsum(0)
    slot_U = (start_Se + torch.arange(0, num_slots, pair, device=device)[:, None]).t().flatten()
    shift_U = slot_U - (end_U - size_U)
    place_R = torch.arange(rank, device=device)
    run_R = torch.searchsorted(end_U, place_R, right=True)
    is_past_R = run_R >= num_sources * num_local
    slot_R = place_R + shift_U.index_select(0, run_R.clamp(max=num_sources * num_local - 1))
    # One slot more than there are, for places that have none.
    place_Y = torch.full((num_slots + 1,), rank, device=device)
    place_Y = place_Y.scatter_(0, slot_R.masked_fill(is_past_R, num_slots), place_R)[:num_slots]
    ends_e = end_U.view(num_local, num_sources)[:, -1]
    kept_e = ends_e.clamp(max=rank)
    rows_per_expert_e = torch.diff(kept_e, prepend=kept_e.new_zeros(1))
    return Places(
        slot_R.masked_fill(is_past_R, num_slots - 1),
        place_Y.clamp(max=rank - 1),
        place_Y == rank,
        rows_per_expert_e,
        (ends_e[-1:] - rank).clamp(min=0).sum(),
    )


def places_reference(rows_from: list[list[int]], pair: int, rank: int) -> tuple[list[int], list[int]]:
    """The slot of each place, row by row, and how many rows each expert has."""
    slots: list[int] = []
    rows_per_expert = []
    for expert in range(len(rows_from[0])):
        before = len(slots)
        for source, rows in enumerate(rows_from):
            start = sum(rows[:expert])
            slots += [source * pair + row for row in range(start, start + rows[expert]) if row < pair - 1]
        slots = slots[:rank]
        rows_per_expert.append(len(slots) - before)
    return slots + [len(rows_from) * pair - 1] * (rank - len(slots)), rows_per_expert


# ---- rows along these indices; each way is the other's gradient ----


def fill_slots(x_tL: Tensor, slots: Slots) -> Tensor:
    """[X, L]: the row of each slot's token; zeros for empty slots."""
    return apply_with_transpose(x_tL, slots, _fill_slots, _sum_slots)


def sum_slots(rows_XL: Tensor, slots: Slots) -> Tensor:
    """[t, L]: the sum of each token's rows. The last slot is zeros, as ``spread`` leaves it."""
    return apply_with_transpose(rows_XL, slots, _sum_slots, _fill_slots)


def _fill_slots(x_tL: Tensor, slots: Slots) -> Tensor:
    return gather_rows(x_tL, slots.token_X)


def _sum_slots(rows_XL: Tensor, slots: Slots) -> Tensor:
    if not slots.first_t.shape[0]:
        return rows_XL.new_zeros(0, rows_XL.shape[1])
    return segment_sum(rows_XL.contiguous(), slots.slot_N, slots.first_t, None)


def compact(rows_Y: Tensor, places: Places) -> Tensor:
    """[R, ...]: rows of messages in the order of the experts; zeros past the last one's."""
    return apply_with_transpose(rows_Y, places, _compact, _spread)


def spread(rows_R: Tensor, places: Places) -> Tensor:
    """[Y, ...]: each row at the slot that it came from; zeros at empty ones, whatever is past the last expert's."""
    return apply_with_transpose(rows_R, places, _spread, _compact)


def _compact(rows_Y: Tensor, places: Places) -> Tensor:
    return rows_Y.index_select(0, places.slot_R)


def _spread(rows_R: Tensor, places: Places) -> Tensor:
    is_empty_Y = places.is_empty_Y.view(-1, *(1,) * (rows_R.dim() - 1))
    # Selected and not multiplied by zero: what is past the last expert's rows may be anything.
    return rows_R.index_select(0, places.place_Y).masked_fill_(is_empty_Y, 0)


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> BoundedAllToAllDispatcher:
    tokens = most_rank_tokens(run, groups.layout.size("dp"))
    return BoundedAllToAllDispatcher(all_to_all.build(run, groups, host), row_bounds(run, tokens))
