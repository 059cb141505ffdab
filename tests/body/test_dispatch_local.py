from __future__ import annotations

import pytest
import torch
from tests.support import multiplied
from torch import Tensor

from moefold.moe.dispatch.base import LocalDispatcher, Routing

EXPERTS, WIDTH = 6, 4


def routing_for(num_tokens: int, dropping: bool) -> Routing:
    torch.manual_seed(num_tokens)
    expert = torch.rand(num_tokens, EXPERTS - 1).argsort(1)[:, :2]
    weight = torch.rand(num_tokens, 2, dtype=torch.float64, requires_grad=True)
    return Routing(expert, weight, (torch.rand(num_tokens, 2) < 0.5) if dropping else None)


def through(dispatcher: LocalDispatcher, x: Tensor, routing: Routing) -> Tensor:
    """Experts that multiply by their own number + 1."""
    arrived = dispatcher.dispatch(x, routing)
    assert arrived.rows_per_expert == arrived.rows_per_expert_e.tolist()
    return dispatcher.combine(multiplied(arrived, torch.arange(1.0, EXPERTS + 1, dtype=x.dtype)), arrived.ticket)


def token_by_token(x: Tensor, routing: Routing) -> Tensor:
    kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
    return x * ((routing.experts + 1) * routing.probs * kept).sum(1, keepdim=True)


@pytest.mark.parametrize("capacity", [None, 12], ids=["sorted", "padded"])
@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 11])
def test_there_and_back_equals_token_by_token(capacity: int | None, dropping: bool, num_tokens: int) -> None:
    routing = routing_for(num_tokens, dropping)
    x = torch.randn(num_tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    got, expected = through(LocalDispatcher(EXPERTS, capacity), x, routing), token_by_token(x, routing)
    torch.testing.assert_close(got, expected)
    upstream, inputs = torch.randn_like(got), (x, routing.probs)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_two_microbatches_can_be_under_way() -> None:
    dispatcher = LocalDispatcher(EXPERTS)
    x = [torch.randn(n, WIDTH, dtype=torch.float64) for n in (3, 8)]
    routing = [routing_for(3, False), routing_for(8, True)]
    arrived = [dispatcher.dispatch(*pair) for pair in zip(x, routing, strict=True)]
    factors = torch.arange(1.0, EXPERTS + 1, dtype=torch.float64)
    home = [dispatcher.combine(multiplied(a, factors), a.ticket) for a in arrived]
    for answer, *given in zip(home, x, routing, strict=True):
        torch.testing.assert_close(answer, token_by_token(*given))
