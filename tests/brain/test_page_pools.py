"""Pages of a rank: counted by walking the order of a schedule, row by row of an even routing."""

from __future__ import annotations

from math import ceil

import pytest

from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.plan.memory.page_pools import PoolSize, page_pools, paged_dims, pairs_alive
from moefold.recipes.catalog import recipe
from moefold.schedule.actions import Kind
from moefold.schedule.names import SCHEDULES

PAGED = {
    "parallel.dispatcher": "all_to_all_bounded",
    "memory.retain.rows": "page",
    "memory.retain.gate_up": "page",
    "memory.retain.activation": "page",
}


def walked(schedule: str, ranks: int, virtual: int, microbatches: int, rank: int, layers: list[int]) -> int:
    """Of a rank: the most (MoE layer, microbatch) pairs at once; ``layers`` of each of all stages."""
    order = SCHEDULES[schedule].build(ranks, virtual, microbatches)
    alive = most = 0
    for action in order.actions[rank]:
        for part in action.parts:
            if part.kind is Kind.FORWARD:
                alive += layers[part.stage]
                # The forward of a pair fills its pages while the backward frees its own.
                most = max(most, alive - layers[part.stage] * (len(action.parts) > 1))
        for part in action.parts:
            if part.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                alive -= layers[part.stage]
        most = max(most, alive)
    assert alive == 0
    return most + (1 if SCHEDULES[schedule].overlaps else 0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "1f1b_overlapped", "dualpipe_v"])
def test_pairs_are_those_that_a_walk_through_the_order_counts(schedule: str) -> None:
    virtual = 2 if schedule in ("interleaved", "dualpipe_v") else 1
    changes = {"parallel.pp": 4, "parallel.vpp": virtual, "parallel.schedule": schedule}
    run = override(recipe("qwen3_30b_a3b"), changes | {"model.num_layers": 8 * virtual})
    layers = [8 // 4] * 4 * virtual
    run = override(run, {"parallel.stages": "E" + "|".join("t" * each for each in layers) + "L"})
    for rank in range(4):
        assert pairs_alive(run, 8, rank) == walked(schedule, 4, virtual, 8, rank, layers)


def deepseek(**memory: float) -> RunConfig:
    return override(
        recipe("deepseek_v3"),
        PAGED | {"parallel.ep": 64, "parallel.pp": 4} | {f"memory.{key}": value for key, value in memory.items()},
    )


def test_pages_of_a_pool() -> None:
    run = deepseek(page_bound=1.1, page_spill=0.25)
    rows, pairs = 4096 * 8, pairs_alive(run, 16, 0)
    pages = ceil(1.1 * rows * pairs / 64) + pairs
    # 2,048 of the activation; 4,096 before it, 7,168 of rows.
    assert paged_dims(run) == {"rows": 7168, "gate_up": 4096, "activation": 2048}
    expected = [PoolSize(dim, pages - int(pages * 0.25), int(pages * 0.25)) for dim in (2048, 4096, 7168)]
    assert page_pools(run, 4096, 16, 0) == tuple(expected)


def test_steps_of_the_same_dim_share_a_pool() -> None:
    run = override(deepseek(), {"model.dim": 4096, "memory.retain.activation": "keep"})
    pairs = pairs_alive(run, 16, 0)
    assert page_pools(run, 4096, 16, 0) == (PoolSize(4096, 2 * (ceil(1.1 * 4096 * 8 * pairs / 64) + pairs), 0),)


def test_pages_take_at_most_a_quarter_more_than_the_rows_of_an_even_routing() -> None:
    for tokens in (512, 4096):
        run = deepseek()
        for pool in page_pools(run, tokens, 16, 0):
            rows = tokens * 8 * pairs_alive(run, 16, 0)
            assert rows <= pool.num_pages * 64 <= 1.25 * rows


def test_a_rank_without_experts_has_no_pages() -> None:
    run = override(deepseek(), {"parallel.stages": "Ett|t*30|t*28|tL", "model.num_dense_layers": 3})
    assert page_pools(run, 4096, 16, 0) == ()
