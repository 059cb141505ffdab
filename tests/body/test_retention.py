"""Every step of a block discarded or offloaded: the gradients of a plain forward to the bit, each step recomputed once,
and the bytes that the planner's rows name are no longer held."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
import torch
from tests.body.model_inputs import batch_of, fill
from tests.peak_memory import PeakMemory

from moefold.config.attention import GatedDeltaNetConfig
from moefold.config.memory import RetainedStep
from moefold.config.run import RunConfig
from moefold.hardware.cluster import cluster_of
from moefold.model.build import build_decoder, local_interfaces
from moefold.nn.offload import HostPool, Offload, OffloadGroup, rounded_up
from moefold.nn.step_retention import KEEP_ALL, Retention, StepRetention
from moefold.plan.memory.saved_activations import parts_of, row_bytes, setting_of, sizes_of
from moefold.plan.memory.saved_moefold import MOEFOLD
from moefold.plan.workload import workload_of_run
from moefold.recipes.catalog import recipe

LENGTH = 64
STEPS = get_args(RetainedStep)
CPU = torch.device("cpu")
# Latent attention with a dense first layer and a shared expert; grouped queries with neither.
MODELS: dict[str, tuple[RetainedStep, ...]] = {
    "deepseek_v3": STEPS,
    "qwen3_30b_a3b": tuple(step for step in STEPS if step not in ("latent_norm", "mla_up", "shared", "dense")),
}
CASES = [(model, step, how) for model, steps in MODELS.items() for step in steps for how in ("discard", "offload")]


def proxy(name: str) -> RunConfig:
    run = recipe(f"{name}_proxy")
    data = replace(run.data, seq_len=LENGTH, micro_batch=1, global_batch=2)
    return replace(run, precision=replace(run.precision, compute="bfloat16"), data=data)


def retention(choices: dict[RetainedStep, str], limit: int | None = None) -> StepRetention:
    return StepRetention(choices, Offload(HostPool(limit, pinned=False), CPU, least=1))


def gradients(run: RunConfig, retain: Retention, sequences: int = 2) -> tuple[dict[str, torch.Tensor], int]:
    """Of one forward and backward, and the bytes that are alive between them."""
    decoder = build_decoder(run.model, torch.bfloat16, local_interfaces("grouped", retain=retain))
    fill(decoder)
    batch = batch_of(sequences, LENGTH, run.model.vocab_size)
    with PeakMemory() as memory:
        output = decoder(batch)
        live = memory.live
        objective = output.loss_sum + sum(sum(report.losses) for _, report in output.reports)
        objective.backward()
    return {name: value.grad for name, value in decoder.named_parameters()}, live


@pytest.mark.parametrize("how", ["discard", "offload"])
@pytest.mark.parametrize("step", ["attention_norm", "core"])
def test_steps_of_linear_attention_change_no_bit(step: RetainedStep, how: str) -> None:
    run = proxy("qwen3_30b_a3b")
    linear = GatedDeltaNetConfig(2, 4, 8, 12, full_attention_every=2, chunk_size=16)
    run = replace(run, model=replace(run.model, linear_attention=linear, norm_scale="one_plus_weight"))
    wanted, plain = gradients(run, KEEP_ALL)
    keeps = retention({step: how})
    found, live = gradients(run, keeps)
    # What is offloaded waits in the memory that is counted here.
    assert equal(found, wanted) and (live < plain or how == "offload")
    assert keeps.recomputed[step] == (how == "discard") * run.model.num_layers


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def planned(run: RunConfig, step: RetainedStep, how: str) -> float:
    """Bytes per token of the rows that fall with a step, over all layers."""
    workload = workload_of_run(run, cluster_of("H100", 1))
    setting, total = setting_of(workload), 0.0
    for layer in workload.model.layers:
        sizes = sizes_of(layer, run.model.dim, LENGTH, setting.sequences)
        rows = [row for row in MOEFOLD if row.part in parts_of(layer) and row.step == step]
        total += sum(row_bytes(row, sizes, setting) for row in rows if how == "discard" or not row.discard_only)
    return total


def times(run: RunConfig, step: RetainedStep) -> int:
    """How often a microbatch runs a step: once per layer that has it, and latents of queries and of keys and values."""
    moe = sum(map(run.model.is_moe_layer, range(run.model.num_layers)))
    if step in ("rows", "gate_up", "activation", "shared"):
        return moe
    return run.model.num_layers - moe if step == "dense" else run.model.num_layers * (1 + (step == "latent_norm"))


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, int], tuple[dict[str, torch.Tensor], int]]:
    return {(name, number): gradients(proxy(name), KEEP_ALL, number) for name in MODELS for number in (2, 6)}


@pytest.mark.parametrize(("model", "step", "how"), CASES)
def test_a_step_is_not_kept_and_gradients_are_equal_to_the_bit(
    kept: dict[tuple[str, int], tuple[dict[str, torch.Tensor], int]], model: str, step: RetainedStep, how: str
) -> None:
    run, saved = proxy(model), {}
    for number in (2, 6):
        retain = retention({step: how})
        found, live = gradients(run, retain, number)
        wanted, before = kept[model, number]
        assert equal(found, wanted)
        host = sum(buffer.untyped_storage().nbytes() for buffer in retain.offload.pool.buffers())
        saved[number] = before - (live - host)
        assert (retain.offload.bytes_out > 0) == (how == "offload")
        assert retain.recomputed == (Counter({step: times(run, step)}) if how == "discard" else Counter())
    per_token = (saved[6] - saved[2]) / (4 * LENGTH)
    assert per_token == pytest.approx(planned(run, step, how), rel=0.01)


def test_all_steps_at_once_with_sinks_biases_and_clamped_activations() -> None:
    """A discarded step may be recomputed from a discarded one, or from what has to be reloaded."""
    run = proxy("gpt_oss_20b")
    steps = [step for step in STEPS if step not in ("latent_norm", "mla_up", "shared", "dense")]
    wanted, _ = gradients(run, KEEP_ALL)
    discarded = retention(dict.fromkeys(steps, "discard"))
    mixed = retention(dict.fromkeys(steps, "discard") | {"rows": "offload", "gate_up": "offload"})
    for retain in (discarded, mixed):
        assert equal(gradients(run, retain)[0], wanted)
        assert retain.recomputed == Counter({s: times(run, s) for s in steps if retain.choices[s] == "discard"})


def test_a_full_pool_leaves_the_rest_on_the_device() -> None:
    run = proxy("qwen3_30b_a3b")
    wanted, _ = gradients(run, KEEP_ALL)
    unbounded = retention({"rows": "offload", "gate_up": "offload"})
    gradients(run, unbounded)
    limit = unbounded.offload.pool.allocated // 2
    bounded = retention({"rows": "offload", "gate_up": "offload"}, limit)
    assert equal(gradients(run, bounded)[0], wanted)
    assert bounded.offload.not_taken > 0 == unbounded.offload.not_taken
    assert 0 < bounded.offload.pool.allocated <= limit
    assert 0 < bounded.offload.bytes_out < unbounded.offload.bytes_out


def test_sizes_of_host_buffers_waste_at_most_an_eighth() -> None:
    for size in (1, 7, 4096, 4097, 123_457, 3 << 20):
        assert size <= rounded_up(size) <= size * 9 / 8 and rounded_up(rounded_up(size)) == rounded_up(size)
    pool = HostPool(1 << 20, pinned=False)
    first = pool.take(600_000)
    assert first is not None and pool.take(600_000) is None
    pool.give(first, None)
    # Another size: the free buffer makes room for it.
    assert pool.take(900_000) is not None and pool.allocated <= 1 << 20


def test_a_stale_reload_is_seen() -> None:
    """A host buffer that is given back before it was read holds another tensor's values."""
    run = proxy("qwen3_30b_a3b")
    wanted, _ = gradients(run, KEEP_ALL)
    retain = retention({"gate_up": "offload"})
    send = retain.offload.send

    def too_early(group: OffloadGroup) -> None:
        send(group)
        for slot in group.slots():
            assert slot.host is not None
            retain.offload.pool.give(slot.host, None)

    retain.offload.send = too_early  # type: ignore[method-assign]
    assert not equal(gradients(run, retain)[0], wanted)
