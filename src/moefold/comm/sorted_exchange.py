"""An all-to-all after which rows lie by expert, not by peer: the copy out of shared memory puts each where it belongs.

Rows of several peers for several experts arrive peer after peer, and experts compute them expert after expert. Where
ranks share memory (`shared_memory.py`) a row is copied from there anyway, and its place costs nothing; elsewhere it is
one more pass over all rows. The way back is the same: rows are taken from where the experts left them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from moefold.comm.process_groups import Group
from moefold.comm.shared_memory import Pieces, in_order


def to_experts(rows_N: Tensor, send: Sequence[int], sizes_We: Sequence[Sequence[int]], group: Group) -> Tensor:
    """``send[i]`` consecutive rows to peer i; from peer w ``sizes_We[w][e]`` rows of expert e, received by expert and
    then by peer."""
    received: Tensor = _Exchange.apply(rows_N, in_order(send), by_expert_pieces(sizes_We), group)
    return received


def from_experts(rows_R: Tensor, sizes_We: Sequence[Sequence[int]], recv: Sequence[int], group: Group) -> Tensor:
    """The way back: rows by expert and then by peer; ``recv[i]`` rows from peer i, one peer after the other."""
    received: Tensor = _Exchange.apply(rows_R, by_expert_pieces(sizes_We), in_order(recv), group)
    return received


def by_expert_pieces(sizes_We: Sequence[Sequence[int]]) -> Pieces:
    """Where the rows of each peer lie, if rows lie by expert and then by peer."""
    firsts = iter(accumulate((size for expert in zip(*sizes_We, strict=True) for size in expert), initial=0))
    first_eW = [[next(firsts) for _ in sizes_We] for _ in sizes_We[0]]
    return [
        [(first_eW[expert][peer], size) for expert, size in enumerate(sizes)] for peer, sizes in enumerate(sizes_We)
    ]


class SavedPieces(Protocol):
    send: Pieces
    recv: Pieces
    group: Group


class _Exchange(torch.autograd.Function):
    """Backward is the same exchange with both ends swapped."""

    @staticmethod
    def forward(ctx: SavedPieces, rows: Tensor, send: Pieces, recv: Pieces, group: Group) -> Tensor:
        ctx.send, ctx.recv, ctx.group = send, recv, group
        return _exchange(rows, send, recv, group)

    @staticmethod
    def backward(ctx: SavedPieces, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, ctx.recv, ctx.send, ctx.group), None, None, None


def _exchange(rows: Tensor, send: Pieces, recv: Pieces, group: Group) -> Tensor:
    memory = group.memory()
    assert memory is not None, f"the ranks of {group.name} share no memory"
    received = rows.new_empty(sum(count for pieces in recv for _, count in pieces), *rows.shape[1:])
    with group.timed("all_to_all", rows):
        memory.all_to_all(received, rows.contiguous(), recv, send)
    return received
