"""The kernels of the weighted gate, interpreted, against torch operations."""

from __future__ import annotations

import pytest
import torch
from tests.marks import slow_except

pytest.importorskip("triton", reason="kernels are an extra")

from tests.body.kernel_cases import Case, assert_near, counting_bytes, poisoned_memory, run_kernel, run_reference

from moefold.ops.activations import weighted_activation as weighted_activation_reference
from moefold.ops.kernels import swiglu_triton as kernel
from moefold.ops.kernels.interpret import interpreting
from moefold.ops.kernels.swiglu_triton import weighted_activation


def draw(seed: int) -> tuple[Case, str, list[torch.Tensor | None], torch.Tensor]:
    """Wide entries: a clamp that nothing reaches would not be tested."""
    case = Case(seed)
    rows, dim = case.among(1, 2, 5), case.among(1, 8, 100, 256, 768, 1100)
    gate_up = case.randn(rows, 2 * dim, spread=5.0)
    weight = case.randn(rows, dtype=torch.float32) if case.among(True, True, False) else None
    return case, case.among("swiglu", "clamped_swiglu"), [gate_up, weight], case.randn(rows, dim)


@pytest.mark.parametrize("seed", slow_except(range(50), *range(12)))
def test_as_the_reference(seed: int) -> None:
    _, activation, inputs, grad = draw(seed)
    found = run_kernel(lambda *x: weighted_activation(*x, activation), inputs, [grad])
    wanted = run_reference(lambda *x: weighted_activation_reference(*x, activation), inputs, [grad])
    for name, ours, reference in zip(("out", "d gate_up", "d weight"), found, wanted, strict=False):
        assert_near(ours, reference, name)
    assert len(found) == len(wanted) and (len(found) == 2 or found[2].dtype == torch.float32)


@pytest.mark.parametrize("seed", range(0, 50, 7))
def test_backward_gives_the_forwards_output_again_bit_for_bit(seed: int) -> None:
    _, activation, (gate_up, weight), grad = draw(seed)
    assert gate_up is not None
    with interpreting(), poisoned_memory():
        out = kernel.launch_forward(gate_up, weight, activation)
        *_, again = kernel.launch_backward(grad, gate_up, weight, activation, recompute=True)
    assert again is not None and torch.equal(out, again)


def test_only_the_input_is_kept() -> None:
    kept: list[torch.Tensor] = []
    gate_up, weight = torch.randn(3, 16, requires_grad=True), torch.rand(3, requires_grad=True)
    with interpreting(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        weighted_activation(gate_up, weight)
    assert [tensor.data_ptr() for tensor in kept] == [gate_up.data_ptr(), weight.data_ptr()]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dim", [96, 512, 1280])
def test_moves_the_bytes_it_says(dim: int, weighted: bool) -> None:
    tokens, top_k = 3, 2
    gate_up, weight = torch.randn(tokens * top_k, 2 * dim).bfloat16(), torch.rand(tokens * top_k)
    with counting_bytes() as moved:
        out = kernel.launch_forward(gate_up, weight if weighted else None, "swiglu")
    assert moved[0] == tokens * kernel.forward_traffic(dim, top_k, weighted).moved
    with counting_bytes() as moved:
        kernel.launch_backward(out, gate_up, weight if weighted else None, "swiglu", recompute=weighted)
    assert moved[0] == tokens * kernel.backward_traffic(dim, top_k, weighted).moved


def test_no_rows_and_no_such_activation() -> None:
    with interpreting():
        assert weighted_activation(torch.empty(0, 8), torch.empty(0)).shape == (0, 4)
        with pytest.raises(ValueError, match="there is swiglu, clamped_swiglu"):
            weighted_activation(torch.empty(1, 8), None, "gelu")
