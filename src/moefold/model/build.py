"""From a model's sizes to its modules, with whatever seams they are to have.

Parameters are made on torch's current default device and are not filled: on the meta device, building the largest model
takes no memory and little time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moefold.attention.core import AttentionCore, LocalCore
from moefold.attention.gqa import GroupedQueryAttention
from moefold.attention.mla import LatentAttention
from moefold.blueprint.parameters import moe_block_names
from moefold.blueprint.stage_modules import Parts, parts_of, whole_model
from moefold.config.attention import GQAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.model.block import Block
from moefold.model.decoder import Decoder
from moefold.model.mtp import MTPModule
from moefold.moe.dispatch.base import Dispatcher
from moefold.moe.dispatch.local import LocalDispatcher
from moefold.moe.expert_backends import expert_backend
from moefold.moe.experts import ExpertBackendMaker, Experts
from moefold.moe.layer import MoELayer
from moefold.moe.moe_kernels import MOE_IN_TORCH, MoEKernels
from moefold.moe.router import Router
from moefold.moe.routing_policies import RoutingPolicy
from moefold.nn.layers import FeedForward, Linear, RMSNorm
from moefold.nn.matmul_policy import MatmulPolicy, NativeMatmul
from moefold.nn.parallel_interfaces import LocalTokens, LocalVocab, TokenSharding, VocabSharding
from moefold.nn.vocab import Embedding, LanguageLoss


@dataclass(frozen=True)
class Seams:
    """Where the model meets other ranks."""

    tokens: TokenSharding
    vocab: VocabSharding
    dispatcher: Callable[[MoEConfig], Dispatcher]
    products: MatmulPolicy
    experts: ExpertBackendMaker
    # How much of an expert's output bias this rank adds, when several ranks' parts of the expert are summed.
    bias_scale: float = 1.0
    core: AttentionCore = field(default_factory=LocalCore)
    # Asked once per mixture, in layer order, so that recorded choices can be played back.
    # None is the one that the config names.
    routing_policy: Callable[[MoEConfig], RoutingPolicy] | None = None
    # How the steps between products are carried out.
    kernels: MoEKernels = MOE_IN_TORCH
    # Phases that keep their input only and are computed again in the backward pass.
    recompute: frozenset[str] = frozenset()


def one_process_seams(experts_backend: str = "sequential", kernels: MoEKernels = MOE_IN_TORCH) -> Seams:
    products = NativeMatmul()
    return Seams(
        LocalTokens(),
        LocalVocab(),
        lambda moe: LocalDispatcher(moe.num_experts),
        products,
        expert_backend(experts_backend, products, kernels=kernels),
        kernels=kernels,
    )


def build_decoder(model: ModelConfig, compute: torch.dtype, seams: Seams, parts: Parts | None = None) -> Decoder:
    """The whole model, or those parts of it."""
    whole = whole_model(model)
    parts = parts_of([whole], model) if parts is None else parts
    return Decoder(
        whole,
        embedding=Embedding(model.vocab_size, model.dim, compute, seams.tokens, seams.vocab)
        if parts.embedding
        else None,
        layers={layer: _block(model, layer, seams) for layer in parts.layers},
        mtp={depth: _mtp_module(model, depth, seams) for depth in parts.mtp},
        final_norm=_norm(model, seams) if parts.final_norm else None,
        head=Linear(model.dim, model.vocab_size, seams.products) if parts.loss and not model.tied_embeddings else None,
        mtp_norms={depth: _norm(model, seams) for depth in parts.mtp_norms},
        loss=LanguageLoss(seams.tokens, seams.vocab, kernels=seams.kernels),
        mixtures=moe_block_names(model),
    )


def _norm(model: ModelConfig, seams: Seams) -> RMSNorm:
    return RMSNorm(model.dim, model.norm_eps, seams.kernels.rms_norm)


def _mtp_module(model: ModelConfig, depth: int, seams: Seams) -> MTPModule:
    join = Linear(2 * model.dim, model.dim, seams.products)
    return MTPModule(_norm(model, seams), _norm(model, seams), join, _block(model, model.num_layers + depth, seams))


def _block(model: ModelConfig, layer: int, seams: Seams) -> Block:
    if model.moe is not None and model.is_moe_layer(layer):
        feed_forward: FeedForward | MoELayer = build_moe_layer(model.moe, model.dim, seams)
    else:
        feed_forward = _dense(model.dim, model.dense_hidden_dim, "swiglu", seams)
    attention = _attention(model, layer, seams)
    return Block(_norm(model, seams), attention, _norm(model, seams), feed_forward, seams.recompute)


def _dense(dim: int, hidden: int, activation: str, seams: Seams) -> FeedForward:
    return FeedForward(dim, hidden, activation, seams.tokens, seams.products, seams.kernels)


def _attention(model: ModelConfig, layer: int, seams: Seams) -> GroupedQueryAttention | LatentAttention:
    config, rope, dim, eps = model.attention, model.rope, model.dim, model.norm_eps
    if isinstance(config, GQAConfig):
        return GroupedQueryAttention(
            config, rope, dim, layer, eps, seams.tokens, seams.core, seams.products, seams.kernels
        )
    return LatentAttention(config, rope, dim, eps, seams.tokens, seams.core, seams.products, seams.kernels)


def build_moe_layer(moe: MoEConfig, dim: int, seams: Seams) -> MoELayer:
    latent = moe.latent_dim
    shared = _dense(dim, moe.shared_hidden_dim, moe.activation, seams) if moe.shared_hidden_dim else None
    # In torch, one call for all of it is no faster, and the model's own steps are the twin.
    route = None if seams.kernels.route is MOE_IN_TORCH.route else seams.kernels.route
    return MoELayer(
        router=Router(
            moe, dim, seams.tokens, None if seams.routing_policy is None else seams.routing_policy(moe), route
        ),
        dispatcher=seams.dispatcher(moe),
        experts=Experts(moe, dim, seams.experts(moe), seams.bias_scale),
        shared=shared,
        shared_gate=Linear(dim, 1, seams.products) if shared is not None and moe.shared_gate else None,
        latent_down=None if latent is None else Linear(dim, latent, seams.products),
        latent_up=None if latent is None else Linear(latent, dim, seams.products),
    )
