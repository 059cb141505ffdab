"""Inputs that matmuls keep narrow: no bit of losses and gradients changes, and the bytes are those of the planner."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
import torch
from tests.body.model_inputs import batch_of, fill
from torch import Tensor, nn

import moefold
from moefold.blueprint.narrow_matmuls import INPUT_STEPS, input_step, keeps_narrow, matmuls
from moefold.config.casts import Cast
from moefold.config.memory import RetainedStep
from moefold.config.precision_recipes import PRECISION_RECIPES, RecipeName
from moefold.config.run import RunConfig
from moefold.hardware.cluster import cluster_of
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.narrow_modules import narrow_modules
from moefold.nn.matmul_kernels import grouped, sequential
from moefold.nn.matmul_policy import ParameterMatmul, WeightGradQueue
from moefold.nn.step_retention import KEEP_ALL, retention_for
from moefold.ops.padded_runs import move_rows
from moefold.plan.memory.layer_activations import kept_by
from moefold.plan.memory.saved_activations import setting_of
from moefold.plan.workload import workload_of_run
from moefold.precision.cast_backends import QUANTIZERS
from moefold.precision.narrow_inputs import NarrowInputs, narrow_rows, wide_rows
from moefold.precision.operands import NarrowOperands, NarrowWeights
from moefold.precision.quantize import fake_quantize

TRAINED: tuple[RecipeName, ...] = ("fp8_tensor", "fp8_blockwise", "mxfp8", "nvfp4")
QUANTIZED = tuple(dict.fromkeys(INPUT_STEPS.values()))


def spread(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator)
        * torch.exp2(torch.randint(-9, 9, shape[:1], generator=generator))[(..., *[None] * (len(shape) - 1))]
    )


# ---- codes and scales ----


def expert_by_expert(rows_RX: Tensor, cast: Cast, segments: list[int], padded: list[int]) -> Tensor:
    """What the weight gradient reads of inputs that are kept wide: each expert's rows with their zeros, cast alone."""
    parts = move_rows(rows_RX, segments, padded).split(padded)
    return torch.cat([fake_quantize(part.t(), cast).t() for part in parts])


CASTS = {str(each.casts.x_wgrad): each.casts.x_wgrad for name, each in PRECISION_RECIPES.items() if name in TRAINED}


