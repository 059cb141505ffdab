"""Interleaved 1F1B: several stages per rank, so that a microbatch passes every rank several times.

With V stages per rank each stage is a V-th as long, and so are the ramps at both ends: the bubble shrinks from (P - 1)
/ (M + P - 1) to (P - 1) / (V M + P - 1). The cost is V times as many messages and somewhat more activation memory.

Microbatches go in rounds. In a round, a rank takes each of its stages in turn through all microbatches of the round;
backwards take the stages in reverse. A round has at least P microbatches, so that the first is back on
rank 0 by the time its next stage begins. M microbatches make M // P rounds; if they do not divide evenly, the first
rounds get one more. (Fewer than P microbatches: one round, with a larger bubble.)

Rank r warms up with (V - 1) rounds' worth of forwards plus 2 (P - 1 - r). **Overlapped** adds one forward: without it
the last rank's forwards meet the backward of the same microbatch; with it every forward after the warm-up runs beside
the backward of another. A pair has both results at its end and still no rank waits, because the warm-ups of
neighbouring ranks already differ by two.
"""

from __future__ import annotations

from collections.abc import Sequence

from moefold.schedule.actions import Action, Kind, Order, make_order
from moefold.schedule.rank_actions import pair_overlaps
from moefold.topology.folded_layout import shard_sizes


def interleaved(ranks: int, virtual: int, microbatches: int) -> Order:
    """``virtual`` stages per rank."""
    return _order("interleaved", ranks, virtual, microbatches, _warm_ups(ranks, virtual, microbatches, extra=0))


def interleaved_overlapped(ranks: int, virtual: int, microbatches: int) -> Order:
    """With one more forward in every warm-up, and the pairs that this makes possible."""
    warm_ups = _warm_ups(ranks, virtual, microbatches, extra=1)
    return pair_overlaps(_order("interleaved_overlapped", ranks, virtual, microbatches, warm_ups), warm_ups)


def _warm_ups(ranks: int, virtual: int, microbatches: int, extra: int) -> list[int]:
    """How many forwards each rank does before it alternates."""
    most = _rounds(ranks, microbatches)[0] * (virtual - 1) + 2 * (ranks - 1) + extra
    return [min(most - 2 * rank, virtual * microbatches) for rank in range(ranks)]


def _rounds(ranks: int, microbatches: int) -> tuple[int, ...]:
    """The sizes of the rounds; the first is the largest."""
    return shard_sizes(microbatches, max(1, microbatches // ranks))


def _order(name: str, ranks: int, virtual: int, microbatches: int, warm_ups: Sequence[int]) -> Order:
    rounds = _rounds(ranks, microbatches)
    forwards = _passes(rounds, range(virtual))
    backwards = _passes(rounds, range(virtual - 1, -1, -1))
    actions = [_rank_actions(rank, ranks, forwards, backwards, warm_up) for rank, warm_up in enumerate(warm_ups)]
    return make_order(name, ranks, virtual, microbatches, actions, "loop")


def _passes(rounds: tuple[int, ...], virtual_stages: range) -> list[tuple[int, int]]:
    """(which of a rank's stages, microbatch), in the order in which every rank takes them."""
    passes = []
    first = 0
    for size in rounds:
        passes += [
            (virtual_stage, microbatch) for virtual_stage in virtual_stages for microbatch in range(first, first + size)
        ]
        first += size
    return passes


def _rank_actions(
    rank: int, ranks: int, forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], warm_up: int
) -> list[Action]:
    forward_actions = [
        Action(Kind.FORWARD, virtual_stage * ranks + rank, microbatch) for virtual_stage, microbatch in forwards
    ]
    backward_actions = [
        Action(Kind.BACKWARD, virtual_stage * ranks + rank, microbatch) for virtual_stage, microbatch in backwards
    ]
    steady = len(forward_actions) - warm_up
    alternating = [action for pair in zip(forward_actions[warm_up:], backward_actions) for action in pair]
    return forward_actions[:warm_up] + alternating + backward_actions[steady:]
