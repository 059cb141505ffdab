"""Parts of a layer that few models have, and what waits for what: each against its own count, or a timeline by hand."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from moefold.blueprint.model_shape import Attention, Dense, Layer, MoE
from moefold.config.data import DataConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.hardware.cluster import cluster_of, gpu_named
from moefold.plan.op_costs import Part, Work, in_waves, parts_of
from moefold.plan.op_sizes import Sizes, sizes_of
from moefold.plan.timing.constants import CURRENT, MEANINGS, Constants
from moefold.plan.timing.layer_time import Passes, Seconds, bounded, layer_passes
from moefold.plan.timing.operator_recompute import operator_shares
from moefold.plan.timing.throughput import rates_of
from moefold.plan.workload import MEGATRON_PRECISION, Framework, Workload, changed, in_format
from moefold.recipes.catalog import recipe


def workload(model: str, ep: int = 8, form: str = "bfloat16", **framework: Any) -> Workload:
    run = RunConfig(
        model=recipe(model).model,
        parallel=ParallelConfig(ep=ep, sharding="zero1"),
        precision=in_format(MEGATRON_PRECISION, form),  # type: ignore[arg-type]
        data=DataConfig(4096, 64),
    )
    return Workload(run, cluster_of("H100", 64), Framework("megatron", date=2026.0, **framework))


def part(layer: Layer, sizes: Sizes, name: str) -> Part | None:
    return next((each for each in parts_of(layer, sizes) if each.name == name), None)


def traffic(layer: Layer, sizes: Sizes, name: str) -> tuple[float, float]:
    found = part(layer, sizes, name)
    return (found.forward.traffic, found.backward.traffic) if found else (0.0, 0.0)


# ---- parts ----


def test_second_biases_of_experts_are_counted_tensor_by_tensor() -> None:
    """The loop over experts, as tensors of one row: product and sum in float32, a concatenation, a cast."""
    at = workload("gpt_oss_120b")
    layer = at.model.layers[0]
    assert isinstance(layer.feed, MoE) and layer.feed.biased
    product, summed, joined, cast = (0, 4), (2 + 4, 4), (4, 4), (4, 2)
    forward = sum(sum(pair) for pair in (product, summed, joined, cast))
    to_wide, to_narrow, pieces = (2, 4), (4, 2), (2, 2)
    # The product's gradient, times what the other factor is, and its sum: for the bias, and for the row's weight.
    of_bias, of_weight = (4, 4, 4), (4, 4, 4)
    backward = sum(sum(each) for each in (to_wide, to_narrow, pieces, of_bias, of_weight))
    rows = 4096 * layer.feed.top_k
    found = traffic(layer, sizes_of(at), "biases")
    first = 4.0 * rows * layer.feed.dim
    assert found == pytest.approx((forward * rows * at.model.dim, backward * rows * at.model.dim + first))


def test_no_loop_over_experts_is_in_a_graph_of_the_whole_step() -> None:
    at = workload("gpt_oss_120b")
    whole = replace(at, run=replace(at.run, kernels=replace(at.run.kernels, graphs="full")))
    layer = at.model.layers[0]
    looped, fused = traffic(layer, sizes_of(at), "biases"), traffic(layer, sizes_of(whole), "biases")
    assert fused[0] < looped[0] / 4 and fused[1] < looped[1] / 3
    assert part(workload("qwen3_30b_a3b").model.layers[0], sizes_of(at), "biases") is None


def test_a_window_computes_the_tiles_at_both_of_its_ends() -> None:
    """Against tiles that are looked at one by one."""
    at = workload("gpt_oss_120b")
    sizes = replace(sizes_of(at), query_wave=0.0)
    windowed = next(layer for layer in at.model.layers if isinstance(layer.mixer, Attention) and layer.mixer.window)
    assert isinstance(windowed.mixer, Attention)
    window, tile, length = windowed.mixer.window, sizes.tile, sizes.seq_len
    starts = range(0, length, tile)
    seen = [key for query in starts for key in starts if key <= query and key + tile > query - window + 1]
    per_token = len(seen) * tile * tile / length
    core = part(windowed, sizes, "core_attention")
    assert core is not None
    each = 2.0 * windowed.mixer.heads * (windowed.mixer.qk_dim + windowed.mixer.v_dim)
    assert core.forward.attention_flops / sizes.tokens == pytest.approx(each * per_token, rel=0.03)


def test_unfused_attention_moves_its_scores() -> None:
    at = workload("mixtral_8x7b", attention="unfused")
    layer = at.model.layers[0]
    core, flash = (
        part(layer, sizes_of(at), "core_attention"),
        part(layer, replace(sizes_of(workload("mixtral_8x7b")), query_wave=0.0), "core_attention"),
    )
    assert core is not None and flash is not None and isinstance(layer.mixer, Attention)
    scores = 4096.0 * 4096 * layer.mixer.heads
    # Written as words by a matmul and read by the next; softmax and dropout read and write them, and a mask of a byte.
    assert core.forward.streamed == pytest.approx((2 + 2 + 2 + 2 + 2 + 1) * scores)
    # The whole square, of which a causal kernel computes half.
    assert core.forward.gemm_flops == pytest.approx(2 * flash.forward.attention_flops)
    assert core.forward.attention_flops == 0


def test_torch_has_the_softmax_where_four_matrices_of_scores_do_not_divide() -> None:
    """Two heads of one sequence on a rank take longer than those of two sequences: vTrain's table has layers of 2,048
    over 8 A100 with 4.8 ms for one sequence of 1,024 tokens and 3.9 ms for two, forward and backward."""
    at = workload("mixtral_8x7b", attention="unfused")
    layer = replace(at.model.layers[0], mixer=replace(at.model.layers[0].mixer, heads=16))  # type: ignore[arg-type]
    one, two = (
        part(layer, replace(sizes_of(at), tp=8, seq_len=1024, tokens=1024.0 * sequences), "core_attention")
        for sequences in (1, 2)
    )
    assert one is not None and two is not None
    # To float32, scaled, masked, softmax, back; against one kernel that reads and writes words.
    torch_forward, torch_backward = (
        ((2, 4), (4, 4), (4, 4), (4, 4), (4, 2)),
        ((2, 4), (4, 4, 4), (4, 4), (4, 4), (4, 2)),
    )
    scores = 1024.0 * 1024 * 2
    for alone, fused, kernels, kernel in (
        (one.forward, two.forward, torch_forward, (2, 2)),
        (one.backward, two.backward, torch_backward, (2, 2, 2)),
    ):
        assert alone.streamed - fused.streamed / 2 == scores * (sum(map(sum, kernels)) - sum(kernel))
        assert alone.launches - fused.launches == alone.kernels - fused.kernels == len(kernels) - 1


def test_an_activation_at_the_end_of_a_matmul_reads_nothing_again() -> None:
    for form in ("bfloat16", "mxfp8"):
        apart, fused = (sizes_of(workload("qwen3_30b_a3b", form=form, fused_experts=on)) for on in (False, True))
        layer = recipe_layer()
        before, after = traffic(layer, apart, "activation"), traffic(layer, fused, "activation")
        assert (after[0] / before[0], after[1] / before[1]) == pytest.approx((1 / 3, 4 / 6))
        experts, ended = part(layer, apart, "experts"), part(layer, fused, "experts")
        assert experts is not None and ended is not None
        assert ended.forward.grouped_flops == experts.forward.grouped_flops
        assert ended.forward.quantised < experts.forward.quantised or form == "bfloat16"


def recipe_layer() -> Layer:
    return workload("qwen3_30b_a3b").model.layers[0]


def test_narrow_heads_attend_at_a_lower_rate() -> None:
    wide, narrow = (rates_of(workload(name), CURRENT, 4096.0) for name in ("qwen3_30b_a3b", "gpt_oss_120b"))
    assert narrow.attention_forward / wide.attention_forward == pytest.approx(2**CURRENT.attention_narrow)
    assert narrow.gemm == wide.gemm


# ---- what waits for what ----


def test_hidden_exchanges_are_no_longer_than_the_work_beside_them() -> None:
    short = Passes(
        Seconds(compute=1.0, expert=0.1, hidden_expert=4.0), Seconds(compute=2.0, expert=0.1, hidden_expert=2.0)
    )
    found = bounded(short)
    assert found.forward.hidden_expert + found.backward.hidden_expert == pytest.approx(3.0)
    assert found.total == pytest.approx(short.total + 3.0)
    long = Passes(Seconds(compute=3.0, hidden_expert=1.0), Seconds(compute=3.0, hidden_expert=1.0))
    assert bounded(long) is long


def waiting(c: Constants, **changes: float) -> Constants:
    values = {meaning.name: value for meaning, value in zip(MEANINGS, c.values, strict=True)} | changes
    return Constants(tuple(values.values()))


def host_and_gpu(host: list[float], gpu: list[float]) -> float:
    """When the GPU is done with pieces that the host launches one after the other, each launched before it runs."""
    launched = done = 0.0
    for here, there in zip(host, gpu, strict=True):
        launched += here
        done = max(done + there, launched)
    return done


@pytest.mark.parametrize("launch_us", [5.0, 20.0, 45.0, 90.0])
def test_what_the_host_gains_while_experts_compute_is_its_lead_in_the_next_layer(launch_us: float) -> None:
    """Forward of a layer from sync to sync, against two queues by hand. Both are rounded off where they are close."""
    at = workload("mixtral_8x22b")
    layer, sizes, c = at.model.layers[-1], sizes_of(at), waiting(CURRENT, launch_us=launch_us, sync_us=1e-3)
    found = layer_passes(at, layer, sizes, rates_of(at, c, 4096.0), c).forward
    free = waiting(CURRENT, launch_us=1e-9, loop_us=1e-9, launch_grace=1e-9, sync_us=1e-3)
    rates = rates_of(at, c, 4096.0)
    routed = {"permutation", "experts", "activation"}
    gpu, host = [0.0, 0.0], [0.0, 0.0]
    for each in parts_of(layer, sizes):
        place = 0 if each.name in routed else 1
        gpu[place] += (
            rates.compute(each.forward, backward=False) + rates.moving(each.forward) + rates.gap * each.forward.kernels
        )
        host[place] += rates.launch * each.forward.launches + rates.loop * each.forward.loops
    gpu[0] += found.expert
    by_hand = host_and_gpu(host, gpu)
    assert by_hand <= found.total * 1.0001 <= 1.2 * by_hand * 1.0001
    assert layer_passes(at, layer, sizes, rates_of(at, free, 4096.0), free).forward.total <= found.total


def test_what_slows_down_beside_gathers_is_hidden_with_them() -> None:
    """Parameters that take longer to come than the layer takes to compute are all that counts."""
    at = workload("mixtral_8x22b", ep=8)
    sharded = changed(at, parallel={"sharding": "fsdp"})
    layer, sizes = at.model.layers[-1], sizes_of(sharded)
    slow = replace(sharded, cluster=replace(sharded.cluster, nic_gb_s=sharded.cluster.nic_gb_s / 50))
    more, less = (waiting(CURRENT, contention=value) for value in (0.4, 0.1))
    long, short = (layer_passes(slow, layer, sizes, rates_of(slow, c, 4096.0), c).total for c in (more, less))
    assert long == pytest.approx(short, rel=0.01)


# ---- constants ----


def test_constants_are_inside_of_what_was_measured_alone() -> None:
    for meaning, value in zip(MEANINGS, CURRENT.values, strict=True):
        low, high = meaning.range
        assert low <= value <= high, f"{meaning.name} is {value:.4g}: {low:g} to {high:g} were measured"
        assert low <= meaning.prior <= high, meaning.name


def test_random_numbers_of_work_add_up() -> None:
    random = Random(0)
    one, other = (Work(*(random.random() for _ in Work.__slots__)) for _ in range(2))
    assert one + other == other + one


# ---- recomputation by operators, and kernels ----


def test_every_second_matmul_is_repeated_and_experts_whole() -> None:
    """torchtitan's order of a Llama block: q [k] v [out] gate [up] down; DeepSeek's latents: [q_up], [kv_up]."""
    llama = Layer(Attention(heads=32, kv_heads=8, qk_dim=128, v_dim=128), Dense(14336))
    shares = operator_shares(llama, 4096, all_matmuls=False)
    assert shares["qkv"] == pytest.approx(8 / (32 + 8 + 8))
    assert shares["attention_out"] == 1.0 and shares["feed_forward"] == pytest.approx(1 / 3)
    assert "core_attention" not in shares and shares["experts"] == shares["norms"] == 1.0
    # A format whose matmuls are on no list repeats all but the last, whose result no gradient needs.
    whole = operator_shares(llama, 4096, all_matmuls=True)
    assert (whole["qkv"], whole["attention_out"], whole["feed_forward"]) == pytest.approx((1.0, 1.0, 2 / 3))
    latent = Attention(heads=128, kv_heads=128, qk_dim=192, v_dim=128, q_latent=1536, kv_latent=512, rope_dim=64)
    deepseek = operator_shares(Layer(latent, Dense(18432)), 7168, all_matmuls=False)
    assert deepseek["mla_up"] == 1.0 and "latents" not in deepseek and "attention_out" not in deepseek
    assert deepseek["feed_forward"] == pytest.approx(1 / 3)


def test_operators_are_recomputed_where_torchtitan_is_asked_to() -> None:
    at = workload("qwen3_30b_a3b")
    for framework, recompute, form, expected in (
        ("fsdp2", ("norms", "activation"), "bfloat16", "second"),
        ("fsdp2", ("norms", "activation"), "nvfp4", "all"),
        ("fsdp2", ("norms",), "bfloat16", ""),
        ("megatron", ("norms", "activation"), "bfloat16", ""),
    ):
        run = replace(at.run, precision=in_format(MEGATRON_PRECISION, form))  # type: ignore[arg-type]
        made = changed(replace(at, run=run, framework=Framework(framework)), memory={"recompute": recompute})  # type: ignore[arg-type]
        assert made.repeated_matmuls == expected


def test_a_router_has_as_many_kernels_as_were_counted() -> None:
    """DeepSeek-V3's, forward and backward: 72, and 31 where they are fused."""
    for fused, expected in ((False, 72), (True, 31)):
        at = workload("deepseek_v3", fused_router=fused)
        router = part(at.model.layers[-1], sizes_of(at), "router")
        assert router is not None
        assert router.forward.kernels + router.backward.kernels == expected
    plain = workload("qwen3_30b_a3b")
    router = part(plain.model.layers[0], sizes_of(plain), "router")
    assert router is not None and router.forward.kernels + router.backward.kernels < 60