@pytest.mark.parametrize("casts", ["torch", "native"])
@pytest.mark.parametrize("cast", list(CASTS))
def test_narrow_rows_are_those_of_each_expert(cast: str, casts: str) -> None:
    segments, rows = [33, 0, 1, 130, 16], spread(180, 24, seed=1)
    padded = [-(-size // 128) * 128 for size in segments]
    chosen = CASTS[cast]
    assert chosen is not None
    chosen = replace(chosen, delayed=False)
    narrow = narrow_rows(rows, chosen, segments, QUANTIZERS[casts].quantize)
    assert torch.equal(wide_rows(narrow, chosen, segments, padded), expert_by_expert(rows, chosen, segments, padded))
    # Pads are not kept, but for what a transform of 16 rows needs.
    shape = (180, 24) if chosen.element != "e2m1" else ((48 + 16 + 144 + 16) // 16, 24, 8)
    assert narrow.codes.shape == shape and narrow.codes.dtype == torch.uint8
    # One scale per block and column; of a whole matrix one per expert that has rows.
    numbers = 4 if chosen.block is None else 24 * sum(-(-size // chosen.block[1]) for size in segments)
    assert narrow.scale.numel() == numbers


# ---- one layer ----


def gradients_of(recipe: RecipeName, narrow: bool, casts: str = "native", queue: WeightGradQueue | None = None) -> list:
    inputs = NarrowInputs() if narrow else None
    operands = NarrowOperands(PRECISION_RECIPES[recipe], NarrowWeights(), QUANTIZERS[casts], inputs=inputs)
    policy = ParameterMatmul(queue, operands=operands)
    x, rows = spread(70, 96, seed=4).requires_grad_(), spread(64, 96, seed=5).requires_grad_()
    dense, other = nn.Parameter(spread(80, 96, seed=6)), nn.Parameter(spread(40, 96, seed=8))
    experts, counts = nn.Parameter(spread(4 * 32, 96, seed=7).view(4, 32, 96)), [20, 13, 0, 31]
    loss = policy.linear(x.view(2, 35, 96), dense).square().sum() + policy.linear(x, other).sum()
    for matmul in (sequential, grouped):
        loss = loss + policy.grouped(matmul, rows, experts, torch.tensor(counts), None).square().sum()
    if queue is None:
        loss.backward()
    else:
        with queue.deferring("later"):
            loss.backward()
        assert dense.grad is None
        queue.run_all()
    return [loss, x.grad, rows.grad, dense.grad, other.grad, experts.grad]


@pytest.mark.parametrize("casts", ["torch", "native"])
@pytest.mark.parametrize("recipe", TRAINED)
def test_narrow_kept_is_wide_kept_to_the_bit(recipe: RecipeName, casts: str) -> None:
    wanted = gradients_of(recipe, narrow=False, casts=casts)
    queue = WeightGradQueue()
    for found in (gradients_of(recipe, True, casts), gradients_of(recipe, True, casts, queue)):
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


@pytest.mark.parametrize("mutant", ["narrowed along columns first", "blocks over experts", "the next block's scale"])
def test_mutants_change_bits(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, torchs = gradients_of("mxfp8", narrow=False), QUANTIZERS["torch"]

    def wrong(self: NarrowInputs, x: Tensor, cast: Cast, segments: list[int], *_: object) -> tuple[Tensor, ...]:
        rows = x.detach().flatten(0, -2)
        if mutant == "narrowed along columns first":
            rows = torchs.fake_quantize(rows, cast)
        elif mutant == "blocks over experts":
            rows = torchs.fake_quantize(rows.t(), cast).t()
        codes, scale = narrow_rows(rows, cast, segments, torchs.quantize).tensors()
        return codes, scale.roll(1, 0) if mutant == "the next block's scale" else scale

    monkeypatch.setattr(NarrowInputs, "keep", wrong)
    found = gradients_of("mxfp8", narrow=True)
    assert not all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_matmuls_of_one_tensor_keep_one_copy() -> None:
    inputs, cast = NarrowInputs(), PRECISION_RECIPES["mxfp8"].casts.x_wgrad
    assert cast is not None
    x = spread(64, 32, seed=1)
    first = inputs.keep(x, cast, [64], QUANTIZERS["native"].quantize)
    assert inputs.keep(x, cast, [64], QUANTIZERS["native"].quantize)[0] is first[0]
    x.mul_(3)
    assert inputs.keep(x, cast, [64], QUANTIZERS["native"].quantize)[0] is not first[0]
    assert len(inputs._copies) == 1
    del x
    assert len(inputs._copies) == 0


# ---- whole models ----


def changed(name: str, recipe: RecipeName | None, retained: dict[str, str], compute: str = "float32") -> RunConfig:
    """Sizes at which scales and last blocks count: no multiples of 128."""
    changes: dict[str, object] = {
        "precision.recipe": recipe,
        "precision.compute": compute,
        "kernels.casts": "native",
        "kernels.experts": "grouped",
        "model.num_layers": 2,
    }
    return moefold.load_run(name, changes | {f"memory.retain.{step}": how for step, how in retained.items()})


def steps_of(name: str) -> list[RetainedStep]:
    run = changed(name, "mxfp8", {})
    present = {input_step(matmul.weight.name) for matmul in matmuls(run)}
    return [step for step in QUANTIZED if step in present]


@cache
def step_of_training(
    name: str, recipe: RecipeName, retained: tuple[tuple[str, str], ...]
) -> tuple[float, list[Tensor]]:
    run = changed(name, recipe, dict(retained))
    assert not moefold.check(run)
    model, generator = moefold.build_model(run), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, run.model.vocab_size, (2, 101), generator=generator)
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    assert loss is not None
    loss.backward()
    return loss.item(), [weight.grad for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("recipe", TRAINED)
@pytest.mark.parametrize("name", ["debug_small", "debug_mla"])
def test_models_have_the_bits_of_keeping_wide(name: str, recipe: RecipeName) -> None:
    wanted_loss, wanted = step_of_training(name, recipe, ())
    loss, found = step_of_training(name, recipe, tuple((step, "quantize") for step in steps_of(name)))
    assert loss == wanted_loss and len(found) == len(wanted)
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["debug_small", "debug_mla"])
def test_a_discarded_step_is_recomputed_wide_and_narrowed_again(name: str) -> None:
    """FP8-aware recompute: a narrow matmul keeps the original of a step that is discarded, so that it can be, and
    narrows it once more; other inputs are kept narrow beside it."""
    wanted_loss, wanted = step_of_training(name, "mxfp8", ())
    norms = {"attention_norm": "discard", "activation": "discard"}
    mixed = norms | {"rows": "quantize"} | ({"latent_norm": "quantize"} if name == "debug_mla" else {})
    for retained in (norms, mixed):
        loss, found = step_of_training(name, "mxfp8", tuple(retained.items()))
        assert loss == wanted_loss
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


# ---- bytes ----

LENGTH = 512


def kept_bytes(run: RunConfig, layer: int, sequences: int, seed: int = 0) -> int:
    """Of every storage that autograd keeps through one layer, each once; parameters left out."""
    retention = retention_for(run.memory, torch.device("cpu")) or KEEP_ALL
    decoder = build_decoder(run.model, torch.bfloat16, local_interfaces("grouped", retain=retention))
    fill(decoder)
    narrow_modules(decoder, run)
    kept = {parameter.untyped_storage()._cdata: 0 for parameter in decoder.parameters()}
    alive = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            kept[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sequences * LENGTH, run.model.dim, generator=generator).bfloat16().requires_grad_()
    block = list(decoder.layers.values())[layer]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x, batch_of(sequences, LENGTH, run.model.vocab_size))
    return sum(kept.values())


def planned_bytes(run: RunConfig, layer: int) -> float:
    """Per token."""
    workload = workload_of_run(run, cluster_of("H100", 1))
    return sum(size for _, size in kept_by(workload.model.layers[layer], run.model.dim, setting_of(workload)).kept)


@pytest.mark.parametrize("recipe", TRAINED)
@pytest.mark.parametrize("name", ["debug_small", "debug_mla"])
def test_bytes_that_are_saved_are_the_planners(name: str, recipe: RecipeName) -> None:
    """What quantizing every step saves of a layer, by hooks and by the planner; and of each step alone for mxfp8."""
    choices = [steps_of(name)] + ([[step] for step in steps_of(name)] if recipe == "mxfp8" else [])
    for layer in (0, 1):
        wide = changed(name, recipe, {}, "bfloat16")
        before = kept_bytes(wide, layer, 4)
        for steps in choices:
            run = changed(name, recipe, dict.fromkeys(steps, "quantize"), "bfloat16")
            seen = (before - kept_bytes(run, layer, 4)) / (4 * LENGTH)
            said = planned_bytes(wide, layer) - planned_bytes(run, layer)
            assert seen == pytest.approx(said, rel=0.01), (steps, layer)


@pytest.mark.parametrize("name", ["debug_small", "debug_mla"])
def test_bytes_of_a_layer_are_the_planners(name: str) -> None:
    run = changed(name, "mxfp8", dict.fromkeys(steps_of(name), "quantize"), "bfloat16")
    for layer in (0, 1):
        assert kept_bytes(run, layer, 4) / (4 * LENGTH) == pytest.approx(planned_bytes(run, layer), rel=0.01)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_bytes_of_padded_rows_are_the_planners(recipe: RecipeName) -> None:
    """Rows of zeros that the permutation makes, in what experts keep: 16 experts with 512 rows on average,
    each padded by a random part of a multiple."""
    run = changed("debug_small", recipe, {}, "bfloat16")
    run = replace(run, data=replace(run.data, seq_len=LENGTH, micro_batch=4))
    padded = replace(run, kernels=replace(run.kernels, row_padding="permute"))
    draws = [kept_bytes(padded, 0, 4, seed) for seed in range(8)]
    seen = (sum(draws) / len(draws) - kept_bytes(run, 0, 4)) / (4 * LENGTH)
    assert seen == pytest.approx(planned_bytes(padded, 0) - planned_bytes(run, 0), rel=0.2)
    assert sum(draws) / len(draws) / (4 * LENGTH) == pytest.approx(planned_bytes(padded, 0), rel=0.01)


def test_which_inputs_are_kept_narrow() -> None:
    run = changed("debug_mla", "mxfp8", {"rows": "quantize", "feed_norm": "quantize", "latent_norm": "quantize"})
    found = {matmul.weight.name for matmul in matmuls(run) if keeps_narrow(matmul, run)}
    assert found == {
        "layers.0.attention.q_up.weight",
        "layers.0.attention.kv_up.weight",
        "layers.1.attention.q_up.weight",
        "layers.1.attention.kv_up.weight",
        "layers.0.feed_forward.gate_up",
        "layers.1.feed_forward.experts.gate_up",
    }
    assert set(QUANTIZED) <= set(get_args(RetainedStep))
