"""Multi-head latent attention: keys and values are rebuilt, head by head, from one small latent vector per token.

Positions are carried by extra rotated entries that all heads' keys share. Under tensor parallelism the latents are
computed on each rank's own tokens and gathered before they are projected to heads, because they are the smallest form
of the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moefold.attention.core import AttentionCore, Rotary
from moefold.config.attention import MLAConfig, RopeConfig
from moefold.nn.batch import Batch
from moefold.nn.layers import Linear, RMSNorm
from moefold.nn.matmul_policy import MatmulPolicy
from moefold.nn.parallel_interfaces import TokenSharding
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
    ) -> None:
        super().__init__()
        query_dim = config.nope_dim + config.rope_dim
        if config.q_latent is None:
            self.q = Linear(dim, config.num_heads * query_dim, matmul_policy)
        else:
            self.q_down = Linear(dim, config.q_latent, matmul_policy)
            self.q_norm = RMSNorm(config.q_latent, norm_eps, kernels.rms_norm)
            self.q_up = Linear(config.q_latent, config.num_heads * query_dim, matmul_policy)
        self.kv_down = Linear(dim, config.kv_latent + config.rope_dim, matmul_policy)
        self.kv_norm = RMSNorm(config.kv_latent, norm_eps, kernels.rms_norm)
        self.kv_up = Linear(config.kv_latent, config.num_heads * (config.nope_dim + config.value_dim), matmul_policy)
        self.out = Linear(config.num_heads * config.value_dim, dim, matmul_policy)
        self.rotary = Rotary(rope, config.rope_dim, kernels)
        self.config = config
        self.scale = query_dim**-0.5 * latent_softmax_scale(rope.yarn)
        self.tokens = tokens
        self.core = core

    def forward(self, x_tD: Tensor, batch: Batch) -> Tensor:
        tables = self.rotary(batch.positions_S, like=x_tD)
        q_SHC = self._queries(x_tD, batch, tables)
        k_SHC, v_SHU = self._keys_and_values(x_tD, batch, tables)
        seen_SHU = self.core(q_SHC, k_SHC, v_SHU, batch, scale=self.scale, window=None, sinks_H=None)
        return self.tokens.reduce(self.out(seen_SHU.flatten(1)))

    def _queries(self, x_tD: Tensor, batch: Batch, tables: tuple[Tensor, Tensor]) -> Tensor:
        nope, rope = self.config.nope_dim, self.config.rope_dim
        if self.config.q_latent is None:
            q_SX = self.q(self.tokens.gather(x_tD, batch))
        else:
            q_SX = self.q_up(self.tokens.gather(self.q_norm(self.q_down(x_tD)), batch))
        return self.rotary.rotate_queries(q_SX.unflatten(1, (-1, nope + rope)), tables)

    def _keys_and_values(self, x_tD: Tensor, batch: Batch, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        config = self.config
        latent_tk, rope_tX = self.kv_down(x_tD).split((config.kv_latent, config.rope_dim), dim=-1)
        both_SX = self.tokens.gather(torch.cat((self.kv_norm(latent_tk), rope_tX), dim=-1), batch)
        latent_Sk, rope_SX = both_SX.split((config.kv_latent, config.rope_dim), dim=-1)
        heads_SHX = self.kv_up(latent_Sk).unflatten(1, (-1, config.nope_dim + config.value_dim))
        return self.rotary.keys_and_values(heads_SHX, rope_SX, tables, config.nope_dim)
