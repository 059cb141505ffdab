"""Rows spread over ranks, gathered and added up, each crossing with the gradient its use demands.

Rank i holds ``sizes[i]`` consecutive rows of the whole.

Gathering is one movement with two meanings. If the ranks go on to do *different* work with the gathered rows, each
holds a part of the gradient and backward must add the parts up (``all_gather_rows``). If they all go on to do the
*same* work, each already holds the whole gradient and adding them up would count it once per rank
(``all_gather_replicated``). Adding up has the same two faces: ``all_reduce_partial`` feeds different work,
``all_reduce_replicated`` feeds the same work.

Sums over ranks of 16-bit numbers are carried in float32: a sum must not lose digits because it crossed a wire.

Rows change owners: an all-to-all with uneven counts, and the exchange of the counts themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.process_groups import Group
from moefold.errors import ExchangeError

Sizes = tuple[int, ...]

# torch 2.13 renamed both and warns about the old names; 2.11 knows only those.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather_rows(rows: Tensor, sizes: Sizes, group: Group) -> Tensor:
    """All rows, for work that differs between ranks; backward adds gradients up and cuts them (reduce-scatter)."""
    return rows if group.alone else _GatherRows.apply(rows, sizes, group)


def reduce_scatter_rows(partial: Tensor, sizes: Sizes, group: Group) -> Tensor:
    """Everyone's partial sums of all rows, added up, cut to mine; backward gathers."""
    return partial if group.alone else _ReduceRows.apply(partial, sizes, group)


def all_gather_replicated(rows: Tensor, sizes: Sizes, group: Group) -> Tensor:
    """All rows, for work that every rank repeats; backward keeps this rank's rows of the gradient."""
    return rows if group.alone else _GatherSame.apply(rows, sizes, group)


def all_reduce_partial(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, for work that differs between them; backward sums too."""
    return x if group.alone else _SumPartial.apply(x, group)


def all_reduce_replicated(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, for work that every rank repeats; backward hands the gradient through."""
    return x if group.alone else _SumSame.apply(x, group)


def all_gather_no_grad(rows: Tensor, sizes: Sizes, group: Group) -> Tensor:
    """All rows, outside of any gradient."""
    return rows if group.alone else _gather(rows.detach(), sizes, group)


def reduce_scatter_no_grad(partial: Tensor, sizes: Sizes, group: Group) -> Tensor:
    """Everyone's partial sums of all rows, added up, cut to mine, outside of any gradient."""
    return partial if group.alone else _reduce(partial.detach(), sizes, group)


def all_reduce_no_grad(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, outside of any gradient."""
    return x if group.alone else _sum(x.detach(), group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Sizes, group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _gather(rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce(grad, ctx.sizes, ctx.group), None, None


class _ReduceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, sizes: Sizes, group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _reduce(partial, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.sizes, ctx.group), None, None


class _GatherSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Sizes, group: Group) -> Tensor:
        ctx.sizes, ctx.index = sizes, group.index
        return _gather(rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.split(ctx.sizes)[ctx.index], None, None


class _SumPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _SumSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _gather(rows: Tensor, sizes: Sizes, group: Group) -> Tensor:
    mine = _padded(rows, max(sizes))
    group.ledger.record("all_gather", group.name, mine)
    everyone = mine.new_empty(group.size * max(sizes), *mine.shape[1:])
    _all_gather(everyone, mine, group=group.handle)
    return _strip(everyone, sizes)


def _reduce(partial: Tensor, sizes: Sizes, group: Group) -> Tensor:
    wide = partial.float() if partial.element_size() < 4 else partial
    if min(sizes) != max(sizes):
        wide = torch.cat([_padded(part, max(sizes)) for part in wide.split(sizes)])
    group.ledger.record("reduce_scatter", group.name, wide)
    mine = wide.new_empty(max(sizes), *wide.shape[1:])
    _reduce_scatter(mine, wide.contiguous(), group=group.handle)
    return mine[: sizes[group.index]].to(partial.dtype)


def _sum(x: Tensor, group: Group) -> Tensor:
    wide = x.to(torch.float32, copy=True) if x.is_floating_point() and x.element_size() < 4 else x.clone()
    group.ledger.record("all_reduce", group.name, wide)
    dist.all_reduce(wide, group=group.handle)
    return wide.to(x.dtype)


def _padded(rows: Tensor, size: int) -> Tensor:
    """Collectives want equal pieces, so short ones travel with a zero row at their end."""
    missing = size - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.contiguous()


def _strip(everyone: Tensor, sizes: Sizes) -> Tensor:
    longest = max(sizes)
    if min(sizes) == longest:
        return everyone
    return torch.cat([everyone[i * longest : i * longest + size] for i, size in enumerate(sizes)])


def all_to_all_rows(rows: Tensor, *, send: Sizes, recv: Sizes, group: Group) -> Tensor:
    """Send ``send[i]`` consecutive rows to peer i and return the ``recv[i]`` rows it sent us.

    Backward is the same exchange with ``send`` and ``recv`` swapped.
    """
    if sum(send) != rows.shape[0]:
        raise ExchangeError(
            f"all_to_all_rows over {group.name}: the counts to send add up to {sum(send)}, there are {rows.shape[0]} "
            f"rows (send={list(send)}, group size {group.size})"
        )
    return rows if group.alone else _ExchangeRows.apply(rows, send, recv, group)


def all_to_all_counts(counts: Tensor, group: Group) -> Tensor:
    """Peer i gets the i-th equal slice of ``counts``; returns what the peers sent, in their order."""
    if group.alone:
        return counts
    group.ledger.record("all_to_all", group.name, counts)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts.contiguous(), group=group.handle)
    return theirs


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: Sizes, recv: Sizes, group: Group) -> Tensor:
        ctx.send, ctx.recv, ctx.group = send, recv, group
        return _move(rows, send, recv, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _move(grad, ctx.recv, ctx.send, ctx.group), None, None, None


def _move(rows: Tensor, send: Sizes, recv: Sizes, group: Group) -> Tensor:
    group.ledger.record("all_to_all", group.name, rows)
    arrived = rows.new_empty(sum(recv), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), list(recv), list(send), group=group.handle)
    return arrived
