"""Predicted step times: what must hold whatever the constants are, and what public reports say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.report_runs import DEEP, HYBRID, TABLE_20, Sections, both, job
from moefold.blueprint.narrow_bytes import matmul_bits
from moefold.config.data import DataConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.errors import ConfigError
from moefold.hardware.cluster import GPUS, cluster_of
from moefold.plan.op_costs import head_of
from moefold.plan.op_sizes import sizes_of
from moefold.plan.predict import predict
from moefold.plan.timing.constants import CURRENT
from moefold.plan.timing.layer_time import exposed_exchanges, hidden_in_chunks
from moefold.plan.timing.step_time import predict_time, step_time, synced_seconds
from moefold.plan.timing.step_timeline import step_timeline
from moefold.plan.timing.throughput import conversion_passes, ring
from moefold.plan.traffic import Reach
from moefold.plan.workload import (
    Framework,
    Workload,
    changed,
    in_format,
    workload_of_run,
)
from moefold.recipes.catalog import RECIPES
from moefold.schedule.layer_operations import STEPS, simulate_order
from moefold.schedule.layer_orders import layer_order


@pytest.mark.parametrize("row", TABLE_20, ids=lambda row: f"{row[0]} {row[1]} {row[3]} {row[4][0]}")
def test_layouts_of_the_megatron_report(row: tuple) -> None:
    """Some of them are among those the constants were fitted to; docs/planner-error.md has held-out figures."""
    model, gpu, gpus, form, batch, how, degrees, measured = row
    found = predict(job(model, gpu, gpus, form, batch, how, **degrees)).tflops_per_gpu
    assert 0.75 < found / measured < 1.3


def test_the_reports_layouts_on_average() -> None:
    errors = []
    for model, gpu, gpus, form, batch, how, degrees, measured in TABLE_20:
        found = predict(job(model, gpu, gpus, form, batch, how, **degrees)).tflops_per_gpu
        errors.append(abs(measured / found - 1))
    assert sum(errors) / len(errors) < 0.1


def test_the_wall_is_named() -> None:
    """Communication for DeepSeek-V3 between H100 nodes, computation or the host on GB200, memory in Table 3."""
    lean = {"gradients": "bfloat16", "moments": "bfloat16"}
    recomputed = ("mla_up", "feed_forward", "experts", "norms")
    plain: Sections = {"framework": {"date": 2026.0}, "memory": {"recompute": recomputed}, "precision": lean}
    h100 = job("deepseek_v3", "H100", 1024, "bfloat16", (4096, 1, 8192), plain, tp=2, pp=8, ep=64)
    assert predict(h100).wall == "communication"
    light = both(HYBRID, {"memory": {"recompute": ("feed_forward", "mla_up")}})
    narrow = both(light, {"precision": {**lean, "params": "float8"}})
    gb200 = job("deepseek_v3", "GB200", 256, "mxfp8", (4096, 1, 8192), narrow, pp=4, ep=64, vpp=4)
    assert predict(gb200).wall in ("compute", "host")
    table_3: Sections = {"parallel": {"dispatcher": "deepep"}}
    full = job("deepseek_v3", "H100", 256, "bfloat16", (4096, 1, 8192), table_3, pp=4, ep=64, vpp=4)
    assert predict(full).wall == "memory"


def _mixtral() -> Workload:
    return job("mixtral_8x22b", "H100", 64, "bfloat16", (4096, 1, 256), {}, tp=2, pp=4, ep=8)


def test_lines_add_up_to_the_step() -> None:
    for row in TABLE_20:
        time = predict_time(job(*row[:6], **row[6]))
        assert sum(line.seconds - line.hidden for line in time.lines) == pytest.approx(time.step_seconds)
        assert time.low < time.step_seconds < time.high


def test_more_of_the_same_takes_longer() -> None:
    base = step_time(_mixtral()).total
    workload = _mixtral()
    assert step_time(changed(workload, data={"global_batch": 64 * workload.dp})).total > base
    assert step_time(changed(workload, memory={"recompute": ("full",)})).total > base
    assert step_time(replace(workload, cluster=replace(workload.cluster, nic_gb_s=5.0))).total > base
    assert step_time(replace(workload, imbalance=2.0)).total > base
    assert step_time(changed(workload, kernels={"graphs": "full"})).total < base
    assert step_time(changed(workload, parallel={"dispatcher": "deepep"})).total < base


def test_cards_of_one_generation_rank_as_their_figures_do() -> None:
    def step(gpu: str) -> float:
        return step_time(replace(_mixtral(), cluster=cluster_of(gpu, 64))).total

    assert step("GB300") < step("GB200") < step("H100") < step("A100")
    assert step("H100") < step("H800")


@pytest.mark.parametrize(("pp", "vpp", "schedule"), [(4, 1, "1f1b"), (4, 2, "interleaved"), (2, 1, "zb_h1")])
def test_the_closed_form_is_the_simulated_order(pp: int, vpp: int, schedule: str) -> None:
    """Stages differ (the last has the head), so the closed form is near, not exact."""
    layout = {"tp": 1, "pp": pp, "vpp": vpp, "schedule": schedule}
    workload = changed(_mixtral(), parallel=layout, data={"global_batch": 8 * pp * (64 // pp)})
    step = step_time(workload)
    simulated = step_timeline(workload, most_boxes=10_000)
    assert simulated.shown == workload.microbatches
    assert step.busy.total + step.bubble == pytest.approx(simulated.timeline.finish, rel=0.06)


def test_matmuls_run_on_the_narrowest_units_that_the_gpu_has() -> None:
    """Data sheets: B300's four-bit rate is three times its eight-bit one, B200's twice; H100 and A100 have fewer."""
    bits = (4, 8, 16)
    assert [GPUS["GB300"].matmul_units(each) for each in bits] == [(4, 14700), (8, 4900), (16, 2450)]
    assert [GPUS["GB200"].matmul_units(each) for each in bits] == [(4, 9800), (8, 4900), (16, 2450)]
    assert [GPUS["H100"].matmul_units(each) for each in bits] == [(8, 1979), (8, 1979), (16, 989)]
    assert [GPUS["A100"].matmul_units(each) for each in bits] == [(16, 312)] * 3


def test_passes_to_convert_follow_from_casts() -> None:
    found = {name: conversion_passes(each.casts.x_fprop) for name, each in PRECISION_RECIPES.items()}
    assert found == {
        "bf16": 1.0,
        "fp8_tensor": 1.1,
        "fp8_delayed": 0.7,
        "fp8_rowwise": 3.0,
        "fp8_blockwise": 1.2,
        "mxfp8": 1.0,
        "nvfp4": 1.2,
    }


def test_a_matmul_that_stays_wide_costs_what_it_does_in_a_wide_run() -> None:
    """The head's time in a narrow run, at nominal rates, is that of bfloat16."""
    base = job("deepseek_v3", "GB300", 256, "bfloat16", (4096, 1, 8192), HYBRID, pp=4, ep=64, vpp=4)
    seconds = []
    for form in ("bfloat16", "mxfp8", "nvfp4"):
        workload = replace(base, run=replace(base.run, precision=in_format(base.run.precision, form)))
        head = head_of(workload.model.vocab, sizes_of(workload)).forward.gemm_flops
        seconds.append(head / workload.cluster.gpu.matmul_units(matmul_bits(workload.casts))[1])
    assert seconds[1:] == pytest.approx([seconds[0]] * 2, rel=1e-9)


