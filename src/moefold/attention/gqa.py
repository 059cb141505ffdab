"""Grouped-query attention, with the variations that published models use.

Under tensor parallelism a rank holds some of the heads and sees all tokens: all-gather tokens, project to its heads,
attend, project back to partial sums, reduce-scatter to its tokens. Head counts are read off the weights, so the same
code runs on all heads and on a shard of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moefold.attention.core import AttentionCore, Heads, HeadsInChunks, Rotary
from moefold.config.attention import GQAConfig, RopeConfig
from moefold.config.model import NormScale
from moefold.nn.batch import Batch
from moefold.nn.layers import Linear, RMSNorm, SpreadRMSNorm, UnitRMSNorm
from moefold.nn.matmul_policy import MatmulPolicy
from moefold.nn.parallel_interfaces import TokenSharding
from moefold.nn.step_retention import KEEP_ALL, Retention
from moefold.ops.backends import IN_TORCH, Kernels
from moefold.ops.fp32_linear import upcast


class GroupedQueryAttention(nn.Module):
    def __init__(
        self,
        config: GQAConfig,
        rope: RopeConfig,
        dim: int,
        layer: int,
        norm_eps: float,
        tokens: TokenSharding,
        core: AttentionCore,
        matmul_policy: MatmulPolicy,
        kernels: Kernels = IN_TORCH,
        retain: Retention = KEEP_ALL,
        norm_scale: NormScale = "weight",
    ) -> None:
        super().__init__()
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = Linear(dim, q_width * (1 + config.output_gate), matmul_policy, config.qkv_bias)
        self.k = Linear(dim, kv_width, matmul_policy, config.qkv_bias)
        self.v = Linear(dim, kv_width, matmul_policy, config.qkv_bias)
        self.out = Linear(q_width, dim, matmul_policy, config.out_bias)
        self.q_norm = _qk_norm(config, layer, q_width, norm_eps, tokens, kernels, norm_scale)
        self.k_norm = _qk_norm(config, layer, kv_width, norm_eps, tokens, kernels, norm_scale)
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None
        self.rotary = Rotary(rope, config.rope_dim or config.head_dim, kernels)
        self.head_dim = config.head_dim
        self.norm_whole_projection = config.qk_norm == "full"
        self.has_rope = config.has_rope(layer)
        # Without RoPE there is no order to speak of, and norms without a weight are for layers with it.
        self.norm_rotated = self.has_rope and config.qk_norm != "none" and config.qk_norm_when == "after_rope"
        self.output_gate = config.output_gate
        self.window, self.chunk = config.window_of(layer), config.chunk_of(layer)
        self.temperature = 0.0 if self.has_rope else config.nope_temperature
        self.temperature_floor = config.nope_floor
        self.tokens = tokens
        self.core = core
        self.retain = retain

    def forward(self, x_tD: Tensor, batch: Batch) -> Tensor:
        # In the format of the layer, as every weight but the router's; its gradient is a sum over tokens, in float32.
        sinks_H = None if self.sinks is None else upcast(self.sinks.to(x_tD.dtype))
        scale = self.head_dim**-0.5
        in_chunks = self.core.in_chunks(batch, scale=scale, window=self.window, chunk=self.chunk)
        if in_chunks is not None:
            return self._in_chunks(x_tD, batch, in_chunks, sinks_H)
        parts = [self._projected(x_SD) for (x_SD,) in self.tokens.gather_chunks(batch, x_tD)]
        q_SX, k_SX, v_SX, *gate = map(self.tokens.join_chunks, zip(*parts, strict=True))
        del parts
        q_SHC, k_SJC, v_SJC = self._in_heads(q_SX, k_SX, v_SX, batch.positions_S)
        del q_SX, k_SX, v_SX

        def attend(q_SHC: Tensor, k_SJC: Tensor, v_SJC: Tensor, sinks_H: Tensor | None = None) -> Tensor:
            return self.core(
                q_SHC, k_SJC, v_SJC, batch, scale=scale, window=self.window, sinks_H=sinks_H, chunk=self.chunk
            )

        inputs = (q_SHC, k_SJC, v_SJC) if sinks_H is None else (q_SHC, k_SJC, v_SJC, sinks_H)
        seen_SHC = self.retain.step("core", attend, *inputs)
        chunks = self.tokens.split_chunks(_gated(seen_SHC, gate).flatten(1))
        return self.out.add_bias(self.tokens.reduce_chunks(map(self.out.partial, chunks), batch))

    def _in_chunks(self, x_tD: Tensor, batch: Batch, chunks: HeadsInChunks, sinks_H: Tensor | None) -> Tensor:
        """The same where tokens leave for the ranks of their heads chunk by chunk: one is projected while another is on
        its way, and so are their outputs."""
        x_SD, gates = self.tokens.gather(x_tD, batch), list[list[Tensor]]()

        def heads() -> Iterator[Heads]:
            for x_cD, positions_c in zip(x_SD.split(chunks.sizes), batch.positions_S.split(chunks.sizes), strict=True):
                q_cX, k_cX, v_cX, *gate = self._projected(x_cD)
                gates.append(gate)
                yield self._in_heads(q_cX, k_cX, v_cX, positions_c)

        seen = zip(chunks.attend(heads(), sinks_H), gates, strict=True)
        partial_SD = torch.cat([self.out.partial(_gated(seen_cHC, gate).flatten(1)) for seen_cHC, gate in seen])
        return self.out.add_bias(self.tokens.reduce(partial_SD))

    def _projected(self, x_SD: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values, and the gate if there is one."""
        x_SD = self.retain.received("attention_norm", x_SD)
        if not self.output_gate:
            return self.q(x_SD), self.k(x_SD), self.v(x_SD)
        q_SHC, gate_SHC = self.q(x_SD).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        # A copy: a view that is saved for the backward pass would keep the gate's half alive too.
        return q_SHC.flatten(1), self.k(x_SD), self.v(x_SD), gate_SHC

    def _in_heads(self, q_SX: Tensor, k_SX: Tensor, v_SX: Tensor, positions_S: Tensor) -> Heads:
        """Normed and rotated."""
        q_SHC = self._heads(q_SX, None if self.norm_rotated else self.q_norm)
        k_SJC = self._heads(k_SX, None if self.norm_rotated else self.k_norm)
        if self.has_rope:
            tables = self.rotary(positions_S, like=q_SX)
            q_SHC, k_SJC = self.rotary.rotate(q_SHC, k_SJC, tables)
        elif self.temperature:
            q_SHC = self._scale_by_position(q_SHC, positions_S)
        if self.norm_rotated:
            assert self.q_norm is not None and self.k_norm is not None
            q_SHC, k_SJC = self.q_norm(q_SHC), self.k_norm(k_SJC)
        return q_SHC, k_SJC, self._heads(v_SX, None)

    def _scale_by_position(self, q_SHC: Tensor, positions_S: Tensor) -> Tensor:
        """Far positions see more keys; larger logits keep their softmax from flattening."""
        steps_S = ((positions_S + 1) // self.temperature_floor).to(torch.promote_types(q_SHC.dtype, torch.float32))
        return (q_SHC * (steps_S.log1p() * self.temperature + 1)[:, None, None]).to(q_SHC.dtype)

    def _heads(self, x_SX: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is not None and self.norm_whole_projection:
            x_SX = norm(x_SX)
        x_SYC = x_SX.unflatten(-1, (-1, self.head_dim))
        return norm(x_SYC) if norm is not None and not self.norm_whole_projection else x_SYC


def _gated(seen_SHC: Tensor, gate: list[Tensor]) -> Tensor:
    """``gate`` has one tensor, or none."""
    for gate_SHC in gate:
        seen_SHC = seen_SHC * gate_SHC.sigmoid()
    return seen_SHC


def _qk_norm(
    config: GQAConfig, layer: int, full_dim: int, eps: float, tokens: TokenSharding, kernels: Kernels, scale: NormScale
) -> nn.Module | None:
    if config.qk_norm == "none":
        return None
    if config.qk_norm == "unit":
        return UnitRMSNorm(config.head_dim, eps, kernels.rms_norm) if config.has_rope(layer) else None
    if config.qk_norm == "head":
        return RMSNorm(config.head_dim, eps, kernels.rms_norm, scale)
    return SpreadRMSNorm(full_dim, eps, tokens, scale)
