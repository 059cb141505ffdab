"""A phase is one named piece of a layer's forward: either compute or communication.

A layer's forward is its list of phases run in order. Because everything a later phase needs is in the value the earlier
one hands on, and nothing on the layer, the phases of two microbatches can be interleaved: one computes while the
other's tokens travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from torch.utils.checkpoint import checkpoint


class Stream(Enum):
    COMPUTE = "compute"
    COMM = "comm"


@dataclass(frozen=True)
class Phase:
    name: str
    stream: Stream
    run: Callable[[Any], Any]


def run_in_order(phases: Sequence[Phase], carry: Any) -> Any:
    for phase in phases:
        carry = phase.run(carry)
    return carry


class _Inside(NamedTuple):
    """Between two phases of a part: what the whole keeps waiting, and what the part hands itself."""

    outer: Any
    inner: Any


def nest(phases: Sequence[Phase], enter: Callable[[Any], Any], leave: Callable[[Any, Any], Any]) -> tuple[Phase, ...]:
    """A part's phases as phases of the whole: ``enter`` takes the part's input out of the carry, ``leave`` puts its
    answer in."""

    def run(phase: Phase, is_first: bool, is_last: bool, carry: Any) -> Any:
        outer, inner = (carry, enter(carry)) if is_first else carry
        inner = phase.run(inner)
        return leave(outer, inner) if is_last else _Inside(outer, inner)

    last = len(phases) - 1
    return tuple(replace(phase, run=partial(run, phase, i == 0, i == last)) for i, phase in enumerate(phases))


def recomputed(phase: Phase) -> Phase:
    """The same phase, which keeps its input only and is computed again when its gradient is asked for."""
    return replace(phase, run=lambda carry: checkpoint(phase.run, carry, use_reentrant=False, preserve_rng_state=False))
