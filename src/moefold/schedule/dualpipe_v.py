"""DualPipeV: a V-shaped pipeline whose forwards run beside backwards (DeepSeek's DualPipe, cut in half).

As in ZB-V, rank r holds stage r and stage 2P - 1 - r. Once the pipe is full, a rank runs the forward of one of its
stages beside the backward of the other, alternating. So the dispatch and combine of one microbatch are hidden behind
the computation of another for most of the step. Near both ends weight gradients are deferred to fill the bubbles.
"""

from __future__ import annotations

from moefold.schedule.actions import Action, Order, make_order
from moefold.schedule.rank_actions import RankActions


def dualpipe_v(ranks: int, microbatches: int) -> Order:
    """Two stages per rank, in a V; at least as many microbatches as stages."""
    actions = [_rank_actions(rank, ranks, microbatches) for rank in range(ranks)]
    return make_order("dualpipe_v", ranks, 2, microbatches, actions, "v")


def _rank_actions(rank: int, ranks: int, microbatches: int) -> list[Action]:
    rank_actions = RankActions((rank, 2 * ranks - 1 - rank))
    _fill(rank_actions, rank, ranks)
    # Steady: forward of stage 0 beside backward of stage 1, then the reverse.
    for turn in range(microbatches - 2 * ranks + rank + 1):
        if turn == 0 and rank == ranks - 1:
            # Not overlapped: the forward's output is sent sooner, and all other ranks wait for it.
            rank_actions.forward(0)
            rank_actions.backward(1)
        else:
            rank_actions.overlap(forward=0, backward=1)
        rank_actions.overlap(forward=1, backward=0)
    _drain(rank_actions, rank, ranks)
    return rank_actions.actions


def _fill(rank_actions: RankActions, rank: int, ranks: int) -> None:
    ranks_after = ranks - 1 - rank
    for _ in range(2 * ranks_after):
        rank_actions.forward(0)
    for _ in range(rank + 1):
        rank_actions.forward(0)
        rank_actions.forward(1)
    for _ in range(ranks_after):
        rank_actions.input_gradient(1)
        rank_actions.weight_gradient()
        rank_actions.forward(1)


def _drain(rank_actions: RankActions, rank: int, ranks: int) -> None:
    """The first half of the last backwards is whole; then input gradients, which other ranks wait for, come first."""
    ranks_after = ranks - 1 - rank
    for _ in range(ranks_after):
        rank_actions.backward(1)
        rank_actions.overlap(forward=1, backward=0)
    # Backwards of both stages alternate. On odd ranks the first that is split is of stage 1, on even ones of stage 0.
    num_whole = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    for turn in range(2 * (rank + 1)):
        which = 1 - turn % 2
        if turn < num_whole:
            rank_actions.backward(which)
        else:
            rank_actions.input_gradient(which)
    for _ in range(ranks_after):
        rank_actions.weight_gradient()
        rank_actions.input_gradient(0)
    for _ in range(rank + 1):
        rank_actions.weight_gradient()
