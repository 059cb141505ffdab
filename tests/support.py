"""What tests of several ranks share: forked ranks, and their groups under a layout."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from moefold.comm.launch import fork_ranks
from moefold.comm.ledger import Ledger
from moefold.comm.mesh import Groups
from moefold.config.parallel import ParallelConfig
from moefold.topology.layout import fold


def on_ranks(work: Callable[[Groups], Any], world: int, **degrees: Any) -> list[Any]:
    """Run ``work(groups)`` on every rank of a layout; an assertion that fails on a rank fails here."""
    layout = fold(ParallelConfig(**degrees), world)

    def live(rank: int) -> Any:
        return work(Groups(layout, rank, Ledger(), timedelta(seconds=30)))

    return fork_ranks(live, world, seconds=60)
