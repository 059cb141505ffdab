"""Both upcycling schemes, written out by loops over tokens, experts and hidden units in float64.

He et al. 2024 (arXiv 2410.07524), as the Megatron Core MoE report takes it over in section 7.6. E copies of G shards, T
experts per token. The router's rows are repeated for every shard, so the best T experts are T/G copies of all shards:

    y = sum over the T best of p_e * down_e (silu(gate_e x) * up_e x)       p = softmax over all E * G experts
    gate_e, up_e, down_e = (E * G^2 / T)^(1/3) times the shard of the dense matrix

The loops read the dense weights and the router's rows; nothing else of the mixture.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.body.model_inputs import batch_of, fill
from tests.checkpoint.test_upcycle import InMemory
from torch import Tensor

from moefold.checkpoint.upcycle import Upcycled, Upcycling, upcycled_model
from moefold.config.model import ModelConfig
from moefold.model.build import build_decoder, local_interfaces
from moefold.moe.layer import MoELayer
from moefold.nn.layers import FeedForward

D, F, TOKENS = 6, 12, 5
DENSE = ModelConfig(vocab_size=16, dim=D, num_layers=1, moe=None, dense_hidden_dim=F)
CASES = [
    Upcycling(experts=8, top_k=2, scheme="scaled"),
    Upcycling(experts=4, top_k=2, shards=2, scheme="scaled"),
    Upcycling(experts=12, top_k=6, shards=3, scheme="scaled"),
    Upcycling(experts=8, top_k=2, scheme="exact"),
    Upcycling(experts=8, top_k=4, shards=2, scheme="exact"),
]


def built(how: Upcycling) -> tuple[FeedForward, MoELayer]:
    """The dense feed-forward, and the mixture made of it."""
    dense = build_decoder(DENSE, torch.float64, local_interfaces()).double()
    fill(dense)
    model = upcycled_model(DENSE, how)
    source = Upcycled(InMemory(dict(dense.state_dict())), model, how, seed=3)
    mixture = build_decoder(model, torch.float64, local_interfaces()).double()
    mixture.load_state_dict({name.removeprefix("parameter/"): source.read(name) for name in source.names()})
    before, after = dense.layers["0"].feed_forward, mixture.layers["0"].feed_forward
    assert isinstance(before, FeedForward) and isinstance(after, MoELayer)
    with torch.no_grad():
        after.router.weight.mul_(30)  # probs far from uniform, so that the equation is seen and not its limit
    return before, after


def inputs() -> Tensor:
    x = torch.randn(TOKENS, D, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return x.requires_grad_()


def dot(left: Tensor, right: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(left, right, strict=True):
        total = total + a * b
    return total


def swiglu(units: range, gate_up: Tensor, down: Tensor, scale: tuple[float, float, float], x_D: Tensor) -> Tensor:
    """A shard of the dense feed-forward: the hidden units in ``units``, each matrix times its scale."""
    out = [torch.zeros((), dtype=torch.float64) for _ in range(D)]
    for unit in units:
        gate = scale[0] * dot(gate_up[0, unit], x_D)
        hidden = gate / (1 + torch.exp(-gate)) * (scale[1] * dot(gate_up[1, unit], x_D))
        for d in range(D):
            out[d] = out[d] + scale[2] * down[d, unit] * hidden
    return torch.stack(out)


def written_out(how: Upcycling, dense: FeedForward, rows: Tensor, x_TD: Tensor) -> Tensor:
    """``rows``: the router's, one per copy."""
    E, G, T = how.experts // how.shards, how.shards, how.top_k
    cube = (E * G**2 / T) ** (1 / 3)
    scale = (cube, cube, cube) if how.scheme == "scaled" else (1.0, 1.0, float(G))
    out = []
    for x_D in x_TD:
        logits = {(copy, shard): dot(rows[copy], x_D) for copy in range(E) for shard in range(G)}
        total = sum(torch.exp(logit) for logit in logits.values())
        probs = {expert: torch.exp(logit) / total for expert, logit in logits.items()}
        best = sorted(probs, key=lambda expert: (-probs[expert].item(), expert))[:T]
        assert len({copy for copy, _ in best}) == T // G  # whole copies
        chosen = sum(probs[expert] for expert in best)
        y_D = torch.zeros(D, dtype=torch.float64)
        for copy, shard in best:
            prob = probs[copy, shard] if how.scheme == "scaled" else probs[copy, shard] / chosen
            units = range(shard * F // G, (shard + 1) * F // G)
            y_D = y_D + prob * swiglu(units, dense.gate_up, dense.down, scale, x_D)
        out.append(y_D)
    return torch.stack(out)


@pytest.mark.parametrize("how", CASES, ids=str)
def test_the_mixture_is_the_papers_equation(how: Upcycling) -> None:
    dense, mixture = built(how)
    x_TD, batch = inputs(), batch_of(1, TOKENS, 16)
    rows = mixture.router.weight.detach()[: how.copies].clone()
    want = written_out(how, dense, rows, x_TD)
    got = mixture(x_TD, batch, None)[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    weight = torch.arange(1.0, 1 + want.numel(), dtype=torch.float64).view_as(want)
    (expected,) = torch.autograd.grad((want * weight).sum(), x_TD)
    (found,) = torch.autograd.grad((got * weight).sum(), x_TD)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("how", [how for how in CASES if how.scheme == "scaled"], ids=str)
def test_the_scale_makes_up_for_uniform_probs(how: Upcycling) -> None:
    """T/G whole copies at 1 / (E * G) each, times the product of the three scales, is one dense feed-forward."""
    E, G, T = how.copies, how.shards, how.top_k
    assert math.isclose(T / G / (E * G) * how.gate_up_scale**2 * how.down_scale, 1.0, rel_tol=1e-12)


@pytest.mark.parametrize("how", [how for how in CASES if how.scheme == "scaled"], ids=str)
def test_with_an_untrained_router_the_output_is_close_to_the_dense_models(how: Upcycling) -> None:
    """Small inputs: there silu is linear, and the router is nearly uniform."""
    dense, mixture = built(how)
    with torch.no_grad():
        x_TD, batch = inputs() * 1e-4, batch_of(1, TOKENS, 16)
        units = range(F)
        want = torch.stack([swiglu(units, dense.gate_up, dense.down, (1.0, 1.0, 1.0), x_D) for x_D in x_TD])
        got = mixture(x_TD, batch, None)[0]
    assert (got - want).abs().max() < 2e-3 * want.abs().max()


@pytest.mark.parametrize("how", [how for how in CASES if how.scheme == "exact"], ids=str)
def test_the_exact_scheme_is_the_dense_model(how: Upcycling) -> None:
    dense, mixture = built(how)
    with torch.no_grad():
        x_TD, batch = inputs(), batch_of(1, TOKENS, 16)
        want = torch.stack([swiglu(range(F), dense.gate_up, dense.down, (1.0, 1.0, 1.0), x_D) for x_D in x_TD])
        torch.testing.assert_close(mixture(x_TD, batch, None)[0], want, rtol=1e-12, atol=1e-13)
