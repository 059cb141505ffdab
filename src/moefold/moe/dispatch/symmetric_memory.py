"""One row per assignment over torch's symmetric memory: the splits of the all-to-all stay on the device.

``all_to_all_vdev_2d`` takes rows sorted by expert, with counts on the device, and leaves them on each rank by expert
and then by source; ``all_to_all_vdev_2d_offset`` is its way back. No rank waits for a count before it sends. The host
reads once per layer, after the rows are on their way: how many rows came for each expert, for the shapes of the GEMMs.
With a ``capacity`` every rank sends exactly that many rows per expert, padding included, and the host reads nothing.

A message is the bytes of a row, then of its prob, so both travel in one exchange. An expert without rows occupies one
row of the output all the same, so received rows are gathered by offset and not sliced.

Peers read a rank's input where it lies, until an unknown time after the call; and they write their counts into a rank's
output counts at the beginning of the next one. So there are two sets of buffers, used in turn. Every call begins with
a barrier of all ranks: when a set's turn comes again, the other set's call has passed its barrier, and every rank has
then finished the call before it. Received messages are copied out of the buffers before the next call.

NVSHMEM allocates and synchronises over all ranks of the job, so all of them must dispatch at the same time: there can
be no pipeline. Without a capacity, buffers hold the worst case, every rank's tokens all for this rank's experts,
because rows beyond the end of a buffer would be written all the same.

Of a dispatch's parts, ``prepare`` sorts assignments. Rows are copied into the buffers, and out of them, by the
exchange, because the order of exchanges says which set of buffers is next.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moefold.comm.process_groups import Group, Groups
from moefold.config.run import RunConfig
from moefold.errors import BackendError
from moefold.moe.dispatch.base import (
    SYNC_SPLIT_SIZES,
    Dispatcher,
    ExpertInput,
    Routing,
    SplitSizeSource,
    counts_of,
    most_rank_tokens,
    padded_rows,
)
from moefold.moe.permute import gather_probs, gather_rows, group_by_expert, group_padded
from moefold.ops.engines import load_engine
from moefold.precision.dtypes import TORCH_FORMATS

# Of a message: rows start at multiples of it.
_ALIGNMENT = 16


class Sizes(NamedTuple):
    """Of the buffers of a rank; the same on every rank."""

    num_experts: int
    sent_rows: int
    received_rows: int
    message_bytes: int


def buffer_sizes(
    num_experts: int, ep: int, top_k: int, most_tokens: int, capacity: int | None, row_bytes: int, prob_bytes: int
) -> Sizes:
    """``most_tokens``: of any rank in any microbatch."""
    num_local = num_experts // ep
    message = -(-(row_bytes + prob_bytes) // _ALIGNMENT) * _ALIGNMENT
    if capacity is not None:
        return Sizes(num_experts, num_experts * capacity, ep * num_local * capacity, message)
    # One more row per expert, for experts without rows.
    received = ep * most_tokens * min(top_k, num_local) + num_local
    return Sizes(num_experts, most_tokens * top_k, received, message)


class _BufferSet(NamedTuple):
    """Messages by expert as sent and as received, and counts: [E] sent; [2, E] of counts and offsets on either way."""

    sent: Tensor
    received: Tensor
    splits_E: Tensor
    splits_there: Tensor
    splits_back: Tensor


class SymmetricExchange:
    """``library`` is torch.distributed._symmetric_memory, ``ops`` are torch.ops.symm_mem."""

    def __init__(self, library: ModuleType, ops: ModuleType, group: Group, sizes: Sizes) -> None:
        self.library, self.ops, self.group, self.sizes = library, ops, group, sizes
        self._sets: list[_BufferSet] = []
        self._calls = 0

    def there(self, message_NB: Tensor, rows_per_expert_E: Tensor) -> tuple[Tensor, Tensor]:
        """To the experts. Returns the received messages, valid until the next call, and their counts and offsets."""
        buffers, ops = self._next_set(message_NB.device), self.ops
        buffers.sent[: len(message_NB)].copy_(message_NB)
        buffers.splits_E.copy_(rows_per_expert_E)
        ops.all_to_all_vdev_2d(
            buffers.sent, buffers.received, buffers.splits_E, buffers.splits_there, self.group.connected.group_name
        )
        return buffers.received, buffers.splits_there.clone()

    def back(self, message_RB: Tensor, place_R: Tensor, splits_there: Tensor, num_rows: int) -> Tensor:
        """From the experts: messages at the places where their rows had been received. Returns [N, B] in the order in
        which they were sent, valid until the next call."""
        buffers, ops = self._next_set(message_RB.device), self.ops
        buffers.received.index_copy_(0, place_R, message_RB)
        buffers.splits_there.copy_(splits_there)
        ops.all_to_all_vdev_2d_offset(
            buffers.received, buffers.sent, buffers.splits_there, buffers.splits_back, self.group.connected.group_name
        )
        return buffers.sent[:num_rows]

    def _next_set(self, device: torch.device) -> _BufferSet:
        if not self._sets:
            self._sets = self._allocate(device)
        self._calls += 1
        return self._sets[self._calls % 2]

    def _allocate(self, device: torch.device) -> list[_BufferSet]:
        """By the first dispatch: a collective of all ranks of the job."""
        library, sizes = self.library, self.sizes
        library.set_backend("NVSHMEM")
        shapes = {
            "sent": ((sizes.sent_rows, sizes.message_bytes), torch.uint8),
            "received": ((sizes.received_rows, sizes.message_bytes), torch.uint8),
            "splits_E": ((sizes.num_experts,), torch.int64),
            "splits_there": ((2, sizes.num_experts), torch.int64),
            "splits_back": ((2, sizes.num_experts), torch.int64),
        }
        made = []
        for _ in range(2):
            tensors = {
                name: library.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()
            }
            for tensor in tensors.values():
                library.rendezvous(tensor, self.group.connected)
            made.append(_BufferSet(**tensors))
        return made


class _Sorted(NamedTuple):
    """Messages sorted by expert: each one's token, and one past the last for padding; rows per expert.

    And of every assignment [t, K]: its message, and whether it has one (None: all have).
    """

    assignment_N: Tensor
    token_N: Tensor
    rows_per_expert_E: Tensor
    message_tK: Tensor
    sent_tK: Tensor | None
    padded: bool


class _Route(NamedTuple):
    """How messages were sorted, their counts and offsets at the receiver, and where received rows lay."""

    order: _Sorted
    splits_there: Tensor
    place_R: Tensor


class _Sent(NamedTuple):
    x_tL: Tensor
    prob_tK: Tensor
    order: _Sorted


class _Received(NamedTuple):
    rows_RL: Tensor
    prob_R: Tensor
    expert_R: Tensor
    rows_per_expert: list[int]
    route: _Route


class SymmetricMemoryDispatcher(Dispatcher):
    def __init__(
        self,
        num_experts: int,
        ep: int,
        exchange: SymmetricExchange,
        capacity: int | None = None,
        host: SplitSizeSource = SYNC_SPLIT_SIZES,
    ) -> None:
        self.num_experts, self.num_local, self.ep = num_experts, num_experts // ep, ep
        self.exchange, self.capacity, self.host = exchange, capacity, host

    def dispatch_prepare(self, x_tL: Tensor, routing: Routing, counts: None) -> _Sent:
        return _Sent(x_tL, routing.probs, self._sort(routing))

    def dispatch_exchange(self, sent: _Sent) -> _Received:
        return _Received(*_Dispatch.apply(*sent, self))

    def dispatch_finish(self, received: _Received) -> ExpertInput:
        rows_RL, prob_R, expert_R, rows_per_expert, route = received
        return ExpertInput(
            rows_RL,
            Routing(expert_R[:, None], prob_R[:, None]),
            route.splits_there[0].view(-1, self.ep).sum(1),
            rows_per_expert,
            None if self.capacity is None else self.capacity * self.ep,
            route,
            by_expert=True,
        )

    def combine_exchange(self, rows_RL: Tensor, ticket: _Route) -> Tensor:
        combined: Tensor = _Combine.apply(rows_RL, ticket, self.exchange)
        return combined

    def send(self, x_tL: Tensor, prob_tK: Tensor, order: _Sorted) -> tuple[Tensor, Tensor, list[int], _Route]:
        """The received messages, each one's expert, rows per expert, and the route of the way back."""
        rows_NL = gather_rows(x_tL, order.token_N, order.padded)
        prob_N = gather_probs(prob_tK, order.assignment_N, order.padded)
        received, splits_there = self.exchange.there(
            _pack(self.exchange.sizes, rows_NL, prob_N), order.rows_per_expert_E
        )
        counts_eW, offsets_eW = splits_there.view(2, self.num_local, self.ep)
        if self.capacity is None:
            rows_per_expert = [sum(rows) for rows in zip(*self.host.arriving(counts_eW.t()), strict=True)]
        else:
            rows_per_expert = [self.capacity * self.ep] * self.num_local
        num_rows = sum(rows_per_expert)
        place_R = _places(counts_eW.flatten(), offsets_eW.flatten(), num_rows)
        expert_R = torch.repeat_interleave(counts_eW.sum(1), output_size=num_rows)
        return received[place_R], expert_R, rows_per_expert, _Route(order, splits_there, place_R)

    def _sort(self, routing: Routing) -> _Sorted:
        """No shape depends on data: dropped assignments are sorted behind all others and belong to no expert."""
        num_assignments, device = routing.experts.numel(), routing.experts.device
        if self.capacity is None:
            assignment_N, token_N = group_by_expert(routing, self.num_experts, num_assignments)
            counts_E = counts_of(routing, self.num_experts)
        else:
            assignment_N, token_N = group_padded(routing, self.num_experts, self.capacity)
            counts_E = torch.full((self.num_experts,), self.capacity, device=device)
        places_N = torch.arange(len(assignment_N), device=device)
        # One more than there are assignments, for padding; it is cut off.
        message = torch.full((num_assignments + 1,), -1, device=device).scatter_(0, assignment_N, places_N)
        message_tK = message[:num_assignments].view_as(routing.experts)
        if self.capacity is None:
            # Every assignment has a place; those that are not kept, behind the messages.
            return _Sorted(assignment_N, token_N, counts_E, message_tK, routing.kept, False)
        sent_tK = message_tK >= 0 if routing.kept is None else (message_tK >= 0).logical_and_(routing.kept)
        return _Sorted(assignment_N, token_N, counts_E, message_tK.clamp_(min=0), sent_tK, True)


