"""Multi-head latent attention: keys and values are rebuilt, head by head, from one small latent vector per token.

Positions are carried by extra rotated entries that all heads' keys share. Under tensor parallelism the latents are
computed on each rank's own tokens and gathered before they are projected to heads, because they are the smallest form
of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from moefold.attention.core import AttentionCore, Heads, HeadsInChunks, Rotary
from moefold.attention.partial_attention import compact
from moefold.config.attention import MLAConfig, RopeConfig
from moefold.config.model import NormScale
from moefold.nn.batch import Batch
from moefold.nn.layers import Linear, RMSNorm
from moefold.nn.matmul_policy import MatmulPolicy
from moefold.nn.parallel_interfaces import TokenSharding
from moefold.nn.step_retention import KEEP_ALL, Retention
from moefold.ops.backends import IN_TORCH, Kernels
from moefold.ops.rope import latent_softmax_scale


class LatentAttention(nn.Module):
    def __init__(
        self,
        config: MLAConfig,
        rope: RopeConfig,
        dim: int,
        norm_eps: float,
        tokens: TokenSharding,
        core: AttentionCore,
        matmul_policy: MatmulPolicy,
        kernels: Kernels = IN_TORCH,
        retain: Retention = KEEP_ALL,
        norm_scale: NormScale = "weight",
    ) -> None:
        super().__init__()
        query_dim = config.nope_dim + config.rope_dim
        if config.q_latent is None:
            self.q = Linear(dim, config.num_heads * query_dim, matmul_policy)
        else:
            self.q_down = Linear(dim, config.q_latent, matmul_policy)
            self.q_norm = RMSNorm(config.q_latent, norm_eps, kernels.rms_norm, norm_scale)
            self.q_up = Linear(config.q_latent, config.num_heads * query_dim, matmul_policy)
        self.kv_down = Linear(dim, config.kv_latent + config.rope_dim, matmul_policy)
        self.kv_norm = RMSNorm(config.kv_latent, norm_eps, kernels.rms_norm, norm_scale)
        self.kv_up = Linear(config.kv_latent, config.num_heads * (config.nope_dim + config.value_dim), matmul_policy)
        self.out = Linear(config.num_heads * config.value_dim, dim, matmul_policy)
        self.rotary = Rotary(rope, config.rope_dim, kernels)
        self.config = config
        self.scale = query_dim**-0.5 * latent_softmax_scale(rope.yarn)
        self.tokens = tokens
        self.core = core
        self.retain = retain

    def forward(self, x_tD: Tensor, batch: Batch) -> Tensor:
        in_chunks = self.core.in_chunks(batch, scale=self.scale, window=None)
        if in_chunks is not None:
            return self._in_chunks(x_tD, batch, in_chunks)
        arriving = self.tokens.gather_chunks(batch, self._queries_in(x_tD), self._latents(x_tD))
        positions = self.tokens.split_chunks(batch.positions_S)
        parts = [self._projected(*places) for places in zip(positions, arriving, strict=True)]
        q_SHC, k_SHC, v_SHU = map(self.tokens.join_chunks, zip(*parts, strict=True))
        del arriving, parts
        attend = partial(self.core, batch=batch, scale=self.scale, window=None, sinks_H=None)
        seen_SHU = self.retain.step("core", attend, q_SHC, k_SHC, v_SHU)
        del q_SHC, k_SHC, v_SHU
        chunks = self.tokens.split_chunks(seen_SHU.flatten(1))
        return self.tokens.reduce_chunks(map(self.out, chunks), batch)

    def _in_chunks(self, x_tD: Tensor, batch: Batch, chunks: HeadsInChunks) -> Tensor:
        """The same where tokens leave for the ranks of their heads chunk by chunk: one is projected while another is on
        its way, and so are their outputs."""
        gathered = (self.tokens.gather(each, batch) for each in (self._queries_in(x_tD), self._latents(x_tD)))
        parts = zip(*(each.split(chunks.sizes) for each in (batch.positions_S, *gathered)), strict=True)
        seen = chunks.attend(self._projected(positions_c, places) for positions_c, *places in parts)
        return self.tokens.reduce(torch.cat([self.out(seen_cHU.flatten(1)) for seen_cHU in seen]))

    def _projected(self, positions_S: Tensor, gathered: Sequence[Tensor]) -> Heads:
        q_in_SX, both_SX = gathered
        q_in_SX = self.retain.received("attention_norm" if self.config.q_latent is None else "latent_norm", q_in_SX)
        both_SX = self.retain.received("latent_norm", both_SX)
        return self.retain.step("mla_up", partial(self._up, positions_S), q_in_SX, both_SX)

    def _queries_in(self, x_tD: Tensor) -> Tensor:
        """What queries are projected from: their normed latents, or the layer's input."""
        if self.config.q_latent is None:
            return x_tD
        return self.retain.step("latent_norm", self.q_norm, self.q_down(x_tD))

    def _latents(self, x_tD: Tensor) -> Tensor:
        """Normed latents of keys and values, and beside them the entries that carry positions."""
        return self.retain.step("latent_norm", self._normed, self.kv_down(x_tD))

    def _normed(self, both_tX: Tensor) -> Tensor:
        latent_tk, rope_tX = both_tX.split((self.config.kv_latent, self.config.rope_dim), dim=-1)
        return torch.cat((self.kv_norm(latent_tk), rope_tX), dim=-1)

    def _up(self, positions_S: Tensor, q_in_SX: Tensor, both_SX: Tensor) -> Heads:
        config = self.config
        cos, sin = (self.retain.received("mla_up", table) for table in self.rotary(positions_S, like=both_SX))
        q_SX = (self.q if config.q_latent is None else self.q_up)(q_in_SX)
        q_SHC = self.rotary.rotate_queries(q_SX.unflatten(1, (-1, config.nope_dim + config.rope_dim)), (cos, sin))
        latent_Sk, rope_SX = both_SX.split((config.kv_latent, config.rope_dim), dim=-1)
        heads_SHX = self.kv_up(latent_Sk).unflatten(1, (-1, config.nope_dim + config.value_dim))
        k_SHC, v_SHU = self.rotary.keys_and_values(heads_SHX, rope_SX, (cos, sin), config.nope_dim)
        # Values that are a view of the projection would keep its key half alive too.
        return q_SHC, k_SHC, compact(v_SHU)
