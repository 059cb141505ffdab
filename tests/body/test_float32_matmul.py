"""16-bit matmuls in float32, for CPUs without 16-bit instructions: the same function, by every backend of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moefold.bench.layer_bench import batch_of, filled_layer
from moefold.bench.layer_workload import LayerShape, draw_input, draw_output_grad, draw_weights
from moefold.checks.kernels import cpu_matmul_in_use
from moefold.config.precision import KernelsConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.model.build import local_interfaces
from moefold.nn.float32_matmul import multiply_in_compute, multiply_in_float32
from moefold.nn.matmul_policy import matmul_policy_named

SHAPE = LayerShape(tokens=64, dim=32, hidden=32, experts=4, top_k=2, shared=32)
NARROW = (torch.bfloat16, torch.float16)


def draw(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("out_dtype", ["same", "float32"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_the_exact_ones_rounded_once(dtype: torch.dtype, out_dtype: str, with_bias: bool) -> None:
    """Against float64: a float32 sum of 48 products of 16-bit numbers errs by far less than one rounding."""
    if with_bias and out_dtype == "float32":
        return
    left, right, bias = draw(24, 48, dtype=dtype), draw(48, 16, seed=1, dtype=dtype), draw(16, seed=2, dtype=dtype)
    out = torch.empty(24, 16, dtype=dtype if out_dtype == "same" else torch.float32)
    multiply_in_float32(left, right, out, bias if with_bias else None)
    exact = left.double() @ right.double() + (bias.double() if with_bias else 0)
    half_a_digit = torch.finfo(dtype).eps / 2 * 1.01
    assert ((out.double() - exact).abs() <= exact.abs() * half_a_digit + 1e-5).all()
    # Rounded to the operands' format also where the output is wider, as a matmul in that format is.
    assert torch.equal(out, out.to(dtype).to(out.dtype))


def test_wide_operands_are_multiplied_as_they_are() -> None:
    left, right = draw(8, 8, dtype=torch.float64), draw(8, 8, seed=1, dtype=torch.float64)
    outs = [torch.empty(8, 8, dtype=torch.float64) for _ in range(2)]
    for multiply, out in zip((multiply_in_compute, multiply_in_float32), outs, strict=True):
        multiply(left, right, out)
    assert torch.equal(*outs)


def test_linear_layers_save_the_narrow_input() -> None:
    weight = torch.nn.Parameter(draw(16, 32, dtype=torch.float32))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    found = {}
    for cpu_matmul in ("compute", "float32"):
        x, weight.grad = draw(24, 32).requires_grad_(), None
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = matmul_policy_named("torch", cpu_matmul=cpu_matmul).linear(x, weight)
        y.backward(draw(24, 16, seed=3))
        assert x.grad is not None and weight.grad is not None
        found[cpu_matmul] = y, x.grad, weight.grad
    assert {tensor.dtype for tensor in saved} == {torch.bfloat16}
    for wide, narrow in zip(found["float32"], found["compute"], strict=True):
        assert wide.dtype == narrow.dtype
        torch.testing.assert_close(wide, narrow, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("backend", ["sequential", "grouped", "fused"])
def test_a_layer_computes_the_same(backend: str) -> None:
    """All four kinds of matmul of a layer: experts', shared expert's, forward and backward."""
    weights, x, dy = draw_weights(SHAPE, torch.bfloat16), draw_input(SHAPE, torch.bfloat16, 0), None
    found: dict[str, list[Tensor]] = {}
    for cpu_matmul in ("compute", "float32"):
        layer = filled_layer(SHAPE, weights, local_interfaces(backend, cpu_matmul=cpu_matmul))
        x, dy = x.detach().requires_grad_(), draw_output_grad(SHAPE, torch.bfloat16)
        y = layer(x, batch_of(SHAPE.tokens), None)[0]
        y.backward(dy)
        grads = [parameter.grad for parameter in layer.parameters()]
        assert x.grad is not None and all(grad is not None for grad in grads)
        found[cpu_matmul] = [y.detach(), x.grad, *[grad for grad in grads if grad is not None]]
    for wide, narrow in zip(found["float32"], found["compute"], strict=True):
        error = (wide.double() - narrow.double()).norm() / narrow.double().norm()
        assert error < 0.01, float(error)


def test_who_multiplies_in_float32() -> None:
    bfloat16 = RunConfig(precision=PrecisionConfig(compute="bfloat16"))
    float16 = RunConfig(precision=PrecisionConfig(compute="float16"))
    without, with_amx, with_fp16 = {"avx2", "avx512f"}, {"avx2", "amx_bf16"}, {"avx512_fp16"}
    assert cpu_matmul_in_use(bfloat16, "cpu", without) == "float32"
    assert cpu_matmul_in_use(bfloat16, "cpu", with_amx) == "compute"
    assert cpu_matmul_in_use(bfloat16, "cpu", {"avx512_bf16"}) == "compute"
    assert cpu_matmul_in_use(float16, "cpu", with_amx) == "float32"
    assert cpu_matmul_in_use(float16, "cpu", with_fp16) == "compute"
    # Nothing is known of the CPU; another format; a GPU.
    assert cpu_matmul_in_use(bfloat16, "cpu", ()) == "compute"
    assert cpu_matmul_in_use(RunConfig(), "cpu", without) == "compute"
    assert cpu_matmul_in_use(bfloat16, "cuda", without) == "compute"
    for named in ("compute", "float32"):
        run = replace(bfloat16, kernels=KernelsConfig(cpu_matmul=named))
        assert {cpu_matmul_in_use(run, "cpu", features) for features in (without, with_amx)} == {named}
