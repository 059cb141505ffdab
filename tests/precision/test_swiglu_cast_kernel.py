"""SwiGLU and both casts of its output in one pass: the bits of the two kernels one after the other, and in experts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.body.model_inputs import batch_of, fill
from torch import Tensor

pytest.importorskip("triton", reason="kernels are an extra")

import triton
import triton.language as tl
from tests.body.kernel_cases import poisoned_memory
from tests.body.kernel_memory import watching
from tests.precision.cast_draws import assert_same

import moefold
from moefold.config.casts import Cast
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.narrow_modules import narrow_modules
from moefold.moe.experts import Experts
from moefold.ops.activations import weighted_activation_reference
from moefold.ops.kernels import swiglu_triton
from moefold.ops.kernels.interpret import interpreting
from moefold.precision import cast_backends
from moefold.precision.both_directions import BothWays, quantize_both_reference
from moefold.precision.cast_kernels import cast_both_triton, swiglu_cast_triton
from moefold.precision.cast_kernels.swiglu_cast_triton import swiglu_both_triton
from moefold.precision.narrow_inputs import NarrowingActivation, NarrowInputs
from moefold.precision.operands import REFERENCE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def pair(name: str) -> tuple[Cast, Cast]:
    casts = PRECISION_RECIPES[name].casts  # type: ignore[index]
    assert casts.x_fprop is not None and casts.x_wgrad is not None
    return casts.x_fprop, casts.x_wgrad


# ---- the kernel ----


def one_pass(name: str, seed: int) -> None:
    """Output, gradients, codes and scales: those of the kernel without casts, which is held against torch elsewhere."""
    dice, generator, casts = random.Random(seed), torch.Generator().manual_seed(seed), pair(name)
    rows, dim = dice.choice((0, 1, 31, 65, 130)), dice.choice((1, 32, 40, 129))
    gate_up = 3 * torch.randn(rows, 2 * dim, generator=generator)
    gate_up *= torch.exp2(torch.randint(-6, 3, (rows, 1), generator=generator))
    gate_up = gate_up.bfloat16() if seed % 2 else gate_up
    if rows and seed % 5 == 0:
        gate_up[0, 0] = torch.inf
    weight = torch.rand(rows, generator=generator) if seed % 3 else None
    activation, upstream = dice.choice(("swiglu", "clamped_swiglu")), torch.randn(rows, dim, generator=generator)
    found, both, wanted, results = None, None, None, []
    with interpreting(), poisoned_memory():
        for fused in (True, False):
            given = gate_up.clone().requires_grad_()
            prob = None if weight is None else weight.clone().requires_grad_()
            if fused:
                out, both = swiglu_both_triton(given, prob, activation, *casts)
            else:
                out = swiglu_triton.weighted_activation(given, prob, activation) if rows else given[:, :dim] * 1
            if rows:
                out.backward(upstream.to(out.dtype))
            results.append([out.detach(), given.grad, None if prob is None else prob.grad])
    what = f"{activation} {name} {rows} x {dim} {gate_up.dtype}"
    found, wanted = results
    for part, ours, expected in zip(("output", "gradient", "gradient of probs"), found, wanted, strict=True):
        if ours is not None and expected is not None:
            assert_same(ours, expected, f"{part} of {what}")
    assert both is not None
    expected_both = quantize_both_reference(wanted[0], *casts)
    for way, ours, expected in zip(("rowwise", "columnwise"), both, expected_both, strict=True):
        assert_same(ours.codes_MK, expected.codes_MK, f"{way} codes of {what}")
        assert_same(ours.scale_rc, expected.scale_rc, f"{way} scales of {what}")


NAMES = ("mxfp8", "fp8_blockwise")


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_two_kernels(name: str) -> None:
    for seed in (3, 7):
        one_pass(name, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_on_fifty_shapes(name: str) -> None:
    for seed in range(50):
        one_pass(name, seed)


def test_no_races_and_nothing_outside() -> None:
    with watching() as watch:
        swiglu_both_triton(torch.randn(33, 140), torch.rand(33), "swiglu", *pair("mxfp8"))
    assert watch.launches == 1


def test_what_kernels_cannot_do_is_refused() -> None:
    for name in ("nvfp4", "fp8_tensor"):
        with pytest.raises(ValueError, match="scales of one block"):
            swiglu_both_triton(torch.randn(4, 8), None, "swiglu", *pair(name))
    with pytest.raises(ValueError, match="no kernel for the activation 'gelu'"):
        swiglu_both_triton(torch.randn(4, 8), None, "gelu", *pair("mxfp8"))


@triton.jit
def _untransposed(tile, HADAMARD: tl.constexpr):
    return tile


@triton.jit
def _without_up(gate, up, CLAMPED: tl.constexpr):
    return gate * tl.sigmoid(gate), gate, up


@pytest.mark.parametrize(
    ("module", "attribute", "broken"),
    [(cast_both_triton, "along_rows", _untransposed), (swiglu_cast_triton, "activate", _without_up)],
    ids=["wrong direction", "another activation"],
)
def test_broken_kernels_are_caught(module: Any, attribute: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, attribute, broken)
    with pytest.raises(AssertionError, match="differ"):
        one_pass("mxfp8", 7)


# ---- experts ----


def step_of_training(changes: dict[str, object]) -> tuple[list[Tensor], list[object]]:
    """Loss and gradients of a model, and the activations of its experts."""
    settings: dict[str, object] = {
        "precision.recipe": "mxfp8",
        "kernels.casts": "torch",
        "kernels.experts": "grouped",
        "kernels.row_padding": "permute",
        "memory.retain.activation": "quantize",
        "model.num_layers": 2,
    }
    run = moefold.load_run("debug_small", settings | changes)
    assert not moefold.check(run)
    decoder = build_decoder(run.model, torch.float32, local_interfaces("grouped"))
    fill(decoder)
    narrow_modules(decoder, run)
    loss = decoder(batch_of(2, 64, run.model.vocab_size), None).loss_sum
    loss.backward()
    used = [module.backend.activation for module in decoder.modules() if isinstance(module, Experts)]
    return [loss.detach(), *(each.grad for each in decoder.parameters() if each.grad is not None)], used


class InTwoSteps:
    """Counts calls; both casts of the activation in torch."""

    def __init__(self) -> None:
        self.calls, self.casts = 0, 0

    def activate_both(
        self, gate_up: Tensor, prob: Tensor | None, activation: str, row: Cast, column: Cast
    ) -> tuple[Tensor, BothWays]:
        self.calls += 1
        out = weighted_activation_reference(gate_up, prob, activation)
        return out, quantize_both_reference(out.detach(), row, column)

    def quantize_both(self, x: Tensor, row: Cast, column: Cast, *, seed: int = 0) -> BothWays:
        self.casts += 1
        return quantize_both_reference(x, row, column, seed=seed)


def test_experts_have_the_bits_of_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, plain = step_of_training({})
    assert not any(isinstance(each, NarrowingActivation) for each in plain)
    both, one = InTwoSteps(), InTwoSteps()
    monkeypatch.setitem(cast_backends.QUANTIZERS, "torch", REFERENCE._replace(quantize_both=both.quantize_both))
    found, _ = step_of_training({})
    assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))
    fused = REFERENCE._replace(quantize_both=one.quantize_both, activate_both=one.activate_both)
    monkeypatch.setitem(cast_backends.QUANTIZERS, "torch", fused)
    found, used = step_of_training({})
    assert used and all(isinstance(each, NarrowingActivation) for each in used)
    assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))
    # One cast less per MoE layer: the activation has made it.
    assert one.calls == len(used) and one.casts == both.casts - len(used)


@pytest.mark.parametrize(
    "changes",
    [{"kernels.row_padding": "wgrad"}, {"memory.retain.activation": "keep"}, {"precision.recipe": "fp8_blockwise"}],
    ids=str,
)
def test_where_the_activation_stays_alone(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fill no block, an input that is kept wide, blocks that are longer than the alignment."""
    steps = InTwoSteps()
    monkeypatch.setitem(cast_backends.QUANTIZERS, "torch", REFERENCE._replace(activate_both=steps.activate_both))
    _, used = step_of_training(changes)
    assert used and not any(isinstance(each, NarrowingActivation) for each in used) and not steps.calls


def test_a_copy_of_another_tensor_is_not_taken() -> None:
    """Offered copies are those of one tensor as it was; without gradients none is made."""
    cast, steps, inputs = pair("mxfp8")[0], InTwoSteps(), NarrowInputs()
    activation = NarrowingActivation(weighted_activation_reference, steps.activate_both, "swiglu", inputs, (cast, cast))
    gate_up = torch.randn(32, 128)
    out = activation(gate_up, None)
    assert steps.calls == 1 and inputs.rowwise(out, cast) is not None
    out.mul_(2)
    assert inputs.rowwise(out, cast) is None
    kept = inputs.keep(out, cast, [32], REFERENCE.quantize, lambda: quantize_both_reference(out, cast, cast))
    fresh = NarrowInputs().keep(out, cast, [32], REFERENCE.quantize)
    assert all(torch.equal(*each) for each in zip(kept, fresh, strict=True))
    with torch.no_grad():
        assert torch.equal(activation(gate_up, None) * 2, out) and steps.calls == 1
