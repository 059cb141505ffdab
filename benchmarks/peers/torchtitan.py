"""torchtitan: its MoE module with grouped experts and the local token dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from benchmarks.runner import Options
from benchmarks.timed_layer import Forward, TimedLayer
from moefold.bench.layer_bench import copy_weight
from moefold.bench.layer_workload import LayerShape, Weights

_PARTS = "torchtitan.models.common"


def torchtitan(options: Options) -> TimedLayer:
    return TimedLayer(options, _make)


def _make(shape: LayerShape, weights: Weights) -> tuple[Forward, Sequence[Tensor]]:
    module = _config(shape).build().to(weights.gate_EDF.dtype).train()
    experts = module.routed_experts.inner_experts
    copy_weight(module.router.gate.weight, weights.router_DE.t())
    copy_weight(experts.w1_EFD, weights.gate_EDF.mT)
    copy_weight(experts.w3_EFD, weights.up_EDF.mT)
    copy_weight(experts.w2_EDF, weights.down_EFD.mT)
    if weights.shared is not None:
        copy_weight(module.shared_experts.w1.weight, weights.shared.gate_DS.t())
        copy_weight(module.shared_experts.w3.weight, weights.shared.up_DS.t())
        copy_weight(module.shared_experts.w2.weight, weights.shared.down_SD.t())
    return (lambda x: module(x.unsqueeze(0)).squeeze(0)), list(module.parameters())


def _config(shape: LayerShape) -> Any:
    moe, dispatcher = import_module(f"{_PARTS}.moe"), import_module(f"{_PARTS}.token_dispatcher")
    linear = import_module(f"{_PARTS}.linear").Linear.Config
    feed_forward = import_module(f"{_PARTS}.feed_forward").FeedForward.Config
    into = {"in_features": shape.dim, "out_features": shape.shared}
    back = {"in_features": shape.shared, "out_features": shape.dim}
    return moe.MoE.Config(
        num_experts=shape.experts,
        load_balance_coeff=None,
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=moe.GroupedExperts.Config(dim=shape.dim, hidden_dim=shape.hidden, num_experts=shape.experts),
            token_dispatcher=dispatcher.LocalTokenDispatcher.Config(num_experts=shape.experts, top_k=shape.top_k),
        ),
        router=moe.TokenChoiceTopKRouter.Config(
            num_experts=shape.experts,
            gate=linear(in_features=shape.dim, out_features=shape.experts),
            top_k=shape.top_k,
            score_func="softmax",
            route_norm=True,
        ),
        shared_experts=feed_forward(w1=linear(**into), w2=linear(**back), w3=linear(**into)) if shape.shared else None,
    )
