"""The balance statistics, interpreted, against their reference, and that against the balance losses of the model."""

from __future__ import annotations

import random

import pytest
import torch
from tests.marks import slow_except
from torch import Tensor

pytest.importorskip("triton", reason="kernels are an extra")

from tests.body.kernel_cases import counting_bytes, poisoned_memory

from moefold.errors import BackendError
from moefold.moe.kernels import load_balancing_triton as balance_triton
from moefold.moe.kernels import moe_references as balance_torch
from moefold.moe.load_balancing import probabilities
from moefold.ops.kernels.interpret import interpreting


def draw(seed: int) -> tuple[Tensor, Tensor, Tensor | None, int, str]:
    """Logits, assignments, sets in order or mixed up or none, and tokens of no set."""
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    experts, tokens = dice.choice((1, 5, 8, 64, 200)), dice.choice((1, 7, 90, 300))
    logits_tE = 2 * torch.randn(tokens, experts, generator=generator)
    expert_tK = torch.rand(tokens, experts, generator=generator).argsort(1)[:, : dice.randint(1, min(experts, 8))]
    sets = dice.choice((1, 2, 5))
    set_t = None if sets == 1 else torch.randint(-1, sets, (tokens,), generator=generator)
    if set_t is not None and dice.random() < 0.5:
        set_t = set_t.sort().values
    return logits_tE, expert_tK, set_t, sets, dice.choice(("softmax", "sigmoid"))


def run(ops: object, logits_tE: Tensor, *rest: object) -> tuple[Tensor, ...]:
    logits_tE = logits_tE.clone().requires_grad_()
    found = ops.balance_stats(logits_tE, *rest)  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(7)
    grads = [torch.randn(part.shape, generator=generator) for part in found[1:]]
    torch.autograd.backward(found[1:], grads)
    assert logits_tE.grad is not None
    return *found, logits_tE.grad


@pytest.mark.parametrize("seed", slow_except(range(50), *range(4)))
def test_as_the_reference(seed: int) -> None:
    case = draw(seed)
    with interpreting(), poisoned_memory():
        count_QE, probability_QE, z_Q, grad_tE = run(balance_triton, *case)
    wanted = run(balance_torch, *case)
    assert torch.equal(count_QE, wanted[0])
    torch.testing.assert_close(probability_QE, wanted[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(z_Q, wanted[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_tE, wanted[3], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("seed", slow_except(range(0, 50, 10), 0, 10))
def test_as_the_reference_in_bfloat16(seed: int) -> None:
    """Sums are float32 in both; the gradient is rounded once, so it differs by one unit in the last place at most."""
    logits_tE, *rest = draw(seed)
    with interpreting(), poisoned_memory():
        found = run(balance_triton, logits_tE.bfloat16(), *rest)
    wanted = run(balance_torch, logits_tE.bfloat16(), *rest)
    assert found[1].dtype == torch.float32 and found[3].dtype == torch.bfloat16
    for one, other in zip(found[1:3], wanted[1:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[3], wanted[3], rtol=2.0**-7, atol=1e-5)


@pytest.mark.parametrize("kind", ("softmax", "sigmoid"))
def test_the_reference_sums_what_the_balance_loss_needs(kind: str) -> None:
    logits_tE, expert_tK, _, _, _ = draw(1)
    found = balance_torch.balance_stats(logits_tE, expert_tK, None, 1, kind)  # type: ignore[arg-type]
    p_tE = probabilities(logits_tE, kind)  # type: ignore[arg-type]
    torch.testing.assert_close(found.probability_QE[0], p_tE.sum(0))
    assert found.count_QE.sum() == expert_tK.numel()


def test_moves_the_bytes_it_says() -> None:
    """Of the three times that a program's lines are moved, one is the kernel's own."""
    experts, top_k = 256, 3
    tokens = 2 * balance_triton.BLOCK // experts * balance_triton.TILES
    logits_tE = torch.randn(tokens, experts, requires_grad=True)
    expert_tK = torch.rand(tokens, experts).argsort(1)[:, :top_k]
    with counting_bytes() as moved:
        found = balance_triton.balance_stats(logits_tE, expert_tK, torch.zeros_like(expert_tK[:, 0]), 1, "softmax")
    said = tokens * balance_triton.forward_traffic(experts, top_k).moved
    assert moved[0] == said - 2 * 2 * (8 * experts + 4)
    with counting_bytes() as moved:
        found.probability_QE.sum().backward()
    # Gradients of the sums are read once per launch, not per token.
    assert moved[0] - 4 * experts == tokens * balance_triton.backward_traffic(experts).moved


def test_float64_is_refused() -> None:
    with pytest.raises(BackendError, match="float64 use torch"):
        balance_triton.balance_stats(torch.zeros(2, 4).double(), torch.zeros(2, 1).long(), None, 1, "softmax")