def _places(counts_S: Tensor, offsets_S: Tensor, num_rows: int) -> Tensor:
    """[R]: where the rows of segments with these offsets lie, one segment after the other."""
    starts_S = counts_S.cumsum(0) - counts_S
    shift_R = (offsets_S - starts_S).repeat_interleave(counts_S, output_size=num_rows)
    return shift_R + torch.arange(num_rows, device=counts_S.device)


def _pack(sizes: Sizes, rows: Tensor, probs: Tensor | None) -> Tensor:
    """Messages: the bytes of each row, of its prob, and what is missing to the size of a message."""
    parts = [rows.contiguous().view(torch.uint8)]
    if probs is not None:
        parts.append(probs.contiguous()[:, None].view(torch.uint8))
    missing = sizes.message_bytes - sum(part.shape[1] for part in parts)
    return torch.cat([*parts, parts[0].new_zeros(len(rows), missing)], 1)


def _unpack(message: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return message[:, : dim * dtype.itemsize].contiguous().view(dtype)


def _unpack_probs(message: Tensor, dim: int, dtype: torch.dtype, prob_dtype: torch.dtype) -> Tensor:
    start = dim * dtype.itemsize
    # Copied: a slice of columns of one row counts as contiguous and may start where the dtype may not.
    part = message[:, start : start + prob_dtype.itemsize].clone(memory_format=torch.contiguous_format)
    return part.view(prob_dtype).flatten()


def _sum_per_token(rows_NL: Tensor, order: _Sorted) -> Tensor:
    """[t, L]: the rows of a token's assignments, summed in their order."""
    return _of_assignments(rows_NL, order).sum(1)


def _of_assignments(values_N: Tensor, order: _Sorted) -> Tensor:
    """[t, K, ...]: of each assignment's message; zeros where it has none."""
    values_tK = values_N[order.message_tK]
    if order.sent_tK is None:
        return values_tK
    return values_tK.masked_fill_(~order.sent_tK.view(*order.sent_tK.shape, *[1] * (values_tK.ndim - 2)), 0)


class _Kept(Protocol):
    """What a backward pass needs."""

    exchange: SymmetricExchange
    route: _Route
    dim: int
    dtype: torch.dtype

    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept, x_tL: Tensor, prob_tK: Tensor, order: _Sorted, dispatcher: SymmetricMemoryDispatcher
    ) -> tuple[Tensor, Tensor, Tensor, list[int], _Route]:
        message_RB, expert_R, rows_per_expert, route = dispatcher.send(x_tL, prob_tK, order)
        ctx.exchange, ctx.route, ctx.dim, ctx.dtype = dispatcher.exchange, route, x_tL.shape[1], x_tL.dtype
        ctx.mark_non_differentiable(expert_R)
        rows_RL = _unpack(message_RB, ctx.dim, ctx.dtype)
        prob_R = _unpack_probs(message_RB, ctx.dim, ctx.dtype, prob_tK.dtype)
        return rows_RL, prob_R, expert_R, rows_per_expert, route

    @staticmethod
    def backward(ctx: _Kept, grad_RL: Tensor, grad_R: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        message_NB = _send_back(ctx.exchange, ctx.route, _pack(ctx.exchange.sizes, grad_RL, grad_R))
        order = ctx.route.order
        grad_N = _unpack_probs(message_NB, ctx.dim, ctx.dtype, grad_R.dtype)
        grad_tK = _of_assignments(grad_N, order)
        return _sum_per_token(_unpack(message_NB, ctx.dim, ctx.dtype), order), grad_tK, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, expert_out_RL: Tensor, route: _Route, exchange: SymmetricExchange) -> Tensor:
        ctx.exchange, ctx.route, ctx.dim, ctx.dtype = exchange, route, expert_out_RL.shape[1], expert_out_RL.dtype
        message_NB = _send_back(exchange, route, _pack(exchange.sizes, expert_out_RL, None))
        return _sum_per_token(_unpack(message_NB, ctx.dim, ctx.dtype), route.order)

    @staticmethod
    def backward(ctx: _Kept, grad_tL: Tensor) -> tuple[Tensor, None, None]:
        """Along the same routes, so received rows lie where they lay before."""
        order = ctx.route.order
        message_NB = _pack(ctx.exchange.sizes, gather_rows(grad_tL, order.token_N, order.padded), None)
        received, _ = ctx.exchange.there(message_NB, order.rows_per_expert_E)
        return _unpack(received[ctx.route.place_R], ctx.dim, ctx.dtype), None, None


