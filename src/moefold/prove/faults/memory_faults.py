"""Faults of exchanges through shared memory: pieces in the wrong order, forward or backward, and rows left behind.

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import moefold.comm.shared_memory
import moefold.comm.sorted_exchange
from moefold.comm.shared_memory import Pieces
from moefold.comm.sorted_exchange import SavedPieces, _exchange
from moefold.prove.faults.parallel_faults import put


def _by_peer_pieces(sizes_We: Sequence[Sequence[int]]) -> Pieces:
    """As rows arrive."""
    return moefold.comm.shared_memory.in_order([sum(sizes) for sizes in sizes_We])


def rows_received_by_peer_instead_of_expert() -> None:
    put(moefold.comm.sorted_exchange, "by_expert_pieces", _by_peer_pieces)


def gradients_exchanged_by_peer_instead_of_expert() -> None:
    def in_one_piece(pieces: Pieces) -> Pieces:
        return moefold.comm.shared_memory.in_order([sum(count for _, count in each) for each in pieces])

    def backward(ctx: SavedPieces, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, in_one_piece(ctx.recv), in_one_piece(ctx.send), ctx.group), None, None, None

    put(moefold.comm.sorted_exchange._Exchange, "backward", staticmethod(backward))


def own_rows_left_behind() -> None:
    def forget(
        target: Tensor,
        recv: Sequence[tuple[int, int]],
        source: Tensor,
        send: Sequence[tuple[int, int]],
        row_bytes: int,
    ) -> None:
        for first, count in recv:
            target[first * row_bytes : (first + count) * row_bytes].zero_()

    put(moefold.comm.shared_memory, "_copy_own", forget)


# What breaks a rank, the case in which it matters, and how it happens in real code.
FAULTS = (
    (
        rows_received_by_peer_instead_of_expert,
        "folded",
        "rows of shared memory are read in the order in which peers sent them",
    ),
    (
        gradients_exchanged_by_peer_instead_of_expert,
        "folded",
        "the way back of sorted rows forgets that they were sorted",
    ),
    (own_rows_left_behind, "folded", "an exchange copies what peers wrote, and nothing that stays"),
)
