"""A named set of ranks that talk to each other."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from moefold.comm.ledger import Ledger


@dataclass(frozen=True)
class Group:
    """The ranks, this rank's place among them, and the handle to reach them; a lone rank has no handle."""

    name: str
    ranks: tuple[int, ...]
    index: int
    handle: ProcessGroup | None
    ledger: Ledger

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def connected(self) -> ProcessGroup:
        """The handle, where the caller has made sure that there are peers."""
        assert self.handle is not None, f"group {self.name} has one rank and no handle"
        return self.handle

    @property
    def alone(self) -> bool:
        return len(self.ranks) == 1
