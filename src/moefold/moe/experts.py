"""The experts of this rank: their weights, and the backend that runs rows through them.

The weights are the same whatever the backend. ``GroupedExperts`` runs grouped GEMMs with separate operations between
them, on any device; ``CpuFusedExperts`` does the same work tile by tile, which suits a CPU's cache.

Clones of experts of other ranks (ECHO) are computed by the same backend, after this rank's own experts and apart from
them: no copy joins their weights with the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moefold.config.moe import MoEConfig
from moefold.moe.dispatch.base import CloneWeights, ExpertInput, Routing
from moefold.ops.fp32_linear import upcast


class ExpertWeights(NamedTuple):
    """``bias_scale``: what this rank multiplies the output bias by. Matrices are parameters, or those of clones."""

    gate_up: Tensor
    down: Tensor
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
        if expert_in.clones is None:
            return self.backend(expert_in, weights)
        clones = clone_weights(expert_in.clones, weights, expert_in.rows_RL.dtype)
        own, cloned = split_clones(expert_in, self.gate_up.shape[0])
        out_own, out_cloned = self.backend(own, weights), self.backend(cloned, clones)
        return torch.cat([out_own, out_cloned]) if expert_in.by_expert else out_own + out_cloned


def clone_weights(clones: CloneWeights, weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """The weights of all clones on this rank: matrices in the dtype of rows, biases in their own."""
    adapters = (*weights.gate_up_lora, *weights.down_lora)
    matrices = iter(clones([each for each in (weights.gate_up, weights.down, *adapters) if each is not None], dtype))
    gate_up, down = next(matrices), next(matrices)
    a, b, c, d = (None if each is None else next(matrices) for each in adapters)
    gate_up_bias = down_bias = None
    if weights.gate_up_bias is not None and weights.down_bias is not None:
        biases = weights.gate_up_bias, weights.down_bias
        gate_up_bias, down_bias = clones(biases, weights.down_bias.dtype)
    return ExpertWeights(gate_up, down, gate_up_bias, down_bias, weights.bias_scale, (a, b), (c, d), weights.lora_scale)


def split_clones(expert_in: ExpertInput, num_own: int) -> tuple[ExpertInput, ExpertInput]:
    """What this rank's own experts compute, and what the clones do, which are numbered behind them."""
    rows, counts_e, counts = expert_in.rows_RL, expert_in.rows_per_expert_e, expert_in.host_rows
    experts, probs, kept, _ = expert_in.assignments
    own = expert_in._replace(rows_per_expert_e=counts_e[:num_own], rows_per_expert=counts[:num_own], clones=None)
    cloned = own._replace(rows_per_expert_e=counts_e[num_own:], rows_per_expert=counts[num_own:])
    if expert_in.by_expert:
        # Split and not sliced: the gradient is one copy then, and no sum of two with zeros.
        sizes = [sum(own.host_rows), sum(cloned.host_rows)]
        parts = (each.split(sizes) for each in (rows, experts, probs))
        (own_rows, clone_rows), (own_experts, clone_experts), (own_probs, clone_probs) = parts
        return (
            own._replace(rows_RL=own_rows, assignments=Routing(own_experts, own_probs)),
            cloned._replace(rows_RL=clone_rows, assignments=Routing(clone_experts - num_own, clone_probs)),
        )
    is_own = experts < num_own
    own_kept, clone_kept = (is_own, ~is_own) if kept is None else (is_own & kept, ~is_own & kept)
    return (
        own._replace(assignments=Routing(experts, probs, own_kept)),
        cloned._replace(assignments=Routing(experts - num_own, probs, clone_kept)),
    )
