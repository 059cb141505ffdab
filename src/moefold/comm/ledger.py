"""Counts of every collective: operation, group, calls and bytes.

The planner's communication formulas are tested against these counts: the bytes this rank passes to each collective,
forward and backward, by operation and group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Traffic(NamedTuple):
    """Calls and bytes of one operation over one group so far."""

    calls: int = 0
    bytes_sent: int = 0


@dataclass
class Ledger:
    """Sums of calls and bytes; one per run, shared by all groups of the rank."""

    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)

    def record(self, operation: str, group: str, sent: Tensor) -> None:
        """``sent`` is the tensor this rank passes in; its size is counted, independent of the backend's algorithm."""
        before = self.traffic.get((operation, group), Traffic())
        self.traffic[operation, group] = Traffic(
            before.calls + 1, before.bytes_sent + sent.numel() * sent.element_size()
        )

    def of(self, operation: str, group: str) -> Traffic:
        return self.traffic.get((operation, group), Traffic())
