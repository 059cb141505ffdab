"""NeMo Automodel: its MoE module with torch's linear layers and one of its torch backends for the experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from benchmarks.runner import Builder
from benchmarks.timed_layer import Forward, TimedLayer
from moefold.bench.layer_bench import copy_weight
from moefold.bench.layer_workload import LayerShape, Weights

_PARTS = "nemo_automodel.components"


def automodel(experts: str) -> Builder:
    make = partial(_make, experts)
    return lambda options: TimedLayer(options, make)


def _make(experts: str, shape: LayerShape, weights: Weights) -> tuple[Forward, Sequence[Tensor]]:
    backend = import_module(f"{_PARTS}.models.common.utils").BackendConfig(
        attn="sdpa", linear="torch", rms_norm="torch", rope_fusion=False, experts=experts, dispatcher="torch"
    )
    config = import_module(f"{_PARTS}.moe.config").MoEConfig(
        n_routed_experts=shape.experts,
        n_shared_experts=1 if shape.shared else 0,
        n_activated_experts=shape.top_k,
        n_expert_groups=1,
        n_limited_groups=1,
        train_gate=True,
        gate_bias_update_factor=0.0,
        aux_loss_coeff=0.0,
        score_func="softmax",
        route_scale=1.0,
        dim=shape.dim,
        inter_dim=shape.hidden,
        moe_inter_dim=shape.hidden,
        norm_topk_prob=True,
        softmax_before_topk=True,
        dtype=weights.gate_EDF.dtype,
        shared_expert_inter_dim=shape.shared or None,
    )
    module = import_module(f"{_PARTS}.moe.layers").MoE(config, backend).to(weights.gate_EDF.dtype).train()
    copy_weight(module.gate.weight, weights.router_DE.t())
    copy_weight(module.experts.gate_and_up_projs, torch.cat((weights.gate_EDF, weights.up_EDF), dim=2))
    copy_weight(module.experts.down_projs, weights.down_EFD)
    if weights.shared is not None:
        copy_weight(module.shared_experts.gate_proj.weight, weights.shared.gate_DS.t())
        copy_weight(module.shared_experts.up_proj.weight, weights.shared.up_DS.t())
        copy_weight(module.shared_experts.down_proj.weight, weights.shared.down_SD.t())
    return (lambda x: module(x.unsqueeze(0)).squeeze(0)), list(module.parameters())
