"""An MoE layer against its formula, token by token: latent dim, shared expert and gate included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.body.model_inputs import batch_of, fill
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.model.build import build_decoder, local_interfaces
from moefold.moe.layer import MoELayer
from moefold.nn.phase import run_in_order

MIXTURES = {
    "plain": MoEConfig(),
    "shared": MoEConfig(shared_hidden_dim=10),
    "gated": MoEConfig(shared_hidden_dim=10, shared_gate=True),
    "latent": MoEConfig(latent_dim=6),
    "everything": MoEConfig(shared_hidden_dim=10, shared_gate=True, latent_dim=6, weight_at="output"),
}


def _layer(moe: MoEConfig) -> MoELayer:
    model = ModelConfig(dim=12, num_layers=1, moe=moe)
    decoder = build_decoder(model, torch.float64, local_interfaces("sequential")).double()
    layer = decoder.layers["0"].feed_forward
    fill(layer)
    return layer


def _by_token(layer: MoELayer, x_tD: Tensor, top_k: int) -> Tensor:
    return torch.stack([_one_token(layer, x_D, top_k) for x_D in x_tD])


def _one_token(layer: MoELayer, x_D: Tensor, top_k: int) -> Tensor:
    weight_K, expert_K = (layer.router.weight @ x_D).softmax(-1).topk(top_k)
    row_L = x_D if layer.latent_down is None else layer.latent_down.weight @ x_D
    answer_L = torch.zeros_like(row_L)
    for weight, expert in zip(weight_K, expert_K.tolist()):
        answer_L = answer_L + weight * _gated(layer.experts.gate_up[expert], layer.experts.down[expert], row_L)
    answer_D = answer_L if layer.latent_up is None else layer.latent_up.weight @ answer_L
    if layer.shared is None:
        return answer_D
    shared_D = _gated(layer.shared.gate_up, layer.shared.down, x_D)
    return answer_D + (shared_D if layer.shared_gate is None else (layer.shared_gate.weight @ x_D).sigmoid() * shared_D)


def _gated(gate_up_2FD: Tensor, down_DF: Tensor, x_D: Tensor) -> Tensor:
    return down_DF @ (F.silu(gate_up_2FD[0] @ x_D) * (gate_up_2FD[1] @ x_D))


@pytest.mark.parametrize("moe", MIXTURES.values(), ids=MIXTURES.keys())
def test_equals_its_formula(moe: MoEConfig) -> None:
    layer = _layer(moe)
    generator = torch.Generator().manual_seed(4)
    x, grad = (torch.randn(15, 12, dtype=torch.float64, generator=generator) for _ in range(2))
    x.requires_grad_()
    leaves = [x, *layer.parameters()]
    ours, report = layer(x, batch_of(3, 5, 11), None)
    expected = _by_token(layer, x, moe.top_k)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)
    assert report.counts_E.sum() == 15 * moe.top_k and report.dropped == 0
    our_grads, their_grads = (torch.autograd.grad(y, leaves, grad, materialize_grads=True) for y in (ours, expected))
    for a, b in zip(our_grads, their_grads):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("moe", MIXTURES.values(), ids=MIXTURES.keys())
def test_forward_and_phases_give_the_same_bits(moe: MoEConfig) -> None:
    """``forward`` spells the steps out and ``phases`` lists them: same steps, same order, values and gradients."""
    layer, batch = _layer(moe), batch_of(3, 5, 11)
    x = torch.randn(15, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    leaves = [x, *layer.parameters()]
    y, report = layer(x, batch, None)
    y_of_phases, report_of_phases = run_in_order(layer.phases(batch, None), x)
    assert torch.equal(y, y_of_phases) and torch.equal(report.counts_E, report_of_phases.counts_E)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (y, y_of_phases))):
        assert torch.equal(a, b)
