"""The routing kernel, interpreted, against its reference: experts exactly, probs and gradients to rounding."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.marks import slow_except
from torch import Tensor

pytest.importorskip("triton", reason="kernels are an extra")

from tests.body.kernel_cases import counting_bytes, poisoned_memory

from moefold.config.moe import RouterConfig
from moefold.errors import BackendError
from moefold.moe.kernels import moe_references as router_torch
from moefold.moe.kernels import router_triton
from moefold.ops.kernels.interpret import interpreting


def draw(seed: int) -> tuple[RouterConfig, int, Tensor, Tensor | None, Tensor]:
    """Router config, top_k, logits, bias, gradient. Groups and experts are mostly not powers of two."""
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    groups, members = dice.choice(((1, 1), (1, 8), (1, 13), (1, 64), (2, 4), (3, 5), (5, 1), (6, 20), (8, 32)))
    top_groups = dice.randint(1, groups)
    top_k = dice.randint(1, min(top_groups * members, 9))
    router = RouterConfig(
        score=dice.choice(("softmax", "sigmoid")),
        score_when=dice.choice(("before_topk", "after_topk")),
        normalize=dice.random() < 0.5,
        scale=dice.choice((1.0, 2.5)),
        num_groups=groups,
        top_groups=top_groups,
        group_score=dice.choice(("max", "topk_sum")),
    )
    tokens = dice.choice((1, 3, 17, 70))
    logits_tE = 2 * torch.randn(tokens, groups * members, generator=generator)
    bias_E = 0.1 * torch.randn(groups * members, generator=generator) if dice.random() < 0.5 else None
    return router, top_k, logits_tE, bias_E, torch.randn(tokens, top_k, generator=generator)


def run(
    ops: object, router: RouterConfig, top_k: int, logits_tE: Tensor, bias_E: Tensor | None, grad_tK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logits_tE = logits_tE.clone().requires_grad_()
    expert_tK, weight_tK = ops.route(logits_tE, bias_E, router, top_k)  # type: ignore[attr-defined]
    weight_tK.backward(grad_tK.to(weight_tK.dtype))
    assert logits_tE.grad is not None
    return expert_tK, weight_tK, logits_tE.grad


@pytest.mark.parametrize("seed", slow_except(range(50), *range(12)))
def test_as_the_reference(seed: int) -> None:
    case = draw(seed)
    with interpreting(), poisoned_memory():
        expert_tK, weight_tK, grad_tE = run(router_triton, *case)
    wanted_tK, wanted_weight_tK, wanted_grad_tE = run(router_torch, *case)
    assert torch.equal(expert_tK, wanted_tK)
    torch.testing.assert_close(weight_tK, wanted_weight_tK, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(grad_tE, wanted_grad_tE, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("seed", slow_except(range(0, 50, 10), 0, 10))
def test_as_the_reference_in_bfloat16(seed: int) -> None:
    """Both compute in float32 and round once, so they differ by one unit in the last place at most."""
    router, top_k, logits_tE, bias_E, grad_tK = draw(seed)
    case = (router, top_k, logits_tE.bfloat16(), bias_E, grad_tK)
    with interpreting(), poisoned_memory():
        expert_tK, weight_tK, grad_tE = run(router_triton, *case)
    wanted_tK, wanted_weight_tK, wanted_grad_tE = run(router_torch, *case)
    assert torch.equal(expert_tK, wanted_tK)
    assert weight_tK.dtype == grad_tE.dtype == torch.bfloat16
    torch.testing.assert_close(weight_tK, wanted_weight_tK, rtol=2.0**-7, atol=1e-6)
    torch.testing.assert_close(grad_tE, wanted_grad_tE, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_ties_go_to_the_lower_number(seed: int) -> None:
    """Few different logits: groups tie with groups and experts with experts."""
    router, top_k, logits_tE, _, grad_tK = draw(seed)
    case = (router, top_k, (logits_tE / 2).round(), None, grad_tK)
    with interpreting(), poisoned_memory():
        expert_tK = run(router_triton, *case)[0]
    assert torch.equal(expert_tK, run(router_torch, *case)[0])


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")
def test_broken_logits_choose_experts_that_exist() -> None:
    """A number past the last expert would send the next kernel outside its memory."""
    logits_tE = torch.full((4, 12), float("nan"))
    router = RouterConfig(num_groups=3, top_groups=2)
    with interpreting(), poisoned_memory():
        expert_tK, _ = router_triton.route(logits_tE, None, router, 2)
    assert ((expert_tK >= 0) & (expert_tK < 12)).all()


@pytest.mark.parametrize("rule", ({"score": "sigmoid"}, {"score_when": "after_topk"}, {"normalize": True}))
def test_moves_the_bytes_it_says(rule: dict[str, Any]) -> None:
    tokens, experts, top_k, router = 5, 12, 3, RouterConfig(**rule)
    logits_tE = torch.randn(tokens, experts, requires_grad=True)
    with counting_bytes() as moved:
        _, weight_tK = router_triton.route(logits_tE, None, router, top_k)
    assert moved[0] == tokens * router_triton.forward_traffic(experts, top_k).moved
    with counting_bytes() as moved:
        weight_tK.backward(torch.ones_like(weight_tK))
    assert moved[0] == tokens * router_triton.backward_traffic(experts, top_k, router).moved


def test_float64_is_refused() -> None:
    with pytest.raises(BackendError, match="float64 use torch"):
        router_triton.route(torch.zeros(2, 4).double(), None, RouterConfig(), 1)