@pytest.mark.parametrize("gpus", [16, 64])
def test_a_shared_expert_beside_the_exchanges_hides_at_most_what_it_computes(gpus: int) -> None:
    plain = job("deepseek_v2_lite", "H100", gpus, "bfloat16", (4096, 1, 4 * gpus), {}, ep=8)
    beside = changed(plain, parallel={"overlap": ("shared_experts",)})
    one, two = predict_time(plain), predict_time(beside)
    assert two.step_seconds < one.step_seconds


@pytest.mark.parametrize("name", ["sequential", "shared_experts", "chunks", "chunks_shared_experts"])
@pytest.mark.parametrize(("exchange", "experts"), [(2.0, 3.0), (3.0, 1.0), (0.5, 4.0)])
def test_exposed_exchanges_are_those_of_the_simulated_order(name: str, exchange: float, experts: float) -> None:
    """Of one layer's forward, with nothing else in it that takes time."""
    costs = dict.fromkeys((step.name for step in STEPS), 0.0)
    costs |= {"dispatch_exchange": exchange, "combine_exchange": exchange, "experts_up": experts}
    if "shared_experts" in name:
        costs |= {"shared_up": 1.0, "shared_down": 0.5}
    order = [operation for operation in layer_order(name, 1, costs).order if operation.direction == "F"]
    halves = (1.0, 0.5) if "shared_experts" in name else (0.0, 0.0)
    chunks = 2 if "chunks" in name else 1
    timeline = simulate_order(name, order)
    assert timeline.exposed == pytest.approx(exposed_exchanges(exchange, experts, *halves, chunks))


