"""Which phases are captured, how many graphs a rank has, and which slot each microbatch takes."""

from __future__ import annotations

import random

import pytest

from moefold.plan.memory.in_flight import moments
from moefold.schedule.actions import PRODUCES_GRADIENT, Kind
from moefold.schedule.graph_regions import (
    DENSE_PHASES,
    MOE_PHASES,
    captured_phases,
    graph_slots,
    num_graphs,
    regions,
    slots_by_stage,
)
from moefold.schedule.names import SCHEDULES
from moefold.schedule.passes import executable


def test_regions_are_runs_of_captured_phases() -> None:
    router, layer = captured_phases(("attn", "moe_router")), captured_phases(("attn", "moe_router", "moe", "mlp"))
    assert regions(MOE_PHASES, router) == (("attention", "route"),)
    assert regions(DENSE_PHASES, router) == (("attention",),)
    assert regions(DENSE_PHASES, layer) == (("attention", "feed_forward"),)
    assert regions(MOE_PHASES, layer) == (
        ("attention", "route"),
        ("dispatch_prepare",),
        ("dispatch_finish", "experts", "combine_prepare"),
        ("combine_finish", "output"),
    )
    assert regions(MOE_PHASES, captured_phases(("mlp",))) == ()


# ---- slots ----


def drawn(seed: int) -> tuple[str, int, int, int]:
    rng = random.Random(seed)
    schedule = rng.choice(list(SCHEDULES.values()))
    ranks, virtual = rng.randint(1, 5), schedule.virtual or rng.randint(1, 3)
    return schedule.name, ranks, virtual, max(rng.randint(1, 12), schedule.microbatches_per_stage * ranks * virtual)


@pytest.mark.parametrize("seed", range(60))
def test_no_two_microbatches_in_flight_share_a_slot(seed: int) -> None:
    """And there are no more slots than microbatches in flight, of the stage that holds most."""
    name, ranks, virtual, microbatches = drawn(seed)
    for rank, actions in enumerate(executable(name, ranks, virtual, microbatches).actions):
        slots, holder, most = graph_slots(actions), {}, {}
        for action in actions:
            for part in sorted(action.parts, key=lambda part: part.kind is not Kind.FORWARD):
                key = part.stage, part.microbatch
                if part.kind is Kind.FORWARD:
                    assert holder.setdefault((part.stage, slots[key]), key) == key
                    live = sum(stage == part.stage for stage, _ in holder)
                    most[part.stage] = max(most.get(part.stage, 0), live)
                elif part.kind in PRODUCES_GRADIENT:
                    assert holder.pop((part.stage, slots[key])) == key
        assert not holder and slots_by_stage(actions) == most, rank


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_the_planner_counts_the_same_slots(schedule: str) -> None:
    virtual, ranks, microbatches = (2 if schedule == "interleaved" else 1), 4, 8
    order = executable(schedule, ranks, virtual, microbatches)
    for rank, found in enumerate(moments(schedule, ranks, virtual, microbatches)):
        of_stage = [max(moment[number] for moment in found) for number in range(virtual)]
        assert dict(zip(order.stages_of(rank), of_stage)) == slots_by_stage(order.actions[rank])


def test_the_number_of_graphs() -> None:
    """1F1B on 4 ranks: 4, 3, 2 and 1 microbatches in flight; 2 MoE layers each, 4 regions, forward and backward."""
    order = executable("1f1b", 4, 1, 8)
    counts = [num_graphs(slots_by_stage(order.actions[rank]), {rank: 2 * 4}) for rank in range(4)]
    assert counts == [4 * 16, 3 * 16, 2 * 16, 16]
