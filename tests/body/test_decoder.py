"""The whole model on one process: its loss is that of its logits, and every parameter takes part."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.body.model_inputs import batch_of, fill

from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.decoder import Decoder

MODEL = ModelConfig(vocab_size=50, dim=32, num_layers=3, num_dense_layers=1, dense_hidden_dim=48)
EVERYTHING = GQAConfig(qk_norm="full", qkv_bias=True, out_bias=True, sinks=True, window=4, window_every=2)
MODELS = {
    "gqa": replace(MODEL, attention=EVERYTHING, moe=MoEConfig(expert_mlp_bias=True)),
    "mla": replace(MODEL, attention=MLAConfig(), moe=MoEConfig(shared_hidden_dim=24, shared_gate=True, latent_dim=20)),
    "tied": replace(MODEL, tied_embeddings=True),
    "dense": replace(MODEL, moe=None),
}


def _decoder(model: ModelConfig, compute: torch.dtype = torch.float64) -> Decoder:
    decoder = build_decoder(model, compute, local_interfaces("sequential"))
    decoder = decoder.double() if compute == torch.float64 else decoder
    fill(decoder)
    return decoder


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_the_loss_is_that_of_the_logits(model: ModelConfig) -> None:
    decoder, batch = _decoder(model), batch_of(2, 9, 50)
    output = decoder(batch, None)
    logits = decoder.logits(batch)
    expected = F.cross_entropy(logits, batch.labels_S, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(output.loss_sum, expected, rtol=1e-12, atol=1e-12)
    assert len(output.reports) == sum(model.is_moe_layer(layer) for layer in range(model.num_layers))
    assert len(decoder.routers()) == len(output.reports)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_every_parameter_gets_a_gradient(model: ModelConfig) -> None:
    decoder = _decoder(model)
    decoder(batch_of(4, 16, 50), None).loss_sum.backward()
    for name, value in decoder.named_parameters():
        assert value.grad is not None and value.grad.abs().max() > 0, name


def test_earlier_counts_reach_the_moe_layers_in_order() -> None:
    decoder, batch = _decoder(MODEL), batch_of(2, 9, 50)
    seen: list[object] = []
    for router in decoder.routers().values():
        router.register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    earlier_ME = torch.arange(16).view(2, 8)
    decoder(batch, earlier_ME)
    assert [torch.equal(row, earlier_ME[i]) for i, row in enumerate(seen)] == [True, True]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_bfloat16_activations_with_float32_parameters(model: ModelConfig) -> None:
    narrow, wide = _decoder(model, torch.bfloat16), _decoder(model, torch.float32)
    batch = batch_of(2, 9, 50)
    output = narrow(batch, None)
    output.loss_sum.backward()
    assert output.loss_sum.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in narrow.parameters())
    assert narrow.logits(batch).dtype == torch.bfloat16
    torch.testing.assert_close(output.loss_sum, wide(batch, None).loss_sum, rtol=0.1, atol=0)
