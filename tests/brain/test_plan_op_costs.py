"""The planner's counts, each against something counted otherwise."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moefold.blueprint.flops import forward_flops_per_token
from moefold.blueprint.model_shape import MoE, shape_of
from moefold.blueprint.param_counts import count_parameters, layer_counts
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import CapacityConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.hardware.cluster import cluster_of
from moefold.plan.op_costs import head_of, parts_of
from moefold.plan.op_sizes import sizes_of
from moefold.plan.timing.throughput import bubble_units, simulated_units
from moefold.plan.traffic import dispatch_bytes, distinct, reach
from moefold.plan.workload import MEGATRON_PRECISION, Framework, Workload, changed
from moefold.recipes.catalog import RECIPES

MODELS = {name: make().model for name, make in RECIPES.items() if make().model.moe is not None}


def _workload(model: ModelConfig, gpu: str, gpus: int, seq_len: int, ep: int = 1) -> Workload:
    parallel, data = ParallelConfig(ep=ep, sharding="zero1"), DataConfig(seq_len, gpus)
    run = RunConfig(model=model, parallel=parallel, precision=MEGATRON_PRECISION, data=data)
    return Workload(run, cluster_of(gpu, gpus), Framework("megatron"))


@pytest.mark.parametrize("name", MODELS)
def test_a_shape_has_the_blueprints_parameters(name: str) -> None:
    counts, shape = count_parameters(MODELS[name]), shape_of(MODELS[name])
    layers = [layer_counts(layer, shape.dim) for layer in (*shape.layers, *shape.mtp_layers)]
    ends = (1 if shape.tied else 2) * shape.dim * shape.vocab + shape.mtp * 2 * shape.dim**2
    assert sum(each.sharded + each.replicated + each.experts for each in layers) + ends == counts.matrices


@pytest.mark.parametrize("name", MODELS)
def test_work_is_the_models_arithmetic_where_memory_costs_nothing(name: str) -> None:
    model = replace(MODELS[name], num_mtp=0)
    shape = shape_of(model)
    assert model.moe is not None
    dropping = replace(model, moe=replace(model.moe, capacity=CapacityConfig()))
    workload = _workload(dropping, "H100", 1, 4096)
    # And where no tile is cut by the end of a window.
    sizes = replace(sizes_of(workload), balance=0.0, tile=0, wave=0.0, query_wave=0.0)
    parts = [part for layer in shape.layers for part in parts_of(layer, sizes)] + [head_of(shape.vocab, sizes)]
    flops = sum(p.forward.gemm_flops + p.forward.grouped_flops + p.forward.attention_flops for p in parts)
    needed = forward_flops_per_token(model, 4096)
    assert flops / 4096 == pytest.approx(needed.total)
    back = sum(p.backward.gemm_flops + p.backward.grouped_flops for p in parts)
    forward = sum(p.forward.gemm_flops + p.forward.grouped_flops for p in parts)
    assert back == pytest.approx(2 * forward)


def test_fewer_rows_per_expert_cost_more_than_their_share() -> None:
    layer = shape_of(MODELS["deepseek_v3"]).layers[-1]

    def grouped(tokens: int) -> float:
        workload = _workload(MODELS["deepseek_v3"], "H100", 64, tokens, ep=64)
        return sum(part.forward.grouped_flops for part in parts_of(layer, sizes_of(workload)))

    assert grouped(512) > grouped(4096) / 8
    assert grouped(65536) == pytest.approx(16 * grouped(4096), rel=0.05)


@pytest.mark.parametrize(("ep", "top_k"), [(8, 2), (16, 8), (64, 8)])
def test_deduplicated_bytes_are_those_of_even_choices(ep: int, top_k: int) -> None:
    """Against drawn choices: how many ranks and nodes a token's experts are on."""
    generator = random.Random(0)
    drawn = [[generator.randrange(ep) for _ in range(top_k)] for _ in range(20_000)]
    ranks = sum(len(set(choices)) for choices in drawn) / len(drawn)
    nodes = sum(len({choice // 8 for choice in choices}) for choices in drawn) / len(drawn)
    assert distinct(ep, top_k) == pytest.approx(ranks, rel=0.01)
    assert distinct(max(1, ep // 8), top_k) == pytest.approx(nodes, rel=0.01)


def test_exchanges_go_where_the_ranks_are() -> None:
    moe = MoE(256, 8, 2048)
    inside = _workload(MODELS["deepseek_v3"], "GB200", 256, 4096, ep=64)
    assert dispatch_bytes(inside, moe).outside == 0
    across = replace(inside, cluster=cluster_of("H100", 256))
    sent = dispatch_bytes(across, moe)
    row = 2 * 7168
    assert sent.inside == pytest.approx(4096 * 8 * row * 7 / 64)
    assert sent.outside == pytest.approx(4096 * 8 * row * 56 / 64)
    fewer = dispatch_bytes(changed(across, parallel={"dispatcher": "deepep"}), moe)
    assert fewer == dispatch_bytes(changed(across, parallel={"dispatcher": "two_level"}), moe)
    once = dispatch_bytes(changed(across, parallel={"dispatcher": "deduplicated"}), moe)
    assert fewer.outside < once.outside < dispatch_bytes(across, moe).outside
    assert fewer.outside < 0.7 * sent.outside


def test_a_group_reaches_as_far_as_its_stride() -> None:
    assert reach(64, 1, 8).domains == 8
    assert reach(8, 8, 8).inside == 1
    assert not reach(8, 1, 8).crosses
    assert reach(16, 4, 64).inside == 16


ORDERS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("1f1b_overlapped", 1), ("zb_h1", 1), ("zb_v", 2)]
ORDERS += [("dualpipe_v", 2), ("interleaved_overlapped", 2)]


@pytest.mark.parametrize(("schedule", "virtual"), ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_bubble_does_not_depend_on_how_many_microbatches_follow(schedule: str, virtual: int, ranks: int) -> None:
    units = bubble_units(schedule, ranks, virtual)
    if ranks > 1:
        assert units == pytest.approx(simulated_units(schedule, ranks, virtual, 2 * ranks))
        assert units == pytest.approx(simulated_units(schedule, ranks, virtual, 6 * ranks))
    else:
        assert units == 0
