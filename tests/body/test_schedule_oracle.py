"""Our orders are those of torch.distributed.pipelining, action for action, wherever it has them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from moefold.schedule.actions import Action
from moefold.schedule.names import SCHEDULES

THEIRS = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb_v": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}
SIZES_PER_SCHEDULE = 40


@pytest.mark.parametrize("name", THEIRS)
def test_orders_are_those_of_torch(name: str) -> None:
    draw = random.Random(name)
    for ranks, virtual, microbatches in (drawn_sizes(name, draw) for _ in range(SIZES_PER_SCHEDULE)):
        ours = SCHEDULES[name].build(ranks, virtual, microbatches)
        theirs = torch_order(name, ranks, virtual, microbatches)
        for rank in range(ranks):
            assert [written(action) for action in ours.actions[rank]] == theirs[rank], (ranks, virtual, microbatches)


def drawn_sizes(name: str, draw: random.Random) -> tuple[int, int, int]:
    ranks, microbatches = draw.randint(1, 9), draw.randint(1, 40)
    if name == "interleaved":
        # Theirs has rounds of equal sizes only.
        rounds = max(1, microbatches // ranks)
        return ranks, draw.randint(1, 4), microbatches // rounds * rounds
    if name == "1f1b":
        return ranks, 1, max(microbatches, ranks)
    if name == "dualpipe_v":
        return ranks, 2, max(microbatches, 2 * ranks)
    return ranks, 2 if name == "zb_v" else 1, microbatches


def torch_order(name: str, ranks: int, virtual: int, microbatches: int) -> list[list[str]]:
    """Their constructors ask a stage for little more than its sizes, so no process group is needed."""
    stage = SimpleNamespace(group_size=ranks, group_rank=0, num_stages=ranks * virtual, submod=None)
    single = name in ("gpipe", "1f1b")
    schedule: Any = THEIRS[name](stage if single else [stage] * virtual, microbatches)
    orders = [list(torch_actions(schedule.pipeline_order[rank])) for rank in range(ranks)]
    if name == "1f1b":
        # torch 2.13 lists the last rank's forwards as 1, 2, ..., M; what its runtime does is 0, 1, ..., M - 1.
        last = ranks - 1
        assert f"{last}F0" not in orders[last]
        orders[last] = [f"{last}F{int(text[len(f'{last}F') :]) - 1}" if "F" in text else text for text in orders[last]]
    return orders


def torch_actions(actions: Iterable[Any]) -> Iterable[str]:
    """Without idle slots, and without the reductions of gradients that they also list."""
    for action in actions:
        if action is not None and action.computation_type.name != "REDUCE_GRAD":
            yield "+".join(map(str, action.sub_actions or (action,)))


def written(action: Action) -> str:
    """As torch writes it: stage, kind, microbatch."""
    return "+".join(f"{part.stage}{part.kind.value}{part.microbatch}" for part in action.parts)
