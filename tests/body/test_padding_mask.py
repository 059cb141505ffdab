"""Pads are computed and change nothing: a padded batch gives what its documents give without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.body.model_inputs import fill
from torch import Tensor

from moefold.config.attention import GQAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.decoder import Decoder
from moefold.nn.batch import IGNORED, Batch, whole_batch

LENGTHS, SLOT, VOCAB = (5, 12, 1, 9), 12, 50
BALANCE = BalanceConfig(microbatch=0.1, sequence=0.2, global_batch=0.3, device=0.4, device_groups=4, z=0.5)
MOE = MoEConfig(shared_hidden_dim=16, balance=BALANCE)
MODEL = ModelConfig(
    vocab_size=VOCAB,
    dim=32,
    num_layers=2,
    num_dense_layers=1,
    dense_hidden_dim=48,
    moe=MOE,
    attention=GQAConfig(window=4),
)
CAPACITY = CapacityConfig(factor=0.7)
MIXTURES = {
    "dropless": MOE,
    "sigmoid": replace(MOE, router=RouterConfig(score="sigmoid", normalize=True)),
    "capacity": replace(MOE, capacity=CAPACITY),
    "by position": replace(MOE, capacity=replace(CAPACITY, drop="position")),
    "local": replace(MOE, capacity=replace(CAPACITY, scope="local")),
    "sinkhorn": replace(MOE, router=RouterConfig(kind="sinkhorn"), capacity=CAPACITY),
    "expert choice": replace(MOE, router=RouterConfig(kind="expert_choice")),
}


def documents() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    streams = [torch.randint(VOCAB, (length + 1,), generator=generator) for length in LENGTHS]
    return [(stream[:-1], stream[1:]) for stream in streams]


def packed(num_ahead: int = 0) -> Batch:
    tokens, labels = (torch.cat(parts) for parts in zip(*documents()))
    total = sum(LENGTHS)
    return whole_batch(
        tokens, labels, LENGTHS, step_labels=total, step_tokens=total, step_sequences=len(LENGTHS), num_ahead=num_ahead
    )


def padded(pad: int = 0, num_ahead: int = 0) -> Batch:
    total, slots = sum(LENGTHS), (SLOT,) * len(LENGTHS)
    filled = [
        (torch.full((SLOT,), pad), torch.full((SLOT,), IGNORED), torch.zeros(SLOT, dtype=torch.bool)) for _ in LENGTHS
    ]
    for (tokens, labels, real), (given_tokens, given_labels), length in zip(filled, documents(), LENGTHS):
        tokens[:length], labels[:length], real[:length] = given_tokens, given_labels, True
    tokens, labels, real = (torch.cat(parts) for parts in zip(*filled))
    return whole_batch(
        tokens,
        labels,
        slots,
        step_labels=total,
        step_tokens=total,
        step_sequences=len(LENGTHS),
        real_T=real,
        num_ahead=num_ahead,
    )


def decoder(model: ModelConfig) -> Decoder:
    built = build_decoder(model, torch.float64, local_interfaces()).double()
    fill(built)
    return built


def outcome(built: Decoder, batch: Batch, earlier: Tensor | None = None) -> dict[str, Any]:
    """The loss, everything that the routers report, and every gradient."""
    built.zero_grad()
    output = built(batch, earlier)
    assert output.loss_sum is not None
    losses = {f"{row} {name}": value for row, r in output.reports for name, value in r.losses._asdict().items()}
    objective = output.loss_sum / batch.step_labels + sum(losses.values())
    objective = objective + sum(output.ahead_loss_sums)
    objective.backward()
    reports = {f"{row} counts": r.counts_E for row, r in output.reports}
    reports |= {f"{row} dropped": r.dropped for row, r in output.reports}
    gradients = {name: value.grad for name, value in built.named_parameters()}
    return {"loss": output.loss_sum, **losses, **reports, **gradients}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("moe", MIXTURES.values(), ids=MIXTURES.keys())
def test_padded_documents_give_what_packed_ones_give(moe: MoEConfig) -> None:
    built = decoder(replace(MODEL, moe=moe))
    earlier = torch.arange(MOE.num_experts)[None]
    expected = outcome(built, packed(), earlier)
    assert_same(outcome(built, padded(), earlier), expected)
    if moe.router.kind == "topk":
        assert int(expected["0 counts"].sum()) == sum(LENGTHS) * moe.top_k
    if moe.capacity is not None:
        assert expected["0 dropped"] > 0


def test_what_stands_in_a_pad_does_not_matter() -> None:
    built = decoder(MODEL)
    assert_same(outcome(built, padded(pad=17)), outcome(built, padded(pad=0)))


def test_modules_that_look_ahead_see_no_pads() -> None:
    built = decoder(replace(MODEL, num_mtp=2))
    assert_same(outcome(built, padded(num_ahead=2)), outcome(built, packed(num_ahead=2)))


def test_pads_that_are_not_marked_are_noticed() -> None:
    built = decoder(MODEL)
    unmarked = replace(padded(), real_S=None)
    found, expected = outcome(built, unmarked), outcome(built, packed())
    torch.testing.assert_close(found["loss"], expected["loss"])
    assert not torch.equal(found["0 counts"], expected["0 counts"])
    assert not torch.allclose(found["0 z"], expected["0 z"])