def test_chunks_hide_more_the_more_they_are() -> None:
    exposed = [exposed_exchanges(1.0, 4.0, 0.0, 0.0, chunks) for chunks in (1, 2, 4, 8)]
    assert exposed == pytest.approx([2.0, 1.0, 0.5, 0.25])
    # Never less than what the link takes longer than everything that computes.
    assert exposed_exchanges(3.0, 1.0, 0.5, 0.5, 64) == pytest.approx(6.0 - 2.0)


def two_streams(exchange: float, matmuls: float, chunks: int) -> float:
    """When a layer ends whose chunks are gathered, multiplied and summed; half of ``exchange`` is for gathers."""
    computed, sent = 0.0, exchange / 2
    for chunk in range(1, chunks + 1):
        computed = max(computed, chunk * exchange / 2 / chunks) + matmuls / chunks
        sent = max(sent, computed) + exchange / 2 / chunks
    return sent


@pytest.mark.parametrize("chunks", [2, 3, 8])
@pytest.mark.parametrize(("exchange", "matmuls"), [(2.0, 3.0), (3.0, 3.0), (3.0, 1.0)])
def test_what_tensor_parallelism_hides_is_there_in_two_streams(exchange: float, matmuls: float, chunks: int) -> None:
    hidden = hidden_in_chunks(exchange, matmuls, chunks)
    assert hidden <= exchange + matmuls - two_streams(exchange, matmuls, chunks) + 1e-12
    if matmuls > exchange:
        assert hidden == pytest.approx(exchange + matmuls - two_streams(exchange, matmuls, chunks))


def test_tensor_parallelism_in_chunks_makes_a_step_shorter() -> None:
    plain = job("deepseek_v2_lite", "H100", 16, "bfloat16", (4096, 1, 64), {}, tp=2, ep=8)
    plain = replace(plain, framework=Framework("moefold"))
    beside = (changed(plain, parallel={"overlap": ("tensor_parallel",), "tp_chunks": chunks}) for chunks in (2, 4))
    steps = [predict_time(workload).step_seconds for workload in (plain, *beside)]
    assert steps[0] > steps[1] > steps[2]


@pytest.mark.parametrize("gpus", [16, 64])
def test_chunks_make_a_step_shorter(gpus: int) -> None:
    plain = job("deepseek_v2_lite", "H100", gpus, "bfloat16", (4096, 1, 4 * gpus), {}, ep=8)
    steps = [predict_time(changed(plain, parallel={"exchange_chunks": chunks})).step_seconds for chunks in (1, 2, 4)]
    both = changed(plain, parallel={"exchange_chunks": 4, "overlap": ("shared_experts",)})
    assert steps[0] > steps[1] > steps[2] > predict_time(both).step_seconds