def test_half_of_the_last_wave_of_tiles_is_lost_on_a100_and_none_on_later_gpus() -> None:
    at = workload("mixtral_8x7b")
    sizes = sizes_of(replace(at, cluster=cluster_of("A100", 64)))
    assert sizes.wave == 108 * 256 * 128 and sizes_of(at).wave == 0.0
    long = 96.0 * 1e9
    assert in_waves(1.0, 4 * sizes.wave, long, sizes) == pytest.approx(1.0)
    assert in_waves(1.0, 4.25 * sizes.wave, long, sizes) == pytest.approx(1 + 0.75 / 4.25 / 2)
    # Less than half a wave is cut along its sums.
    assert in_waves(1.0, 0.8 * sizes.wave, long, sizes) == pytest.approx(1 + 0.25 / 2)
    assert in_waves(1.0, sizes.wave / 100, long, sizes) == pytest.approx(1.5)
    # A short sum: tiles are filled and emptied more often.
    assert in_waves(1.0, sizes.wave, 96.0, sizes) == pytest.approx(2.0)
    assert in_waves(1.0, 64.0, 64.0, sizes_of(at)) == 1.0


@pytest.mark.parametrize(("gpu", "sms", "tile"), [("A100", 108, 128), ("H100", 132, 128), ("B200", 148, 256)])
def test_attention_of_few_heads_leaves_multiprocessors_idle(gpu: str, sms: int, tile: int) -> None:
    """By how many tiles each has; a rank of eight has as many fewer of them, and the loss grows as much."""
    whole = replace(workload("qwen3_30b_a3b"), cluster=cluster_of(gpu, 64))
    cut, losses = changed(whole, parallel={"tp": 8, "etp": 1}), []
    for each in (whole, cut):
        sizes = sizes_of(each)
        core = part(each.model.layers[0], sizes, "core_attention")
        free = part(each.model.layers[0], replace(sizes, query_wave=0.0, key_wave=0.0), "core_attention")
        assert core is not None and free is not None
        losses.append(core.forward.attention_flops / free.forward.attention_flops - 1)
        heads = 32 / each.parallel.tp
        assert losses[-1] == pytest.approx(1.8 * sms * tile / (heads * sizes.tokens))
        assert core.backward.attention_flops / free.backward.attention_flops - 1 == pytest.approx(
            0.6 * sms * 128 / (heads * sizes.tokens)
        )
    assert losses[1] == pytest.approx(8 * losses[0])


