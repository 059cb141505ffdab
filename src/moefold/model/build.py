"""From a model's sizes to its modules, with whatever seams they are to have.

Parameters are made on torch's current default device and are not filled: on the meta device, building the largest model
takes no memory and little time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moefold.config.attention import GQAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.dispatch.contract import Dispatcher
from moefold.dispatch.local import LocalDispatcher
from moefold.model.attention.core import AttentionCore, LocalCore
from moefold.model.attention.gqa import GroupedQueryAttention
from moefold.model.attention.mla import LatentAttention
from moefold.model.block import Block
from moefold.model.decoder import Decoder
from moefold.model.embedding import Embedding
from moefold.model.feed_forward import FeedForward
from moefold.model.linear import Linear
from moefold.model.loss import LanguageLoss
from moefold.model.moe.experts import Experts
from moefold.model.moe.layer import MoELayer
from moefold.model.moe.router import Router
from moefold.model.moe.select import Selector, build_selector
from moefold.model.norm import RMSNorm
from moefold.model.seams import TokenSeam, VocabSeam, WholeTokens, WholeVocab
from moefold.ops.grouped_matmul import BACKENDS


@dataclass(frozen=True)
class Seams:
    """Where the model meets other ranks."""

    tokens: TokenSeam
    vocab: VocabSeam
    dispatcher: Callable[[MoEConfig], Dispatcher]
    # How much of an expert's output bias this rank adds, when several ranks' parts of the expert are summed.
    bias_share: float = 1.0
    core: AttentionCore = field(default_factory=LocalCore)
    # Asked once per mixture, in layer order, so that recorded choices can be played back.
    selector: Callable[[MoEConfig], Selector] = build_selector


def one_process_seams() -> Seams:
    return Seams(WholeTokens(), WholeVocab(), lambda moe: LocalDispatcher(moe.num_experts))


def build_decoder(model: ModelConfig, compute: torch.dtype, experts_backend: str, seams: Seams) -> Decoder:
    embedding = Embedding(model.vocab_size, model.width, compute, seams.tokens, seams.vocab)
    layers = [_block(model, layer, experts_backend, seams) for layer in range(model.num_layers)]
    head = None if model.tied_embeddings else Linear(model.width, model.vocab_size)
    loss = LanguageLoss(seams.tokens, seams.vocab)
    return Decoder(embedding, layers, RMSNorm(model.width, model.norm_eps), head, loss)


def _block(model: ModelConfig, layer: int, experts_backend: str, seams: Seams) -> Block:
    if model.moe is not None and model.is_moe_layer(layer):
        feed_forward: FeedForward | MoELayer = _mixture(model.moe, model.width, experts_backend, seams)
    else:
        feed_forward = FeedForward(model.width, model.dense_width, "swiglu", seams.tokens)
    norms = RMSNorm(model.width, model.norm_eps), RMSNorm(model.width, model.norm_eps)
    return Block(norms[0], _attention(model, layer, seams), norms[1], feed_forward)


def _attention(model: ModelConfig, layer: int, seams: Seams) -> GroupedQueryAttention | LatentAttention:
    config, rope, width, eps = model.attention, model.rope, model.width, model.norm_eps
    if isinstance(config, GQAConfig):
        return GroupedQueryAttention(config, rope, width, layer, eps, seams.tokens, seams.core)
    return LatentAttention(config, rope, width, eps, seams.tokens, seams.core)


def _mixture(moe: MoEConfig, width: int, experts_backend: str, seams: Seams) -> MoELayer:
    latent = moe.latent_width
    shared = FeedForward(width, moe.shared_width, moe.activation, seams.tokens) if moe.shared_width else None
    return MoELayer(
        router=Router(moe, width, seams.tokens, seams.selector(moe)),
        dispatcher=seams.dispatcher(moe),
        experts=Experts(moe, width, BACKENDS[experts_backend], seams.bias_share),
        shared=shared,
        shared_gate=Linear(width, 1) if shared is not None and moe.shared_gate else None,
        latent_down=None if latent is None else Linear(width, latent),
        latent_up=None if latent is None else Linear(latent, width),
    )
