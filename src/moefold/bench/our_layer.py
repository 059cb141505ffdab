"""moefold's own layer, built as the model builds it: router, local dispatcher, experts, shared expert."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from moefold.bench.layer_inputs import Weights
from moefold.bench.layer_shapes import LayerShape
from moefold.bench.runner import Builder, Options
from moefold.bench.timed_layer import Forward, Layer, give
from moefold.blueprint.stage_modules import Parts
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig
from moefold.model.build import Seams, build_decoder, one_process_seams
from moefold.moe.layer import MoELayer
from moefold.moe.moe_kernels import kernels_named
from moefold.nn.batch import whole_batch

# A model's first layer and nothing else of it.
_FIRST_LAYER = Parts(embedding=False, layers=(0,), mtp=(), final_norm=False, mtp_norms=(), loss=False)


def ours(backend: str, kernels: str = "torch") -> Builder:
    """A builder for the layer with this engine for its experts, and these kernels."""
    return partial(_build, backend, kernels)


def _build(backend: str, kernels: str, options: Options) -> Layer:
    return Layer(options, partial(_make, backend, kernels))


def _make(backend: str, kernels: str, shape: LayerShape, weights: Weights) -> tuple[Forward, Sequence[Tensor]]:
    layer = filled_layer(shape, weights, one_process_seams(backend, kernels_named(kernels, "cpu")))
    tokens = torch.zeros(shape.tokens, dtype=torch.int64)
    batch = whole_batch(
        tokens, tokens, (shape.tokens,), step_labels=shape.tokens, step_tokens=shape.tokens, step_sequences=1
    )
    return (lambda x: layer(x, batch, None)[0]), list(layer.parameters())


def filled_layer(shape: LayerShape, weights: Weights, seams: Seams) -> MoELayer:
    """All experts are on this rank."""
    dtype = weights.gate_EDF.dtype
    model = ModelConfig(dim=shape.dim, num_layers=1, moe=moe_config(shape))
    layer = build_decoder(model, dtype, seams, _FIRST_LAYER).layers["0"].feed_forward
    assert isinstance(layer, MoELayer)
    layer.to(dtype).train()
    give(layer.router.weight, weights.router_DE.t())
    give(layer.experts.gate_up, torch.stack((weights.gate_EDF.mT, weights.up_EDF.mT), dim=1))
    give(layer.experts.down, weights.down_EFD.mT)
    if layer.shared is not None and weights.shared is not None:
        give(layer.shared.gate_up, torch.stack((weights.shared.gate_DS.t(), weights.shared.up_DS.t())))
        give(layer.shared.down, weights.shared.down_SD.t())
    return layer


def moe_config(shape: LayerShape) -> MoEConfig:
    return MoEConfig(
        num_experts=shape.experts,
        top_k=shape.top_k,
        expert_hidden_dim=shape.hidden,
        router=RouterConfig(normalize=True),
        shared_hidden_dim=shape.shared,
    )