def test_arithmetic_of_b200_is_held_down_and_its_memory_is_not() -> None:
    at = workload("mixtral_8x7b")
    b200, b300 = (replace(at, cluster=cluster_of(name, 64)) for name in ("B200", "B300"))
    assert sizes_of(b300).balance == pytest.approx(1.2 * sizes_of(b200).balance)


def test_turns_of_two_microbatches_cost_host_time() -> None:
    plain = workload("qwen3_30b_a3b")
    turns = changed(plain, parallel={"overlap": ("ep",)})
    one, other = (rates_of(each, CURRENT, 4096.0) for each in (plain, turns))
    assert other.launch == pytest.approx(CURRENT.launch_overlap * one.launch)
    assert other.gemm == one.gemm


def test_flash_attention_of_before_is_slower_than_that_of_now() -> None:
    now, before = (rates_of(workload("mixtral_8x7b", attention=kind), CURRENT, 4096.0) for kind in ("cudnn", "flash2"))
    assert now.attention_forward / before.attention_forward == pytest.approx(CURRENT.flash2)


def test_a_gpu_held_below_its_watts_is_slower() -> None:
    at = workload("mixtral_8x7b")
    usual, held = (
        rates_of(replace(at, cluster=cluster_of(name, 64)), CURRENT, 4096.0) for name in ("H100", "H100-96G-500W")
    )
    assert usual.gemm / held.gemm == pytest.approx((500 / 700) ** CURRENT.power)
    assert gpu_named("B200-750W").watts == 750


def test_sharded_gradients_are_summed_as_they_are_kept() -> None:
    """Megatron's gradients of two bytes are half of those of four."""
    wide = changed(workload("mixtral_8x7b"), parallel={"sharding": "fsdp"})
    narrow = changed(wide, precision={"gradients": "bfloat16"})
    layer, constants = wide.model.layers[0], CURRENT
    passes = [
        layer_passes(each, layer, sizes_of(each), rates_of(each, constants, 4096.0), constants)
        for each in (wide, narrow)
    ]
    sent = [each.backward.sharded + each.backward.hidden_sharded for each in passes]
    gathered = [each.forward.sharded + each.forward.hidden_sharded for each in passes]
    assert gathered[0] == pytest.approx(gathered[1])
    assert (sent[0] - gathered[0]) / (sent[1] - gathered[1]) == pytest.approx(2, rel=0.02)
