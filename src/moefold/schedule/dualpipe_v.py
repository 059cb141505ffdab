"""DualPipeV: a V-shaped pipeline whose forwards run beside backwards (DeepSeek's DualPipe, cut in half).

As in ZB-V, rank r holds stage r and stage 2P - 1 - r. Once the pipe is full, a rank runs the forward of one of its
stages beside the backward of the other, by turns: microbatches on their way there meet others on their way back, on
every rank and at the same time. So the dispatch and combine of one hide under the computation of the other for most of
the step. Near both ends weight gradients are put off to fill the bubbles.
"""

from __future__ import annotations

from moefold.schedule.actions import Action, Order, make_order
from moefold.schedule.rank_actions import Tally


def dualpipe_v(ranks: int, microbatches: int) -> Order:
    """Two stages per rank, in a V; at least as many microbatches as stages."""
    actions = [_rank_actions(rank, ranks, microbatches) for rank in range(ranks)]
    return make_order("dualpipe_v", ranks, 2, microbatches, actions, "v")


def _rank_actions(rank: int, ranks: int, microbatches: int) -> list[Action]:
    tally = Tally((rank, 2 * ranks - 1 - rank))
    _fill(tally, rank, ranks)
    # Steady: there beside back, back beside there.
    for turn in range(microbatches - 2 * ranks + rank + 1):
        if turn == 0 and rank == ranks - 1:
            # One after the other here: the forward's result leaves sooner, and everyone is waiting for it.
            tally.forward(0)
            tally.backward(1)
        else:
            tally.overlap(forward=0, backward=1)
        tally.overlap(forward=1, backward=0)
    _drain(tally, rank, ranks)
    return tally.actions


def _fill(tally: Tally, rank: int, ranks: int) -> None:
    later = ranks - 1 - rank
    for _ in range(2 * later):
        tally.forward(0)
    for _ in range(rank + 1):
        tally.forward(0)
        tally.forward(1)
    for _ in range(later):
        tally.input_gradient(1)
        tally.weight_gradient()
        tally.forward(1)


def _drain(tally: Tally, rank: int, ranks: int) -> None:
    """The first half of the last backwards is whole; then weight gradients make way for what other ranks wait for."""
    later = ranks - 1 - rank
    for _ in range(later):
        tally.backward(1)
        tally.overlap(forward=1, backward=0)
    # Backwards of both stages by turns. On odd ranks the first that is split is of stage 1, on even ones of stage 0.
    num_whole = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    for turn in range(2 * (rank + 1)):
        which = 1 - turn % 2
        if turn < num_whole:
            tally.backward(which)
        else:
            tally.input_gradient(which)
    for _ in range(later):
        tally.weight_gradient()
        tally.input_gradient(0)
    for _ in range(rank + 1):
        tally.weight_gradient()
