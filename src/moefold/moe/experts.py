"""The experts of this rank: their weights, and the backend that runs rows through them.

The weights are the same whatever the backend. ``GroupedExperts`` runs grouped GEMMs with separate operations between
them, on any device; ``CpuFusedExperts`` does the same work tile by tile, which suits a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moefold.config.moe import MoEConfig
from moefold.moe.dispatch.base import ExpertInput
from moefold.ops.fp32_linear import upcast


class ExpertWeights(NamedTuple):
    """``bias_scale``: what this rank multiplies the output bias by."""

    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    bias_scale: float
    # A and B of gate_up and of down, where the run has adapters, and what their products are multiplied by.
    gate_up_lora: tuple[Tensor | None, Tensor | None] = (None, None)
    down_lora: tuple[Tensor | None, Tensor | None] = (None, None)
    lora_scale: float = 1.0


class ExpertBackend(Protocol):
    def __call__(self, expert_in: ExpertInput, weights: ExpertWeights) -> Tensor:
        """[R, L]: for each row, the sum over its experts here of prob times expert output."""
        ...


# Called once for each MoE layer.
ExpertBackendMaker = Callable[[MoEConfig], ExpertBackend]


class Experts(nn.Module):
    """Built for all experts; the number on this rank and their hidden dim here are read off the weights when it runs.

    Ranks that share a split expert sum their outputs, so ``bias_scale`` is 1 on one of them and 0 on the others.
    """

    gate_up_lora_a: nn.Parameter | None
    gate_up_lora_b: nn.Parameter | None
    down_lora_a: nn.Parameter | None
    down_lora_b: nn.Parameter | None
    lora_scale = 1.0

    def __init__(self, config: MoEConfig, dim: int, backend: ExpertBackend, bias_scale: float = 1.0) -> None:
        super().__init__()
        num_experts, hidden, row_dim = config.num_experts, config.expert_hidden_dim, config.latent_dim or dim
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2, hidden, row_dim))
        self.down = nn.Parameter(torch.empty(num_experts, row_dim, hidden))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2, hidden)) if config.expert_mlp_bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, row_dim)) if config.expert_mlp_bias else None
        for name in ("gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b"):
            self.register_parameter(name, None)
        self.backend = backend
        self.bias_scale = bias_scale

    def forward(self, expert_in: ExpertInput) -> Tensor:
        # Gradients of biases are sums over rows, in float32 also where FSDP gathered 16-bit biases.
        gate_up_bias = None if self.gate_up_bias is None else upcast(self.gate_up_bias)
        down_bias = None if self.down_bias is None else upcast(self.down_bias)
        weights = ExpertWeights(
            self.gate_up,
            self.down,
            gate_up_bias,
            down_bias,
            self.bias_scale,
            (self.gate_up_lora_a, self.gate_up_lora_b),
            (self.down_lora_a, self.down_lora_b),
            self.lora_scale,
        )
        return self.backend(expert_in, weights)
