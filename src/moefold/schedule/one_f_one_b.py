"""GPipe and 1F1B, one stage per rank; interleaved 1F1B, several stages per rank.

**GPipe**: all forwards, then all backwards. The simplest order. Every rank holds the activations of all microbatches at
once, which is why 1F1B replaced it; its bubble is the same.

    rank 0   F0 F1 F2 F3                   B0 .. B1 .. B2 .. B3 ..
    rank 1      F0 F1 F2 F3          B0 .. B1 .. B2 .. B3 ..
    rank 2         F0 F1 F2 F3 B0 .. B1 .. B2 .. B3 ..

**1F1B**: each rank runs forwards until the pipeline is full, then alternates one forward and one backward, then drains.

    rank 0   F0 F1 F2                B0 .. F3 B1 .. F4 B2 .. ...
    rank 1      F0 F1          B0 .. F2 B1 .. F3 B2 ..
    rank 2         F0 B0 .. F1 B1 .. F2 B2 .. F3 B3 ..

The bubble is GPipe's, but rank r holds at most P - r microbatches, however many there are.

**Interleaved.** With V stages per rank each stage is a V-th as long, and so are the ramps at both ends: the bubble
shrinks from (P - 1) / (M + P - 1) to (P - 1) / (V M + P - 1). The cost is V times as many messages and somewhat more
activation memory. Microbatches go in rounds. In a round, a rank takes each of its stages in turn through all
microbatches of the round; backwards take the stages in reverse. A round has at least P microbatches, so that the first
is back on rank 0 by the time its next stage begins. M microbatches make M // P rounds; if they do not divide evenly,
the first rounds get one more. (Fewer than P microbatches: one round, with a larger bubble.) Rank r warms up with
(V - 1) rounds' worth of forwards plus 2 (P - 1 - r).

**Overlapped.** To run a forward beside a backward, the two must be of different microbatches. On the last rank of 1F1B
they never are: B3 waits for F3. One more microbatch in the warm-up of every rank makes them so: F4 runs beside B3.
That alone would be correct and slow: a pair has both its results at its end, so ranks r and r + 1 would wait for each
other alternately. With a second microbatch per rank (rank r warms up with 2 (P - 1 - r) + 1 forwards) the pairs of
all ranks run at the same time. The price is memory: rank 0 holds 2P instead of P microbatches. The warm-ups of
interleaved 1F1B differ by two from rank to rank already, so one more forward is enough there.
"""

from __future__ import annotations

from collections.abc import Sequence

from moefold.schedule.actions import Action, Kind, Order, make_order, pair_overlaps
from moefold.topology.folded_layout import shard_sizes


def one_f_one_b(ranks: int, microbatches: int) -> Order:
    """One stage per rank."""
    warm_ups = [min(ranks - 1 - rank, microbatches) for rank in range(ranks)]
    return _order("1f1b", warm_ups, microbatches)


def one_f_one_b_overlapped(ranks: int, microbatches: int) -> Order:
    """With warm-ups long enough that every forward after them runs beside the backward of another microbatch."""
    warm_ups = [min(2 * (ranks - 1 - rank) + 1, microbatches) for rank in range(ranks)]
    return pair_overlaps(_order("1f1b_overlapped", warm_ups, microbatches), warm_ups)


def _order(name: str, warm_ups: Sequence[int], microbatches: int) -> Order:
    actions = [_rank_actions(rank, warm_up, microbatches) for rank, warm_up in enumerate(warm_ups)]
    return make_order(name, len(warm_ups), 1, microbatches, actions, "loop")


def _rank_actions(stage: int, warm_up: int, microbatches: int) -> list[Action]:
    actions = [Action(Kind.FORWARD, stage, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(microbatches):
        if microbatch + warm_up < microbatches:
            actions.append(Action(Kind.FORWARD, stage, microbatch + warm_up))
        actions.append(Action(Kind.BACKWARD, stage, microbatch))
    return actions


def gpipe(ranks: int, microbatches: int) -> Order:
    """One stage per rank."""
    actions = [
        [Action(kind, rank, microbatch) for kind in (Kind.FORWARD, Kind.BACKWARD) for microbatch in range(microbatches)]
        for rank in range(ranks)
    ]
    return make_order("gpipe", ranks, 1, microbatches, actions, "loop")


def interleaved(ranks: int, virtual: int, microbatches: int) -> Order:
    """``virtual`` stages per rank."""
    return _interleaved_order(
        "interleaved", ranks, virtual, microbatches, _interleaved_warm_ups(ranks, virtual, microbatches, extra=0)
    )


def interleaved_overlapped(ranks: int, virtual: int, microbatches: int) -> Order:
    """With one more forward in every warm-up, and the pairs that this makes possible."""
    warm_ups = _interleaved_warm_ups(ranks, virtual, microbatches, extra=1)
    return pair_overlaps(_interleaved_order("interleaved_overlapped", ranks, virtual, microbatches, warm_ups), warm_ups)


def _interleaved_warm_ups(ranks: int, virtual: int, microbatches: int, extra: int) -> list[int]:
    """How many forwards each rank does before it alternates."""
    most = _rounds(ranks, microbatches)[0] * (virtual - 1) + 2 * (ranks - 1) + extra
    return [min(most - 2 * rank, virtual * microbatches) for rank in range(ranks)]


def _rounds(ranks: int, microbatches: int) -> tuple[int, ...]:
    """The sizes of the rounds; the first is the largest."""
    return shard_sizes(microbatches, max(1, microbatches // ranks))


def _interleaved_order(name: str, ranks: int, virtual: int, microbatches: int, warm_ups: Sequence[int]) -> Order:
    rounds = _rounds(ranks, microbatches)
    forwards = _passes(rounds, range(virtual))
    backwards = _passes(rounds, range(virtual - 1, -1, -1))
    actions = [_interleaved_actions(rank, ranks, forwards, backwards, warm_up) for rank, warm_up in enumerate(warm_ups)]
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


def _interleaved_actions(
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
