"""Zero-bubble orders: the weight gradient is nobody's input, so it can wait for an idle moment (Qi et al., 2401.10241).

The backward is split. The input gradient I is what the stage before waits for, so it comes as early as possible; the
weight gradient W fills what would be a bubble. The activations that W needs live until then.

**ZB-H1** keeps 1F1B's forwards and its memory: every rank may hold P microbatches, which only rank 0 of 1F1B does. Rank
r needs P - r of them for its forwards, and puts off r weight gradients with the rest.

    rank 0   F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 ...
    rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 ...
    rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 ...

When F, I and W take equally long, a third of 1F1B's bubble is left.

**ZB-V** gives each rank two stages, one on the way there and one on the way back, so that rank 0 holds the first stage
and the last. The loss is where the first input was, and the ramps of both ends fit into each other: with equal F, I and
W a rank waits for its first input and never again (a sixth of 1F1B's bubble). The memory is 1F1B's.
"""

from __future__ import annotations

from moefold.schedule.actions import Action, Kind, Order, make_order
from moefold.schedule.rank_actions import Tally


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
    put_off = range(max(0, microbatches - rank), microbatches)
    return actions + [Action(Kind.BACKWARD_WEIGHT, rank, microbatch) for microbatch in put_off]


def zb_v(ranks: int, microbatches: int) -> Order:
    """Two stages per rank, in a V."""
    actions = [_v_actions(rank, ranks, microbatches) for rank in range(ranks)]
    return make_order("zb_v", ranks, 2, microbatches, actions, "v")


def _v_actions(rank: int, ranks: int, microbatches: int) -> list[Action]:
    # Fewer microbatches than fill the pipe go in the order of a full one, the missing ones left out.
    full = max(microbatches, 2 * ranks - 1)
    later = ranks - rank
    tally = Tally((rank, 2 * ranks - 1 - rank))
    # Fill: forwards of the way there, until the first microbatch comes back.
    for _ in range(2 * later - 1):
        tally.forward(0)
    for _ in range(rank):
        tally.forward(1)
        tally.forward(0)
    for _ in range(later):
        tally.forward(1)
        _whole_backward(tally, 1)
    # Steady: a forward and a whole backward of each stage by turns.
    while tally.num_forwards(1) < full:
        if tally.num_forwards(0) < full:
            tally.forward(0)
        _whole_backward(tally, 0)
        tally.forward(1)
        _whole_backward(tally, 1)
    # Drain: input gradients first, others wait for them.
    for _ in range(rank):
        tally.input_gradient(0)
        tally.input_gradient(1)
    for _ in range(later):
        tally.input_gradient(0)
        tally.weight_gradient(0)
    for which in (1, 0):
        for _ in range(rank):
            tally.weight_gradient(which)
    return [action for action in tally.actions if action.microbatch < microbatches]


def _whole_backward(tally: Tally, which: int) -> None:
    tally.input_gradient(which)
    tally.weight_gradient(which)
