"""Schedules that defer weight gradients: ZB-H1, ZB-V (Qi et al., 2401.10241), DualPipeV (half of DeepSeek's DualPipe).

No other rank needs a weight gradient, so the backward is split. The input gradient I is what the stage before waits
for, so it comes as early as possible; the weight gradient W fills what would be a bubble. The activations that W needs
live until then.

**ZB-H1** keeps 1F1B's forwards and its memory: every rank may hold P microbatches, which only rank 0 of 1F1B does. Rank
r needs P - r of them for its forwards, and defers r weight gradients with the rest.

    rank 0   F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 ...
    rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 ...
    rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 ...

When F, I and W take equally long, a third of 1F1B's bubble is left.

**ZB-V** gives each rank two stages, r and 2P - 1 - r, placed in a V, so that rank 0 holds the first stage and the last.
The loss is computed on the rank of the first stage, and the ramps of both ends fit into each other: with equal F, I and
W a rank idles only until its first input (a sixth of 1F1B's bubble). The memory is 1F1B's.

**DualPipeV** has the same V. Once the pipe is full, a rank runs the forward of one of its stages beside the backward of
the other, alternating. So the dispatch and combine of one microbatch are hidden behind the computation of another for
most of the step. Only near both ends weight gradients are deferred to fill the bubbles.
"""

from __future__ import annotations

from moefold.schedule.actions import Action, Kind, Order, RankActions, make_order


def zb_h1(ranks: int, microbatches: int) -> Order:
    """One stage per rank."""
    actions = [_h1_actions(rank, ranks, microbatches) for rank in range(ranks)]
    return make_order("zb_h1", ranks, 1, microbatches, actions, "loop")


def _h1_actions(rank: int, ranks: int, microbatches: int) -> list[Action]:
    warm_up = min(ranks - 1 - rank, microbatches)
    actions = [Action(Kind.FORWARD, rank, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(microbatches):
        if microbatch + warm_up < microbatches:
            actions.append(Action(Kind.FORWARD, rank, microbatch + warm_up))
        actions.append(Action(Kind.BACKWARD_INPUT, rank, microbatch))
        if microbatch >= rank:
            actions.append(Action(Kind.BACKWARD_WEIGHT, rank, microbatch - rank))
    deferred = range(max(0, microbatches - rank), microbatches)
    return actions + [Action(Kind.BACKWARD_WEIGHT, rank, microbatch) for microbatch in deferred]


def zb_v(ranks: int, microbatches: int) -> Order:
    """Two stages per rank, in a V."""
    actions = [_v_actions(rank, ranks, microbatches) for rank in range(ranks)]
    return make_order("zb_v", ranks, 2, microbatches, actions, "v")


def _v_actions(rank: int, ranks: int, microbatches: int) -> list[Action]:
    # With fewer microbatches than fill the pipeline, the order of a full one without the missing ones.
    full = max(microbatches, 2 * ranks - 1)
    ranks_after = ranks - rank
    rank_actions = RankActions((rank, 2 * ranks - 1 - rank))
    # Fill: forwards of stage 0, until the first microbatch reaches stage 1.
    for _ in range(2 * ranks_after - 1):
        rank_actions.forward(0)
    for _ in range(rank):
        rank_actions.forward(1)
        rank_actions.forward(0)
    for _ in range(ranks_after):
        rank_actions.forward(1)
        _whole_backward(rank_actions, 1)
    # Steady: a forward and a whole backward of each stage, alternating.
    while rank_actions.num_forwards(1) < full:
        if rank_actions.num_forwards(0) < full:
            rank_actions.forward(0)
        _whole_backward(rank_actions, 0)
        rank_actions.forward(1)
        _whole_backward(rank_actions, 1)
    # Drain: input gradients first, other ranks wait for them.
    for _ in range(rank):
        rank_actions.input_gradient(0)
        rank_actions.input_gradient(1)
    for _ in range(ranks_after):
        rank_actions.input_gradient(0)
        rank_actions.weight_gradient(0)
    for which in (1, 0):
        for _ in range(rank):
            rank_actions.weight_gradient(which)
    return [action for action in rank_actions.actions if action.microbatch < microbatches]


def _whole_backward(rank_actions: RankActions, which: int) -> None:
    rank_actions.input_gradient(which)
    rank_actions.weight_gradient(which)


def dualpipe_v(ranks: int, microbatches: int) -> Order:
    """Two stages per rank, in a V; at least as many microbatches as stages."""
    actions = [_dualpipe_actions(rank, ranks, microbatches) for rank in range(ranks)]
    return make_order("dualpipe_v", ranks, 2, microbatches, actions, "v")


def _dualpipe_actions(rank: int, ranks: int, microbatches: int) -> list[Action]:
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
