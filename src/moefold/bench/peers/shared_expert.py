"""A shared expert of plain linear layers, for libraries that leave it to the model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from moefold.bench.layer_inputs import SharedWeights
from moefold.bench.timed_layer import give


class SharedExpert(nn.Module):
    def __init__(self, weights: SharedWeights) -> None:
        super().__init__()
        self.gate, self.up, self.down = map(_linear, (weights.gate_DS, weights.up_DS, weights.down_SD))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[0], weight.shape[1], bias=False, dtype=weight.dtype)
    give(linear.weight, weight.t())
    return linear
