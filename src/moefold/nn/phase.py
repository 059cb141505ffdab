"""A phase is one named piece of a layer's forward: either compute or communication.

A layer's forward is its phases in order. Everything a later phase needs is in the carry that the earlier one returns,
and nothing on the layer, so the phases of two microbatches can be interleaved: one computes while the other's tokens
travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
    # A communication phase of a few numbers, without a backward: its result is waited for as soon as it is submitted.
    at_once: bool = False
    # Whether it may have parameters, whose gradients a schedule may defer.
    has_weights: bool = True
    # Of a stage's phases: the number of the part that begins with this one (`blueprint/stage_modules.py`).
    part: int | None = None


def run_in_order(phases: Sequence[Phase], carry: Any) -> Any:
    for phase in phases:
        carry = phase.run(carry)
    return carry


class _Inside(NamedTuple):
    """Between two phases of an inner module: the carry of the outer one, and its own."""

    outer: Any
    inner: Any


def nest(phases: Sequence[Phase], enter: Callable[[Any], Any], leave: Callable[[Any, Any], Any]) -> tuple[Phase, ...]:
    """A module's phases as phases of the module around it: ``enter`` takes the inner input out of the carry, ``leave``
    puts the inner output in."""

    def run(phase: Phase, is_first: bool, is_last: bool, carry: Any) -> Any:
        outer, inner = (carry, enter(carry)) if is_first else carry
        inner = phase.run(inner)
        return leave(outer, inner) if is_last else _Inside(outer, inner)

    last = len(phases) - 1
    return tuple(replace(phase, run=partial(run, phase, i == 0, i == last)) for i, phase in enumerate(phases))


def inside(phase: Phase, scope: Callable[[], AbstractContextManager[None]]) -> Phase:
    """The same phase, run inside a context of its own."""

    def run(carry: object) -> object:
        with scope():
            return phase.run(carry)

    return replace(phase, run=run)


def recomputed(phase: Phase) -> Phase:
    """The same phase, which saves only its input and is recomputed in the backward pass."""
    return replace(phase, run=lambda carry: checkpoint(phase.run, carry, use_reentrant=False, preserve_rng_state=False))