def _send_back(exchange: SymmetricExchange, route: _Route, message_RB: Tensor) -> Tensor:
    return exchange.back(message_RB, route.place_R, route.splits_there, len(route.order.assignment_N))


# One for all layers of a rank.
_EXCHANGES: WeakKeyDictionary[Groups, SymmetricExchange] = WeakKeyDictionary()


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> SymmetricMemoryDispatcher:
    moe, ep, dp = run.model.moe, groups["ep"], groups.layout.size("dp")
    assert moe is not None
    capacity = padded_rows(run, dp)
    if groups not in _EXCHANGES:
        dtype, dim = TORCH_FORMATS[run.precision.compute], moe.latent_dim or run.model.dim
        most_tokens = most_rank_tokens(run, dp)
        # The router's probs are in float32, or wider where everything is.
        prob_bytes = max(dtype.itemsize, torch.float32.itemsize)
        sizes = buffer_sizes(
            moe.num_experts, ep.size, moe.top_k, most_tokens, capacity, dim * dtype.itemsize, prob_bytes
        )
        library = load_engine("symmetric_memory")
        if not library.is_nvshmem_available():
            raise BackendError(
                "symmetric_memory: this build of torch finds no NVSHMEM (libnvshmem_host.so.3); install it, or use "
                "parallel.dispatcher all_to_all"
            )
        _EXCHANGES[groups] = SymmetricExchange(library, torch.ops.symm_mem, ep, sizes)
    return SymmetricMemoryDispatcher(moe.num_experts, ep.size, _EXCHANGES[groups], capacity, host)
