"""Build a model's modules from its config, with the given interfaces to other ranks.

Parameters are made on torch's current default device and are not filled: on the meta device, building the largest model
takes no memory and little time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moefold.attention.core import AttentionCore, LocalCore
from moefold.attention.gated_delta_net import DeltaCore, GatedDeltaNet
from moefold.attention.gqa import GroupedQueryAttention
from moefold.attention.mla import LatentAttention
from moefold.blueprint.parameters import moe_block_names, parameters
from moefold.blueprint.stage_modules import Parts, parts_of, whole_model
from moefold.config.attention import GQAConfig
from moefold.config.memory import RetainedStep
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.model.block import Block
from moefold.model.decoder import Decoder
from moefold.model.mtp import MTPModule
from moefold.moe.dispatch.base import Dispatcher, LocalDispatcher
from moefold.moe.expert_backends import expert_backend
from moefold.moe.experts import ExpertBackendMaker, Experts
from moefold.moe.layer import MoELayer
from moefold.moe.moe_kernels import MOE_IN_TORCH, MoEKernels
from moefold.moe.overlapped_layer import LayerOverlap
from moefold.moe.router import Router
from moefold.moe.routing_policies import RoutingPolicy
from moefold.nn.float32_matmul import MULTIPLY
from moefold.nn.layers import FeedForward, Linear, RMSNorm
from moefold.nn.low_rank import attach_adapters
from moefold.nn.matmul_policy import MatmulPolicy, matmul_policy_named
from moefold.nn.parallel_interfaces import LocalTokens, LocalVocab, TokenSharding, VocabSharding
from moefold.nn.phase_graphs import PhaseGraphs
from moefold.nn.step_retention import KEEP_ALL, Retention
from moefold.nn.vocab import Embedding, LanguageLoss


@dataclass(frozen=True)
class ParallelInterfaces:
    """Where the model communicates with other ranks."""

    tokens: TokenSharding
    vocab: VocabSharding
    dispatcher: Callable[[MoEConfig], Dispatcher]
    matmul_policy: MatmulPolicy
    experts: ExpertBackendMaker
    # How much of an expert's output bias this rank adds, when several ranks' parts of the expert are summed.
    bias_scale: float = 1.0
    core: AttentionCore = field(default_factory=LocalCore)
    # Makes of the core that of one block, whose logits are observed; None where nobody asks for them.
    observe: Callable[[AttentionCore, int], AttentionCore] | None = None
    # The core of a layer with linear attention; None is that of training.
    delta_core: Callable[[int], DeltaCore] | None = None
    # Called once per MoE layer, in layer order, so that recorded assignments can be replayed.
    # None is the one that the config names.
    routing_policy: Callable[[MoEConfig], RoutingPolicy] | None = None
    # The operations between matmuls.
    kernels: MoEKernels = MOE_IN_TORCH
    # Phases that save only their input and are recomputed in the backward pass.
    recompute: frozenset[str] = frozenset()
    # What the other phases keep of their steps.
    retain: Retention = KEEP_ALL
    # Called once per MoE layer: how its exchanges run beside its own computation; None where they do not.
    overlap: Callable[[MoEConfig], LayerOverlap] | None = None
    # Captures phases as graphs; None: each operation is launched by itself.
    graphs: PhaseGraphs | None = None


def local_interfaces(
    experts_backend: str = "sequential",
    kernels: MoEKernels = MOE_IN_TORCH,
    retain: Retention = KEEP_ALL,
    cpu_matmul: str = "compute",
) -> ParallelInterfaces:
    matmul_policy = matmul_policy_named("torch", cpu_matmul=cpu_matmul)
    return ParallelInterfaces(
        LocalTokens(),
        LocalVocab(),
        lambda moe: LocalDispatcher(moe.num_experts),
        matmul_policy,
        expert_backend(experts_backend, matmul_policy, kernels=kernels, retain=retain, multiply=MULTIPLY[cpu_matmul]),
        kernels=kernels,
        retain=retain,
    )


def build_decoder(
    model: ModelConfig, compute: torch.dtype, interfaces: ParallelInterfaces, parts: Parts | None = None
) -> Decoder:
    """The whole model, or those parts of it."""
    whole = whole_model(model)
    parts = parts_of([whole], model) if parts is None else parts
    decoder = Decoder(
        whole,
        embedding=Embedding(model.vocab_size, model.dim, compute, interfaces.tokens, interfaces.vocab)
        if parts.embedding
        else None,
        layers={layer: _block(model, layer, interfaces) for layer in parts.layers},
        mtp={depth: _mtp_module(model, depth, interfaces) for depth in parts.mtp},
        final_norm=_norm(model, interfaces) if parts.final_norm else None,
        head=Linear(model.dim, model.vocab_size, interfaces.matmul_policy)
        if parts.loss and not model.tied_embeddings
        else None,
        mtp_norms={depth: _norm(model, interfaces) for depth in parts.mtp_norms},
        loss=LanguageLoss(interfaces.tokens, interfaces.vocab, kernels=interfaces.kernels),
        moe_blocks=moe_block_names(model),
    )
    if model.lora is not None:
        attach_adapters(decoder, (spec for spec in parameters(model) if parts.holds(spec.name)), model.lora.scale)
    return decoder


def _norm(model: ModelConfig, interfaces: ParallelInterfaces) -> RMSNorm:
    return RMSNorm(model.dim, model.norm_eps, interfaces.kernels.rms_norm, model.norm_scale)


def _mtp_module(model: ModelConfig, depth: int, interfaces: ParallelInterfaces) -> MTPModule:
    join = Linear(2 * model.dim, model.dim, interfaces.matmul_policy)
    return MTPModule(
        _norm(model, interfaces), _norm(model, interfaces), join, _block(model, model.num_layers + depth, interfaces)
    )


def _block(model: ModelConfig, layer: int, interfaces: ParallelInterfaces) -> Block:
    if model.moe is not None and model.is_moe_layer(layer):
        feed_forward: FeedForward | MoELayer = build_moe_layer(model.moe, model.dim, interfaces)
    else:
        feed_forward = _dense(model.dim, model.dense_hidden_dim, "swiglu", "dense", interfaces)
    attention = _attention(model, layer, interfaces)
    norms = _norm(model, interfaces), _norm(model, interfaces)
    return Block(
        norms[0], attention, norms[1], feed_forward, interfaces.recompute, interfaces.retain, interfaces.graphs
    )


def _dense(dim: int, hidden: int, activation: str, step: RetainedStep, interfaces: ParallelInterfaces) -> FeedForward:
    tokens, matmul_policy, kernels = interfaces.tokens, interfaces.matmul_policy, interfaces.kernels
    return FeedForward(dim, hidden, activation, tokens, matmul_policy, kernels, step, interfaces.retain)


def _attention(
    model: ModelConfig, layer: int, interfaces: ParallelInterfaces
) -> GroupedQueryAttention | LatentAttention | GatedDeltaNet:
    config, rope, dim, eps = model.attention, model.rope, model.dim, model.norm_eps
    if model.linear_attention is not None and model.is_linear_layer(layer):
        tokens, matmul_policy, kernels = interfaces.tokens, interfaces.matmul_policy, interfaces.kernels
        delta = None if interfaces.delta_core is None else interfaces.delta_core(layer)
        return GatedDeltaNet(model.linear_attention, dim, eps, tokens, matmul_policy, kernels, interfaces.retain, delta)
    core = interfaces.core if interfaces.observe is None else interfaces.observe(interfaces.core, layer)
    if isinstance(config, GQAConfig):
        return GroupedQueryAttention(
            config,
            rope,
            dim,
            layer,
            eps,
            interfaces.tokens,
            core,
            interfaces.matmul_policy,
            interfaces.kernels,
            interfaces.retain,
            model.norm_scale,
        )
    return LatentAttention(
        config,
        rope,
        dim,
        eps,
        interfaces.tokens,
        core,
        interfaces.matmul_policy,
        interfaces.kernels,
        interfaces.retain,
        model.norm_scale,
    )


def build_moe_layer(moe: MoEConfig, dim: int, interfaces: ParallelInterfaces) -> MoELayer:
    latent = moe.latent_dim
    shared = _dense(dim, moe.shared_hidden_dim, moe.activation, "shared", interfaces) if moe.shared_hidden_dim else None
    route, balance = interfaces.kernels.for_router()
    return MoELayer(
        router=Router(
            moe,
            dim,
            interfaces.tokens,
            None if interfaces.routing_policy is None else interfaces.routing_policy(moe),
            route,
            balance,
        ),
        dispatcher=interfaces.dispatcher(moe),
        experts=Experts(moe, dim, interfaces.experts(moe), interfaces.bias_scale),
        shared=shared,
        shared_gate=Linear(dim, 1, interfaces.matmul_policy) if shared is not None and moe.shared_gate else None,
        latent_down=None if latent is None else Linear(dim, latent, interfaces.matmul_policy),
        latent_up=None if latent is None else Linear(latent, dim, interfaces.matmul_policy),
        overlap=None if interfaces.overlap is None else interfaces.overlap(moe),
    )
