"""The dense feed-forward against its formula, and shards of its hidden dim against the whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.body.model_inputs import batch_of, fill
from torch import Tensor

from moefold.nn.layers import FeedForward
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.nn.parallel_interfaces import LocalTokens

BATCH = batch_of(1, 5, 11)


def _layer(hidden: int, activation: str = "swiglu") -> FeedForward:
    layer = FeedForward(6, hidden, activation, LocalTokens(), ParameterMatmul()).double()
    fill(layer)
    return layer


def _input() -> Tensor:
    return torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_is_its_formula() -> None:
    layer, x = _layer(7), _input()
    expected = (F.silu(x @ layer.gate_up[0].T) * (x @ layer.gate_up[1].T)) @ layer.down.T
    torch.testing.assert_close(layer(x, BATCH), expected)


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
def test_shards_of_the_hidden_dim_add_up(activation: str) -> None:
    whole, x = _layer(7, activation), _input()
    parts = []
    for mine in (slice(0, 3), slice(3, 7)):
        part = _layer(mine.stop - mine.start, activation)
        with torch.no_grad():
            part.gate_up.copy_(whole.gate_up[:, mine])
            part.down.copy_(whole.down[:, mine])
        parts.append(part(x, BATCH))
    torch.testing.assert_close(parts[0] + parts[1], whole(x, BATCH))
