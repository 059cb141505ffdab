"""A phase is one named piece of a layer's forward: either compute or communication.

A layer's forward is its list of phases run in order. Because everything a later phase needs is in the value the earlier
one hands on, and nothing on the layer, the phases of two microbatches can be interleaved: one computes while the
other's tokens travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Lane(Enum):
    COMPUTE = "compute"
    COMM = "comm"


@dataclass(frozen=True)
class Phase:
    name: str
    lane: Lane
    run: Callable[[Any], Any]


def run_in_order(phases: Sequence[Phase], carry: Any) -> Any:
    for phase in phases:
        carry = phase.run(carry)
    return carry