def test_bounded_rows_wait_for_no_count() -> None:
    """The same bytes, and no read of counts on the host: the step is shorter by what the host waited."""
    run = replace(
        RECIPES["deepseek_v2_lite"](),
        parallel=ParallelConfig(ep=8, dispatcher="all_to_all_bounded", row_bound=1.0, pair_bound=1.0),
        data=DataConfig(4096, 64, 1),
    )
    bounded = Workload(run, cluster_of("H100", 16), Framework("moefold"))
    counted = changed(bounded, parallel={"dispatcher": "all_to_all"})
    one, two = predict_time(bounded), predict_time(counted)
    assert one.of("host") < two.of("host") and one.step_seconds < two.step_seconds


def test_four_steps_of_parameter_synchronisation_are_a_pipeline_over_two_links() -> None:
    """By hand, of hosts of 8 H100: all bytes inside, an eighth between; one bucket's shorter step does not hide."""
    run = RECIPES["qwen3_30b_a3b"]()
    parallel = replace(run.parallel, sharding="flat", pp=2, ep=8, schedule="1f1b")
    direct = workload_of_run(
        replace(run, parallel=parallel, data=replace(run.data, global_batch=1024)), cluster_of("H100", 64)
    )
    steps = changed(direct, parallel={"param_sync": "hierarchical", "ranks_per_host": 8})
    cluster, c = direct.cluster, CURRENT
    held, each, where = 1e9, 6.0, Reach(32, 8)
    inside = 6e9 * 7 / 8 / (cluster.gpu.link_gb_s * 1e9 * c.ring_link) + c.latency_us * 1e-6
    between = 6e9 / 8 * 3 / 4 / (cluster.nic_gb_s * 1e9 * c.ring_nic) + 1.5 * c.latency_us * 1e-6
    shorter = min(inside, between) / (held * direct.gradient_bytes / (128 * 2**20))
    assert synced_seconds(steps, held, each, where, 1, c) == pytest.approx(max(inside, between) + shorter)
    assert synced_seconds(direct, held, each, where, 1, c) == ring(6e9, where, cluster, c)
    # Experts of 64 GPUs over ep 8 are one to a host, so they go by one collective.
    assert synced_seconds(steps, held, each, Reach(4, 1), 8, c) == ring(6e9, Reach(4, 1), cluster, c)
    assert predict_time(steps).step_seconds != predict_time(direct).step_seconds


def test_a_budget_of_sms_is_compute_against_bandwidth() -> None:
    """DeepEP's default is the prediction without the key; more SMs take compute for nothing; fewer slow exchanges."""
    plain = job("deepseek_v3", "H100", 1024, "fp8_blockwise", (4096, 1, 8192), DEEP, pp=8, ep=64)

    def at(sms: int | None) -> tuple[float, float, float]:
        time = step_time(changed(plain, parallel={"dispatch_sms": sms}))
        busy = time.busy.forward.plus(time.busy.backward)
        return busy.compute, busy.expert + busy.hidden_expert, time.total

    assert at(20) == pytest.approx(at(None), rel=1e-12)
    (compute, exchange, total), more, fewer = at(20), at(44), at(10)
    hidden = step_time(plain).busy
    hidden_seconds = hidden.forward.hidden_expert + hidden.backward.hidden_expert
    assert more[0] - compute == pytest.approx(24 / 132 * hidden_seconds) and more[1] == exchange
    assert more[2] > total and 1.8 * exchange < fewer[1] < 2 * exchange
    with pytest.raises(ConfigError, match="H100 has 132 SMs"):
        at(132)
    with pytest.raises(ConfigError, match="not known"):
        step_time(replace(changed(plain, parallel={"dispatch_sms": 20}), cluster=cluster_of("MI300X", 1024)))
