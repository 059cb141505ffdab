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

`RankActions` writes down the list of a rank with two stages. `pair_overlaps` forms OVERLAPs: while one microbatch is in
dispatch or combine, another can be computed, and the forward of one and the backward of another touch no common value.
Pairs are formed where an order already puts a forward right before a backward, so a schedule that wants pairs arranges
its warm-up accordingly. The warm-up itself stays as it is: other ranks wait for its forwards, and a pair would delay
them until the first gradient.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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


class RankActions:
    """The ``actions`` of a rank with two stages, 0 and 1; each computation takes the next microbatch of its stage."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._taken: Counter[tuple[Kind, int]] = Counter()
        self._deferred: deque[Action] = deque()

    def forward(self, which: int) -> None:
        self.actions.append(self._next(Kind.FORWARD, which))

    def backward(self, which: int) -> None:
        self.actions.append(self._next(Kind.BACKWARD, which))

    def input_gradient(self, which: int) -> None:
        """Defers the weight gradient."""
        action = self._next(Kind.BACKWARD_INPUT, which)
        self.actions.append(action)
        self._deferred.append(Action(Kind.BACKWARD_WEIGHT, action.stage, action.microbatch))

    def weight_gradient(self, which: int | None = None) -> None:
        """The one deferred longest, of stage ``which`` or of either."""
        for action in self._deferred:
            if which is None or action.stage == self._stages[which]:
                self._deferred.remove(action)
                self.actions.append(action)
                return

    def overlap(self, forward: int, backward: int) -> None:
        self.actions.append(overlap(self._next(Kind.FORWARD, forward), self._next(Kind.BACKWARD, backward)))

    def num_forwards(self, which: int) -> int:
        return self._taken[Kind.FORWARD, which]

    def _next(self, kind: Kind, which: int) -> Action:
        # Whole backwards and input gradients share one count.
        row = Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD
        microbatch = self._taken[row, which]
        self._taken[row, which] += 1
        return Action(kind, self._stages[which], microbatch)


def pair_overlaps(order: Order, warm_ups: Sequence[int] | None = None) -> Order:
    """Every forward that is followed by the backward of another microbatch becomes an OVERLAP with it.

    ``warm_ups`` are the numbers of actions at the start of each rank's list that stay alone; unless given, all before
    its first backward.
    """
    if warm_ups is None:
        warm_ups = [_first_backward(actions) for actions in order.actions]
    paired = [(*actions[:warm_up], *_paired(actions[warm_up:])) for actions, warm_up in zip(order.actions, warm_ups)]
    return replace(order, actions=tuple(paired))


def _first_backward(actions: Sequence[Action]) -> int:
    return next((at for at, action in enumerate(actions) if action.kind in PRODUCES_GRADIENT), len(actions))


def independent(forward: Action, backward: Action) -> bool:
    """A backward waits for all forwards of its own microbatch, and for no other's."""
    return (
        forward.kind is Kind.FORWARD
        and backward.kind in PRODUCES_GRADIENT
        and forward.microbatch != backward.microbatch
    )


def _paired(actions: Sequence[Action]) -> list[Action]:
    paired: list[Action] = []
    for action in actions:
        if paired and independent(paired[-1], action):
            paired[-1] = overlap(paired[-1], action)
        else:
            paired.append(action)
    return paired
