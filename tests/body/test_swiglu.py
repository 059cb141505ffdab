from __future__ import annotations

from math import exp

import torch

from moefold.ops.swiglu import ACTIVATIONS, clamped_swiglu, swiglu


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
