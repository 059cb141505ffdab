"""The experts of this rank: their weights, and the engine that runs rows through them.

S source rows here, e experts of this rank, L width of a row (the model's, or the latent one), F hidden width.

The weights are the same whatever computes them. ``GroupedExperts`` is a few products and the operations between them,
on any device; ``CpuFusedExperts`` does the same work expert by expert, as a CPU likes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moefold.config.moe import MoEConfig
from moefold.moe.dispatch.base import Arrived


class ExpertWeights(NamedTuple):
    """``bias_scale`` is this rank's part of the output bias."""

    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    bias_scale: float


class ExpertBackend(Protocol):
    def __call__(self, arrived: Arrived, weights: ExpertWeights) -> Tensor:
        """[S, L]: for each row, the answers of its experts here, times their weights, added up."""
        ...


# Made once for each mixture, from its sizes.
ExpertBackendMaker = Callable[[MoEConfig], ExpertBackend]


class Experts(nn.Module):
    """Built for all experts; how many are here, and how wide their share is, is read off the weights when it runs.

    Ranks that split an expert add their outputs up, so the bias must be whole on one of them and 0 on the others: that
    is ``bias_scale``.
    """

    def __init__(self, config: MoEConfig, dim: int, engine: ExpertBackend, bias_scale: float = 1.0) -> None:
        super().__init__()
        num_experts, hidden, row_dim = config.num_experts, config.expert_hidden_dim, config.latent_dim or dim
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2, hidden, row_dim))
        self.down = nn.Parameter(torch.empty(num_experts, row_dim, hidden))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2, hidden)) if config.expert_mlp_bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, row_dim)) if config.expert_mlp_bias else None
        self.engine = engine
        self.bias_scale = bias_scale

    def forward(self, arrived: Arrived) -> Tensor:
        weights = ExpertWeights(self.gate_up, self.down, self.gate_up_bias, self.down_bias, self.bias_scale)
        return self.engine(arrived, weights)
