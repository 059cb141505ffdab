"""A block's forward is its phases, and two microbatches can take turns phase by phase."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.body.model_inputs import batch_of, fill
from torch import Tensor

from moefold.config.attention import MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.model.block import Block, BlockOutput
from moefold.model.build import build_decoder, local_interfaces
from moefold.nn.phase import Stream

MOE = MoEConfig(shared_hidden_dim=24, shared_gate=True, latent_dim=20)
MODEL = ModelConfig(dim=32, num_layers=2, num_dense_layers=1, dense_hidden_dim=48, moe=MOE)
MODELS = {"gqa": MODEL, "mla": replace(MODEL, attention=MLAConfig(), moe=MoEConfig())}


def _blocks(model: ModelConfig) -> list[Block]:
    decoder = build_decoder(model, torch.float64, local_interfaces("sequential")).double()
    fill(decoder)
    return list(decoder.layers.values())


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(14, 32, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2)]


def test_names_and_streams() -> None:
    dense, moe = _blocks(MODEL)
    batch = batch_of(2, 7, 11)
    assert [(p.name, p.stream) for p in dense.phases(batch)] == [
        ("attention", Stream.COMPUTE),
        ("feed_forward", Stream.COMPUTE),
    ]
    assert [(p.name, p.stream) for p in moe.phases(batch)] == [
        ("attention", Stream.COMPUTE),
        ("route", Stream.COMPUTE),
        ("dispatch_counts", Stream.COMM),
        ("dispatch_prepare", Stream.COMPUTE),
        ("dispatch_exchange", Stream.COMM),
        ("dispatch_finish", Stream.COMPUTE),
        ("experts", Stream.COMPUTE),
        ("combine_prepare", Stream.COMPUTE),
        ("combine_exchange", Stream.COMM),
        ("combine_finish", Stream.COMPUTE),
        ("output", Stream.COMPUTE),
    ]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("layer", [0, 1])
def test_interleaved_equals_one_after_the_other(model: ModelConfig, layer: int) -> None:
    block = _blocks(model)[layer]
    batches = [batch_of(2, 7, 11, seed=seed) for seed in (1, 2)]
    apart = _inputs()
    in_order = [block(x, batch) for x, batch in zip(apart, batches)]
    expected = _gradients(block, apart, in_order)

    together = _inputs()
    carries: list[object] = list(together)
    for phases in zip(*(block.phases(batch) for batch in batches)):
        carries = [phase.run(carry) for phase, carry in zip(phases, carries)]

    for got, want in zip(carries, in_order):
        assert isinstance(got, BlockOutput)
        assert torch.equal(got.x_tD, want.x_tD)
    for name, got in _gradients(block, together, carries).items():
        assert torch.equal(got, expected[name]), name


def _gradients(block: Block, inputs: list[Tensor], outputs: list[BlockOutput]) -> dict[str, Tensor]:
    leaves = {**dict(block.named_parameters()), "first": inputs[0], "second": inputs[1]}
    total = outputs[0].x_tD.square().sum() + 3 * outputs[1].x_tD.square().sum()
    grads = torch.autograd.grad(total, list(leaves.values()))
    return dict(zip(leaves, grads))


def test_the_residual_passes_through() -> None:
    """With a silent feed-forward and silent attention, a block hands its input on."""
    for block in _blocks(MODEL):
        with torch.no_grad():
            for name, value in block.named_parameters():
                if name.endswith(("out.weight", "down", "latent_up.weight")):
                    value.zero_()
        x = _inputs()[0]
        assert torch.equal(block(x, batch_of(2, 7, 11)).x_tD, x)
