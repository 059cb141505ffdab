"""The normalising kernels, interpreted, against torch operations."""

from __future__ import annotations

import pytest
import torch
from tests.marks import slow_except

pytest.importorskip("triton", reason="kernels are an extra")

from tests.body.kernel_cases import Case, assert_near, counting_bytes, poisoned_memory, run_kernel, run_reference

from moefold.ops.kernels import rmsnorm_triton as kernel
from moefold.ops.kernels.interpret import interpreting
from moefold.ops.rmsnorm import rms_norm


@pytest.mark.parametrize("seed", slow_except(range(50), *range(12)))
def test_as_the_reference(seed: int) -> None:
    case = Case(seed)
    shape = case.among((1, 1), (5, 8), (40, 7), (3, 4, 128), (9, 300), (2, 1536), (11, 2100), (3, 7168))
    # The weight is rounded to the rows' format before it multiplies; here it has no digits to lose.
    inputs = [case.randn(*shape, spread=case.among(0.01, 1.0, 30.0)), case.randn(shape[-1]).float()]
    eps = case.among(1e-6, 1e-5)
    grads = [case.randn(*shape)]
    found = run_kernel(lambda x, w: kernel.rms_norm(x, w, eps), inputs, grads)
    wanted = run_reference(lambda x, w: rms_norm(x, w, eps), inputs, grads)
    out, dx, dweight = wanted
    assert_near(found[0], out, "out", roundings=2)  # before and after the weight
    # What is left of a gradient after its part along the row is taken away may be little.
    rstd = torch.rsqrt(inputs[0].float().square().mean(-1) + eps)
    assert_near(found[1], dx, "dx", terms=(rstd.max() * grads[0].abs().max() * inputs[1].abs().max()).item())
    assert_near(found[2], dweight, "dweight")
    assert found[2].dtype == torch.float32


def test_in_float16_bit_for_bit() -> None:
    """The interpreter rounds float16 to nearest as torch does: then also the order of the two roundings shows."""
    case = Case(2)
    x, weight = case.randn(6, 96), case.randn(96, dtype=torch.float32)
    with interpreting():
        assert torch.equal(kernel.rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize(("programs", "dim"), [(1, 130), (2, 130), (3, 130), (100, 130), (100, 1100)])
def test_the_weight_gradient_does_not_miss_rows(programs: int, dim: int) -> None:
    """Also where more programs have a sum than the second stage adds up at a time."""
    x, weight, dout = torch.randn(37, dim), torch.randn(dim), torch.randn(37, dim)
    with interpreting(), poisoned_memory():
        _, rstd = kernel.launch_forward(x, weight, 1e-6)
        _, dweight = kernel.launch_backward(dout, x, weight, rstd, programs)
    torch.testing.assert_close(dweight, (dout * x * rstd[:, None]).sum(0), rtol=1e-5, atol=1e-5)


def test_one_number_per_row_is_kept_beside_the_inputs() -> None:
    kept: list[torch.Tensor] = []
    x, weight = torch.randn(5, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    with interpreting(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        kernel.rms_norm(x, weight, 1e-6)
    assert [tuple(tensor.shape) for tensor in kept] == [(5, 64), (64,), (5,)] and kept[2].dtype == torch.float32


@pytest.mark.parametrize(("dim", "heads"), [(96, 6), (1536, 1)])
def test_moves_the_bytes_it_says(dim: int, heads: int) -> None:
    tokens, programs = 5, 2
    x, weight = torch.randn(tokens * heads, dim).bfloat16(), torch.randn(dim)
    with counting_bytes() as moved:
        out, rstd = kernel.launch_forward(x, weight, 1e-6)
    assert moved[0] == pytest.approx(tokens * kernel.forward_traffic(dim, heads, tokens).moved)
    with counting_bytes() as moved:
        kernel.launch_backward(out, x, weight, rstd, programs)
    assert moved[0] == pytest.approx(tokens * kernel.backward_traffic(dim, heads, tokens, programs).moved)


def test_too_wide_a_row_is_named() -> None:
    with pytest.raises(ValueError, match="20000 entries"):
        kernel.rms_norm(torch.empty(1, 20000), torch.empty(20000), 1e-6)
