"""Hugging Face transformers: the mixture of Qwen3-MoE, whose routing is that of Mixtral too.

Its experts come in several implementations: "eager" loops over experts, "grouped_mm" sorts rows and uses torch's
product. Families with a shared expert route or weigh it in their own way, so here a plain one is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from moefold.bench.layer_inputs import Weights
from moefold.bench.layer_shapes import LayerShape
from moefold.bench.peers.shared_expert import SharedExpert
from moefold.bench.runner import Builder
from moefold.bench.timed_layer import Forward, Layer, give


def transformers(implementation: str) -> Builder:
    make = partial(_make, implementation)
    return lambda options: Layer(options, make)


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
    give(module.gate.weight, weights.router_DE.t())
    give(module.experts.gate_up_proj, torch.cat((weights.gate_EDF, weights.up_EDF), dim=2).mT)
    give(module.experts.down_proj, weights.down_EFD.mT)
    if weights.shared is None:
        return (lambda x: module(x.unsqueeze(0)).squeeze(0)), list(module.parameters())
    shared = SharedExpert(weights.shared)
    return (lambda x: module(x.unsqueeze(0)).squeeze(0) + shared(x)), [*module.parameters(), *shared.parameters()]
