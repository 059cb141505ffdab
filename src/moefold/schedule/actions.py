"""What a pipeline rank does, as data.

The model's layers are cut into stages, and a rank holds one or several of them (its virtual stages). A step's batch is
cut into microbatches. An **action** is one piece of work of one stage on one microbatch, or one message to a
neighbouring stage. An **order** is, for every rank, the list of actions that it runs from first to last; ranks
wait only for the messages they need.

    kind              letter  what it does
    FORWARD           F       the stage's forward
    BACKWARD          B       its whole backward: input gradient and weight gradients
    BACKWARD_INPUT    I       the input gradient alone; the weight gradients are deferred
    BACKWARD_WEIGHT   W       the weight gradients that an earlier I deferred
    OVERLAP           O       the forward of one microbatch and the backward (B or I) of another, together
    SEND_F, RECV_F    SF, RF  send the stage's output to the next stage's rank, receive its input from the one before
    SEND_B, RECV_B    SB, RB  send the input gradient to the stage before, receive the output gradient from the next

A send does not wait for its receiver. Between two stages of one rank nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

Placement = Literal["loop", "v"]


class Kind(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SF"
    RECV_F = "RF"
    SEND_B = "SB"
    RECV_B = "RB"
    OVERLAP = "O"

    # Members are unique objects. Enum's own hash is a Python function, and orders are hashed by the hundred thousand.
    __hash__ = object.__hash__


# Kinds that compute the input gradient, which the stage before needs.
PRODUCES_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)
TRANSFERS = SENDS + RECEIVES


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work. ``stage`` counts over the whole pipeline, from 0."""

    kind: Kind
    stage: int
    microbatch: int
    # OVERLAP only: the FORWARD, and the BACKWARD or BACKWARD_INPUT. Stage and microbatch are then the forward's.
    pair: tuple[Action, Action] | None = None

    @property
    def parts(self) -> tuple[Action, ...]:
        """The two of an OVERLAP, else itself."""
        return self.pair or (self,)

    def __str__(self) -> str:
        if self.pair:
            return "+".join(map(str, self.pair))
        return f"{self.kind.value}{self.microbatch}@{self.stage}"


def overlap(forward: Action, backward: Action) -> Action:
    """An OVERLAP of the two. They must be of different microbatches, or one would wait for the other."""
    return Action(Kind.OVERLAP, forward.stage, forward.microbatch, (forward, backward))


@dataclass(frozen=True)
class Order:
    """Every rank's list of actions."""

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    # The pipeline rank that holds each stage.
    rank_of_stage: tuple[int, ...]
    # Per pipeline rank.
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_virtual(self) -> int:
        """Stages per rank."""
        return self.num_stages // self.num_ranks

    @property
    def has_transfers(self) -> bool:
        return any(action.kind in TRANSFERS for actions in self.actions for action in actions)

    def crosses(self, stage: int) -> bool:
        """Whether the output of ``stage`` is sent to another rank."""
        return 0 <= stage < self.num_stages - 1 and self.rank_of_stage[stage] != self.rank_of_stage[stage + 1]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of one rank, in the model's order."""
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)


def place(ranks: int, virtual: int, placement: Placement) -> tuple[int, ...]:
    """The rank of every stage. A loop starts again at rank 0 after the last rank; a V goes back to rank 0."""
    down = tuple(range(ranks))
    up = down[::-1] if placement == "v" else down
    return tuple(rank for virtual_stage in range(virtual) for rank in (up if virtual_stage % 2 else down))


def make_order(
    name: str, ranks: int, virtual: int, microbatches: int, actions: Iterable[Iterable[Action]], placement: Placement
) -> Order:
    """An order from its ranks' actions."""
    stages = place(ranks, virtual, placement)
    return Order(name, ranks, ranks * virtual, microbatches, stages, tuple(map(tuple, actions)))
