"""Rows change owners: an all-to-all with uneven counts, and the exchange of the counts themselves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.group import Group
from moefold.errors import ExchangeError

Sizes = tuple[int, ...]


def exchange_rows(rows: Tensor, *, send: Sizes, recv: Sizes, group: Group) -> Tensor:
    """Send ``send[i]`` consecutive rows to peer i and return the ``recv[i]`` rows it sent us.

    Backward is the same exchange with ``send`` and ``recv`` swapped.
    """
    if sum(send) != rows.shape[0]:
        raise ExchangeError(
            f"exchange_rows over {group.name}: the counts to send add up to {sum(send)} but there are {rows.shape[0]} "
            f"rows (send={list(send)}, group size {group.size})"
        )
    return rows if group.alone else _ExchangeRows.apply(rows, send, recv, group)


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
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
