"""The layout for fewer ranks: legal, the same batches, deterministic, near the run's own, and within memory."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from moefold.checks.run_all import problems
from moefold.config.moe import CapacityConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.errors import LayoutError
from moefold.hardware.cluster import cluster_of
from moefold.plan.elastic_layout import layout_for_world, what_layouts_change
from moefold.plan.memory.peak import predict_memory
from moefold.plan.preflight import Device
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import workload_of_run
from moefold.recipes.catalog import RECIPES

LAYOUTS = {
    "dp8": ParallelConfig(),
    "ep8": ParallelConfig(ep=8),
    "tp2 ep4": ParallelConfig(tp=2, ep=4),
    "tp2 ep4 etp2": ParallelConfig(tp=2, ep=4, etp=2),
    "pp2 ep4": ParallelConfig(pp=2, ep=4),
    "pp2 vpp2": ParallelConfig(pp=2, vpp=2, schedule="interleaved"),
    "flat": ParallelConfig(ep=4, sharding="flat"),
    "hsdp": ParallelConfig(dp_replicate=2, edp_replicate=2, ep=2),
    "cp2": ParallelConfig(cp=2, ep=4),
    "two_level": ParallelConfig(ep=8, dispatcher="two_level", ep_inner=4),
}


def debug_run(layout: str) -> RunConfig:
    return replace(RECIPES["debug_tiny"](), parallel=LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_legal_and_keeps_the_batches(layout: str) -> None:
    run = debug_run(layout)
    for world in range(8, 0, -1):
        found = layout_for_world(run, world)
        assert 2 * found.world > world or world == 1
        assert found.world <= world and problems(found.run, found.world) == []
        # Everything but the degrees is the run's own: the batch, its microbatches, the data and the seed.
        assert replace(found.run, parallel=run.parallel) == run
        assert found == layout_for_world(run, world)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_all_ranks_it_is_the_runs_own(layout: str) -> None:
    run = debug_run(layout)
    assert layout_for_world(run, 8).run == run and layout_for_world(run, 8).world == 8


def test_no_legal_layout_of_the_small_runs_is_predicted_much_faster() -> None:
    """Against every fold there is, by brute force."""
    run = debug_run("tp2 ep4")
    for world in (7, 6, 5, 3):
        chosen = layout_for_world(run, world)
        seconds = []
        for used in range(1, world + 1):
            for tp in (1, 2, 4):
                for pp in (1, 2, 3, 4):
                    for ep in (1, 2, 4, 8):
                        made = replace(run, parallel=ParallelConfig(tp=tp, pp=pp, ep=ep))
                        if not problems(made, used):
                            seconds.append(predict_time(workload_of_run(made, cluster_of("H100", used))).step_seconds)
        taken = predict_time(workload_of_run(chosen.run, cluster_of("H100", chosen.world))).step_seconds
        assert taken <= 1.15 * min(seconds)


def test_a_batch_that_divides_uses_more_ranks() -> None:
    run = debug_run("ep8")
    six = replace(run, data=replace(run.data, global_batch=24))
    assert layout_for_world(run, 7).world == 4
    found = layout_for_world(six, 7)
    assert found.world == 6 and found.describe() == "ep2 dp6, 4 microbatches on each data-parallel rank"


def test_large_models_keep_their_degrees_where_ranks_allow_it() -> None:
    run = replace(RECIPES["qwen3_30b_a3b"](), parallel=ParallelConfig(ep=8))
    run = replace(run, data=replace(run.data, global_batch=512, micro_batch=1))
    began = time.process_time()
    assert layout_for_world(run, 32).run == run
    found = layout_for_world(run, 56)
    assert found.world >= 32 and problems(found.run, found.world) == []
    assert time.process_time() - began < 5


def test_it_fits_into_memory_or_says_that_nothing_does() -> None:
    run = replace(RECIPES["qwen3_30b_a3b"](), parallel=ParallelConfig(ep=8))
    run = replace(run, data=replace(run.data, global_batch=512, micro_batch=1))

    def needs(found: RunConfig, world: int) -> float:
        return predict_memory(workload_of_run(found, cluster_of("H100", world))).total

    free = layout_for_world(run, 16)
    needed = needs(free.run, free.world)
    tight = layout_for_world(run, 16, Device(0.9 * needed))
    assert tight != free and needs(tight.run, tight.world) <= 0.9 * needed
    with pytest.raises(LayoutError, match="no layout of at most 16 ranks would fit into memory"):
        layout_for_world(run, 16, Device(1e9))


def test_what_depends_on_the_layout_is_said() -> None:
    run = debug_run("ep8")
    assert run.model.moe is not None and what_layouts_change(run) == []
    moe = replace(
        run.model.moe,
        balance=replace(run.model.moe.balance, global_batch=0.01),
        capacity=CapacityConfig(scope="local"),
    )
    said = what_layouts_change(
        replace(run, model=replace(run.model, moe=moe), data=replace(run.data, packing="bin_packed"))
    )
    assert [line.split()[0] for line in said] == [
        "model.moe.balance.global_batch",
        "model.moe.capacity.scope:",
        "data.packing:",
    ]
