"""An upcycled MoE model computes what its dense model computes, before its first step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.body.model_inputs import batch_of, fill
from torch import Tensor

from moefold.checkpoint.tensor_spec import Box
from moefold.checkpoint.upcycle import Upcycled, Upcycling, upcycled_model
from moefold.config.model import ModelConfig
from moefold.errors import ConversionError
from moefold.model.build import build_decoder, local_interfaces

DENSE = ModelConfig(vocab_size=64, dim=32, num_layers=2, moe=None, dense_hidden_dim=48)


class InMemory:
    """A state dict as a source."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = {f"parameter/{name}": value for name, value in state.items()}

    def names(self) -> list[str]:
        return list(self.state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.state[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.state[name].dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        return self.state[name] if box is None else self.state[name][box]


def both_logits(how: Upcycling) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    dense = build_decoder(DENSE, torch.float64, local_interfaces("sequential")).double()
    fill(dense)
    model = upcycled_model(DENSE, how)
    source = Upcycled(InMemory(dict(dense.state_dict())), model, how, seed=3)
    state = {name.removeprefix("parameter/"): source.read(name) for name in source.names()}
    moe_model = build_decoder(model, torch.float64, local_interfaces("sequential")).double()
    moe_model.load_state_dict(state)
    batch = batch_of(2, 19, DENSE.vocab_size)
    with torch.no_grad():
        return dense.logits(batch), moe_model.logits(batch), state


@pytest.mark.parametrize(
    "how",
    [
        Upcycling(experts=8, top_k=2),
        Upcycling(experts=3, top_k=1),
        Upcycling(experts=4, top_k=2, shards=2),
        Upcycling(experts=16, top_k=8, shards=4),
        Upcycling(experts=9, top_k=3, shards=3),
    ],
    ids=str,
)
def test_the_first_output_is_the_dense_models(how: Upcycling) -> None:
    expected, found, state = both_logits(how)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    router = state["layers.0.feed_forward.router.weight"]
    assert torch.equal(router[: how.copies], router[-how.copies :]) and router.std() > 0
    assert not torch.equal(router, state["layers.1.feed_forward.router.weight"])


def test_shards_that_are_not_chosen_together_would_show() -> None:
    """With rows of its own for every shard, some token would choose half of one copy and half of another twice over."""
    how = Upcycling(experts=4, top_k=2, shards=2)
    expected, _, state = both_logits(how)
    for layer in range(DENSE.num_layers):
        state[f"layers.{layer}.feed_forward.router.weight"] = torch.randn(4, DENSE.dim, dtype=torch.float64)
    moe_model = build_decoder(upcycled_model(DENSE, how), torch.float64, local_interfaces()).double()
    moe_model.load_state_dict(state)
    with torch.no_grad():
        found = moe_model.logits(batch_of(2, 19, DENSE.vocab_size))
    assert (found - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("how", "path"),
    [
        (Upcycling(experts=5, top_k=2, shards=2), "experts"),
        (Upcycling(experts=4, top_k=1, shards=2), "top_k"),
        (Upcycling(experts=10, top_k=5, shards=5), "shards"),
        (Upcycling(experts=4, top_k=8), "experts"),
        (Upcycling(experts=0, top_k=0), "experts"),
    ],
    ids=str,
)
def test_what_would_not_equal_is_refused(how: Upcycling, path: str) -> None:
    with pytest.raises(ConversionError) as caught:
        upcycled_model(DENSE, how)
    assert caught.value.path == path


def test_an_moe_model_is_not_upcycled_again() -> None:
    with pytest.raises(ConversionError, match="already"):
        upcycled_model(replace(DENSE, moe=ModelConfig().moe), Upcycling(experts=4, top_k=2))
