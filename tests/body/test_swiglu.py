from __future__ import annotations

from math import exp

import pytest
import torch

from moefold.ops.activations import (
    ACTIVATIONS,
    clamped_swiglu,
    swiglu,
    swiglu_reference,
    weighted_activation,
    weighted_activation_reference,
)


def test_swiglu_by_its_formula() -> None:
    gate, up = torch.randn(2, 9, dtype=torch.float64)
    expected = [g / (1 + exp(-g)) * u for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
    torch.testing.assert_close(swiglu(gate, up), torch.tensor(expected, dtype=torch.float64))


def test_clamped_swiglu_by_its_formula() -> None:
    gate = torch.tensor([-20.0, -1.0, 0.5, 9.0], dtype=torch.float64)
    up = torch.tensor([3.0, -9.0, 12.0, 0.1], dtype=torch.float64)
    expected = []
    for g, u in zip(gate.tolist(), up.tolist(), strict=True):
        g, u = min(g, 7.0), max(min(u, 7.0), -7.0)
        expected.append(g / (1 + exp(-1.702 * g)) * (u + 1))
    torch.testing.assert_close(clamped_swiglu(gate, up), torch.tensor(expected, dtype=torch.float64))


def test_gradients() -> None:
    for activation in ACTIVATIONS.values():
        gate, up = (3 * torch.randn(7, dtype=torch.float64)).requires_grad_(), torch.randn(7, dtype=torch.float64)
        assert torch.autograd.gradcheck(activation, (gate, up.requires_grad_()))


def test_swiglu_has_the_bits_of_its_reference_and_keeps_its_inputs_only() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        halves = [torch.randn(6, 10).to(dtype).requires_grad_() for _ in range(2)]
        found = []
        for activation in (swiglu, swiglu_reference):
            kept: list[torch.Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
                made = activation(*(half.view_as(half) for half in halves))
            found.append((made, *torch.autograd.grad(made, halves, torch.ones_like(made))))
            assert len(kept) == (2 if activation is swiglu else 3)
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("weighted", [True, False])
def test_the_weighted_activation_has_the_bits_of_its_reference_and_keeps_its_inputs_only(
    name: str, weighted: bool
) -> None:
    for rows, weights in ((torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)):
        gate_up = (5 * torch.randn(6, 20)).to(rows).requires_grad_()
        leaves = (gate_up, torch.rand(6).to(weights).requires_grad_()) if weighted else (gate_up,)
        found = []
        for activation in (weighted_activation, weighted_activation_reference):
            kept: list[torch.Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
                made = activation(gate_up, leaves[1] if weighted else None, name)
            assert made.dtype == rows
            grad = torch.linspace(-1, 1, made.numel()).to(rows).view_as(made)
            found.append((made, *torch.autograd.grad(made, leaves, grad)))
            inputs = {leaf.untyped_storage().data_ptr() for leaf in leaves}
            assert ({tensor.untyped_storage().data_ptr() for tensor in kept} == inputs) is (
                activation is weighted_activation
            )
        assert all(map(torch.equal, *found))
