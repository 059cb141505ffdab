"""Hugging Face transformers: the MoE block of Qwen3-MoE, whose routing is Mixtral's too.

Its experts have several implementations: "eager" loops over experts, "grouped_mm" permutes rows and uses torch's
grouped matmul. Model families with a shared expert gate it in their own way, so a plain one is added here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.runner import Builder
from benchmarks.timed_layer import Forward, TimedLayer
from moefold.bench.layer_bench import copy_weight
from moefold.bench.layer_workload import LayerShape, SharedWeights, Weights


def transformers(implementation: str) -> Builder:
    make = partial(_make, implementation)
    return lambda options: TimedLayer(options, make)


def _make(implementation: str, shape: LayerShape, weights: Weights) -> tuple[Forward, Sequence[Tensor]]:
    family = import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = family.Qwen3MoeConfig(
        hidden_size=shape.dim,
        num_attention_heads=4,
        num_hidden_layers=1,
        moe_intermediate_size=shape.hidden,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = implementation
    module = family.Qwen3MoeSparseMoeBlock(config).to(weights.gate_EDF.dtype).train()
    copy_weight(module.gate.weight, weights.router_DE.t())
    copy_weight(module.experts.gate_up_proj, torch.cat((weights.gate_EDF, weights.up_EDF), dim=2).mT)
    copy_weight(module.experts.down_proj, weights.down_EFD.mT)
    if weights.shared is None:
        return (lambda x: module(x.unsqueeze(0)).squeeze(0)), list(module.parameters())
    shared = SharedExpert(weights.shared)
    return (lambda x: module(x.unsqueeze(0)).squeeze(0) + shared(x)), [*module.parameters(), *shared.parameters()]


class SharedExpert(nn.Module):
    def __init__(self, weights: SharedWeights) -> None:
        super().__init__()
        self.gate, self.up, self.down = map(_linear, (weights.gate_DS, weights.up_DS, weights.down_SD))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[0], weight.shape[1], bias=False, dtype=weight.dtype)
    copy_weight(linear.weight, weight.t())
    return linear
