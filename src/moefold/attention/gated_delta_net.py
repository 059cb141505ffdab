"""A gated delta net layer: linear attention by the gated delta rule, in the place of softmax attention.

    x --> q, k, v --> causal convolution over a few tokens, SiLU --+
      --> b, a    --> beta = sigmoid(b), decay = exp(-exp(A_log) softplus(a + dt_bias)) --> gated delta rule
      --> z       --> RMSNorm(output) * SiLU(z), per head --> linear_out

Its cost is linear in the length, and its state is one [C, U] matrix per head, whatever the length. There is no RoPE:
the convolution and the decay know the order of tokens. Documents of a microbatch do not see each other.

Several value heads share a key head. Rows of the projections `qkvz` and `ba` are grouped by key head, as published
weights are: of each the query, the key, its value heads' values and their z; and of `ba` their b, then their a. So
tensor parallelism cuts both by key heads. The convolution's channels are all queries, all keys, all values; its small
weight is whole on every rank, which reads the channels of its heads.

Tokens meet in the convolution and in the rule, and nowhere else: a ``DeltaCore`` has both, so that generation can put
one in their place that keeps states (`kv_cache.py`).

What is saved for the backward pass: the inputs of the convolution, b and a, z, and the rule's output. Everything
between them is made again (``recompute_in_backward``).
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefold.attention.gated_delta_rule import causal_conv, gated_delta_rule, recompute_in_backward
from moefold.config.attention import GatedDeltaNetConfig
from moefold.nn.batch import Batch
from moefold.nn.layers import Linear, RMSNorm
from moefold.nn.matmul_policy import MatmulPolicy
from moefold.nn.parallel_interfaces import TokenSharding
from moefold.nn.step_retention import KEEP_ALL, Retention
from moefold.ops.backends import IN_TORCH, Kernels
from moefold.ops.fp32_linear import upcast


class DeltaCore(Protocol):
    def convolve(self, x_SX: Tensor, taps_XY: Tensor, positions_S: Tensor, lengths: tuple[int, ...]) -> Tensor: ...

    def rule(
        self,
        q_SJC: Tensor,
        k_SJC: Tensor,
        v_SHU: Tensor,
        log_decay_SH: Tensor,
        beta_SH: Tensor,
        lengths: tuple[int, ...],
        chunk_size: int,
    ) -> Tensor: ...


class WholeDocuments:
    """The core of training: every document is here from its first token on."""

    rule = staticmethod(gated_delta_rule)

    def convolve(self, x_SX: Tensor, taps_XY: Tensor, positions_S: Tensor, lengths: tuple[int, ...]) -> Tensor:
        return causal_conv(x_SX, taps_XY, positions_S)


class GatedDeltaNet(nn.Module):
    def __init__(
        self,
        config: GatedDeltaNetConfig,
        dim: int,
        norm_eps: float,
        tokens: TokenSharding,
        matmul_policy: MatmulPolicy,
        kernels: Kernels = IN_TORCH,
        retain: Retention = KEEP_ALL,
        core: DeltaCore | None = None,
    ) -> None:
        super().__init__()
        heads = config.num_value_heads
        keys, values = config.num_key_heads * config.key_dim, heads * config.value_dim
        self.qkvz = Linear(dim, 2 * keys + 2 * values, matmul_policy)
        self.ba = Linear(dim, 2 * heads, matmul_policy)
        self.conv = nn.Parameter(torch.empty(2 * keys + values, config.conv_size))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(config.value_dim, norm_eps, kernels.rms_norm)
        self.linear_out = Linear(values, dim, matmul_policy)
        self.config = config
        self.shared = heads // config.num_key_heads
        self.tokens = tokens
        self.retain = retain
        self.core = WholeDocuments() if core is None else core

    def forward(self, x_tD: Tensor, batch: Batch) -> Tensor:
        parts = [self._projected(x_SD) for (x_SD,) in self.tokens.gather_chunks(batch, x_tD)]
        mixed_SX, z_SHU, ba_SX = map(self.tokens.join_chunks, zip(*parts, strict=True))
        del parts
        mix = partial(self._mix, batch.positions_S, batch.lengths)
        weights = (self.conv, self.A_log, self.dt_bias)
        seen_SHU = self.retain.step("core", mix, mixed_SX, ba_SX, *weights)
        gated_SHU = recompute_in_backward(self._gate, seen_SHU, z_SHU, self.norm.weight)
        chunks = self.tokens.split_chunks(gated_SHU.flatten(1))
        return self.tokens.reduce_chunks(map(self.linear_out, chunks), batch)

    def _projected(self, x_SD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values side by side, z, and b and a; copies, so that the projection itself is not kept."""
        x_SD = self.retain.received("attention_norm", x_SD)
        key, values = self.config.key_dim, self.shared * self.config.value_dim
        by_head_SJX = self.qkvz(x_SD).unflatten(-1, (-1, 2 * key + 2 * values))
        q_SJC, k_SJC, v_SJX, z_SJX = by_head_SJX.split((key, key, values, values), dim=-1)
        mixed_SX = torch.cat((q_SJC.flatten(1), k_SJC.flatten(1), v_SJX.flatten(1)), dim=-1)
        return mixed_SX, z_SJX.flatten(1).unflatten(-1, (-1, self.config.value_dim)), self.ba(x_SD)

    def _mix(
        self,
        positions_S: Tensor,
        lengths: tuple[int, ...],
        mixed_SX: Tensor,
        ba_SX: Tensor,
        conv_XY: Tensor,
        A_log_H: Tensor,
        dt_bias_H: Tensor,
    ) -> Tensor:
        rule, taps_XY = partial(self._rule, lengths), self._own_taps(conv_XY)
        return recompute_in_backward(rule, mixed_SX, ba_SX, positions_S, taps_XY, A_log_H, dt_bias_H)

    def _own_taps(self, conv_XY: Tensor) -> Tensor:
        """The convolution's weights for this rank's heads."""
        keys, values = (
            self.config.num_key_heads * self.config.key_dim,
            self.config.num_value_heads * self.config.value_dim,
        )
        parts = [part[self.tokens.head_rows(len(part))] for part in conv_XY.split((keys, keys, values))]
        return conv_XY if sum(map(len, parts)) == len(conv_XY) else torch.cat(parts)

    def _rule(
        self,
        lengths: tuple[int, ...],
        mixed_SX: Tensor,
        ba_SX: Tensor,
        positions_S: Tensor,
        taps_XY: Tensor,
        A_log_H: Tensor,
        dt_bias_H: Tensor,
    ) -> Tensor:
        config, J = self.config, ba_SX.shape[-1] // (2 * self.shared)
        keys = J * config.key_dim
        conv_SX = F.silu(self.core.convolve(mixed_SX, taps_XY, positions_S, lengths)).to(mixed_SX.dtype)
        q_SX, k_SX, v_SX = conv_SX.split((keys, keys, conv_SX.shape[-1] - 2 * keys), dim=-1)
        b_SJg, a_SJg = upcast(ba_SX).unflatten(-1, (J, 2 * self.shared)).chunk(2, dim=-1)
        log_decay_SH = -upcast(A_log_H).exp() * F.softplus(a_SJg.flatten(1) + upcast(dt_bias_H))
        q_SJC, k_SJC = (x_SX.unflatten(-1, (J, config.key_dim)) for x_SX in (q_SX, k_SX))
        v_SHU = v_SX.unflatten(-1, (-1, config.value_dim))
        return self.core.rule(q_SJC, k_SJC, v_SHU, log_decay_SH, b_SJg.flatten(1).sigmoid(), lengths, config.chunk_size)

    def _gate(self, seen_SHU: Tensor, z_SHU: Tensor, weight_U: Tensor) -> Tensor:
        normed_SHU = self.norm.norm(seen_SHU, weight_U, self.norm.eps)
        return (normed_SHU * F.silu(upcast(z_SHU))).to(seen_SHU.dtype)
