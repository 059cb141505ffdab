"""Every collective, written down: what, over which group, how many bytes.

A formula for communication is worth as much as the measurement it was held against. The ledger is that measurement: it
counts the bytes this rank hands to a collective, forward and backward, by operation and group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Traffic(NamedTuple):
    """What one operation over one group has moved so far."""

    calls: int = 0
    bytes_sent: int = 0


@dataclass
class Ledger:
    """Adds up calls and bytes; one per run, handed to the groups."""

    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)

    def record(self, operation: str, group: str, sent: Tensor) -> None:
        """``sent`` is the tensor this rank contributes; its size is what counts, not the wire's algorithm."""
        before = self.traffic.get((operation, group), Traffic())
        self.traffic[operation, group] = Traffic(
            before.calls + 1, before.bytes_sent + sent.numel() * sent.element_size()
        )

    def of(self, operation: str, group: str) -> Traffic:
        return self.traffic.get((operation, group), Traffic())
