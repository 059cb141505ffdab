"""Ranks in a circle: everyone hands something to the rank some places on and is handed something from as far behind.

Nothing waits until it must: ``shift`` starts the transfer and returns at once, the caller computes, and ``wait`` hands
over what has arrived. All ranks shift in the same order, and a send and its receive start together, so that two ranks
that send to each other do not wait for each other. What nobody needs is not sent: both ends know the sizes, and a shift
of no rows is no message.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from moefold.comm.group import Group


@dataclass
class Shift:
    """A transfer under way. It keeps what is being sent alive until the wait."""

    _arriving: Tensor
    _sent: Tensor | None
    _works: list[dist.Work]

    def wait(self) -> Tensor:
        """The rows of the rank behind."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], None
        return self._arriving


def shift(rows: Tensor, arriving: int, group: Group, *, places: int = 1, tag: int = 0) -> Shift:
    """Send all rows to the rank ``places`` on (negative: back), and receive ``arriving`` rows of the same kind.

    Transfers between the same two ranks arrive in the order they were sent, per ``tag``.
    """
    here = group.index
    to, source = (group.ranks[(here + step) % group.size] for step in (places, -places))
    rows = rows.contiguous()
    buffer = rows.new_empty(arriving, *rows.shape[1:])
    transfers = []
    if rows.numel():
        group.ledger.record("send", group.name, rows)
        transfers.append(dist.P2POp(dist.isend, rows, to, group.handle, tag))
    if buffer.numel():
        transfers.append(dist.P2POp(dist.irecv, buffer, source, group.handle, tag))
    works = dist.batch_isend_irecv(transfers) if transfers else []
    return Shift(buffer, rows, works)
