"""RoPE: pairs of a head's entries are rotated by an angle that grows with the token's position.

Pairs of high frequency distinguish near positions, pairs of low frequency far ones. YaRN extends a trained model to
longer contexts: pairs that make many rotations within the original context keep their frequency, pairs that do not
complete one are slowed by the factor, and a ramp joins the two. Because longer contexts flatten the softmax, it also
scales the logits up a little.

``rotate_qk`` and ``keys_and_values`` are the references of the kernels in ``ops/kernels/rope_triton.py`` and
``rope_latent_triton.py``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moefold.config.attention import Llama3RopeConfig, RopeConfig, YarnConfig


def rotary_tables(rope: RopeConfig, dim: int, positions_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every pair's angle, [S, r]. Angles are float64: far positions would lose digits in float32."""
    freq_r = inv_freq(rope.theta, dim, rope.yarn, positions_S.device)
    if rope.llama3 is not None:
        freq_r = _slow_down(freq_r, rope.llama3)
    angle_Sr = positions_S.double()[:, None] * freq_r
    scale = table_scale(rope.yarn)
    return (angle_Sr.cos() * scale).to(dtype), (angle_Sr.sin() * scale).to(dtype)


def inv_freq(theta: float, dim: int, yarn: YarnConfig | None, device: torch.device) -> Tensor:
    """Radians per position of each pair, from 1 for the first down to nearly 1/theta."""
    pair_r = torch.arange(dim // 2, dtype=torch.float64, device=device)
    freq_r = theta ** (-2.0 * pair_r / dim)
    if yarn is None:
        return freq_r
    low, high = _ramp_range(theta, dim, yarn)
    ramp_r = ((pair_r - low) / (high - low)).clamp(0, 1)
    return freq_r * (1 - ramp_r) + freq_r / yarn.factor * ramp_r


def _slow_down(freq_r: Tensor, llama3: Llama3RopeConfig) -> Tensor:
    """Llama 3.1: by the rotations that a pair makes within the original context."""
    rotations_r = llama3.original_context * freq_r / (2 * math.pi)
    low, high = llama3.low_freq_factor, llama3.high_freq_factor
    # Where both factors are equal there is no ramp.
    kept_r = ((rotations_r - low) / (high - low)).clamp(0, 1) if high != low else (rotations_r >= low).to(freq_r.dtype)
    return freq_r * kept_r + freq_r / llama3.factor * (1 - kept_r)


def _ramp_range(theta: float, dim: int, yarn: YarnConfig) -> tuple[float, float]:
    """The pairs where the ramp starts and ends: beta_fast and beta_slow rotations within the original context."""

    def pair_with_rotations(rotations: float) -> float:
        return dim * math.log(yarn.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_rotations(yarn.beta_fast), pair_with_rotations(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001  # avoid a division by zero


def table_scale(yarn: YarnConfig | None) -> float:
    """The factor on cos and sin; every rotated logit grows by its square."""
    if yarn is None:
        return 1.0
    if yarn.mscale and yarn.mscale_all_dim:
        return _temperature(yarn.factor, yarn.mscale) / _temperature(yarn.factor, yarn.mscale_all_dim)
    return _temperature(yarn.factor, 1.0)


def latent_softmax_scale(yarn: YarnConfig | None) -> float:
    """Extra factor on the softmax scale of latent attention, whose unrotated entries the tables do not scale."""
    if yarn is None or not yarn.mscale_all_dim:
        return 1.0
    return _temperature(yarn.factor, yarn.mscale_all_dim) ** 2


def _temperature(factor: float, strength: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def rotate(x_SXY: Tensor, cos_Sr: Tensor, sin_Sr: Tensor, interleaved: bool) -> Tensor:
    """Rotate the pairs (i, i + r), or (2i, 2i + 1) when ``interleaved``; computed in the tables' dtype.

    X is any number of heads, Y = 2r. ``x_SXY`` is not saved: backward rotates the gradient by the negative angles.
    """
    out_SXY: Tensor = _Rotate.apply(x_SXY, cos_Sr, sin_Sr, interleaved)
    return out_SXY


def rotate_reference(x_SXY: Tensor, cos_Sr: Tensor, sin_Sr: Tensor, interleaved: bool) -> Tensor:
    """The reference of ``rotate``: as papers write it, with gradients by autograd."""
    cos_S1r, sin_S1r = cos_Sr[:, None], sin_Sr[:, None]
    a, b = _pairs(x_SXY, interleaved)
    rotated = (a * cos_S1r - b * sin_S1r, b * cos_S1r + a * sin_S1r)
    out = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return out.to(x_SXY.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SXY: Tensor, cos_Sr: Tensor, sin_Sr: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos_Sr, sin_Sr)
        ctx.interleaved = interleaved
        return _apply_rotation(x_SXY, cos_Sr, sin_Sr, interleaved, 1.0)

    @staticmethod
    def backward(ctx: Any, grad_SXY: Tensor) -> tuple[Tensor, None, None, None]:
        cos_Sr, sin_Sr = ctx.saved_tensors
        return _apply_rotation(grad_SXY, cos_Sr, sin_Sr, ctx.interleaved, -1.0), None, None, None


def _apply_rotation(x_SXY: Tensor, cos_Sr: Tensor, sin_Sr: Tensor, interleaved: bool, sign: float) -> Tensor:
    cos_S1r, sin_S1r = cos_Sr[:, None], sin_Sr[:, None]
    out_SXY = torch.empty(x_SXY.shape, dtype=x_SXY.dtype, device=x_SXY.device)
    (a, b), (out_a, out_b) = _pairs(x_SXY.to(cos_Sr.dtype), interleaved), _pairs(out_SXY, interleaved)
    out_a.copy_((a * cos_S1r).addcmul_(b, sin_S1r, value=-sign))
    out_b.copy_((b * cos_S1r).addcmul_(a, sin_S1r, value=sign))
    return out_SXY


def _pairs(x_SXY: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second entries of the pairs."""
    if interleaved:
        return x_SXY[..., 0::2], x_SXY[..., 1::2]
    first, second = x_SXY.chunk(2, dim=-1)
    return first, second


def rotate_qk(
    q_SHC: Tensor, k_SJC: Tensor | None, cos_Sr: Tensor, sin_Sr: Tensor, interleaved: bool, in_place: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Rotate the last 2r entries of every head by the token's angle. ``in_place`` is a permission, not used here."""

    def rotate_last(x_SXC: Tensor) -> Tensor:
        if x_SXC.shape[-1] == 2 * cos_Sr.shape[-1]:
            return rotate(x_SXC, cos_Sr, sin_Sr, interleaved)
        nope, rope = x_SXC.split((x_SXC.shape[-1] - 2 * cos_Sr.shape[-1], 2 * cos_Sr.shape[-1]), dim=-1)
        return torch.cat((nope, rotate(rope, cos_Sr, sin_Sr, interleaved)), dim=-1)

    return rotate_last(q_SHC), None if k_SJC is None else rotate_last(k_SJC)


def keys_and_values(
    kv_SHX: Tensor, k_rope_SX: Tensor, cos_Sr: Tensor, sin_Sr: Tensor, nope: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Keys [S, H, C] and values [S, H, U] from the up projection (per head ``nope`` key entries, then the value) and
    the 2r rotary key entries that all heads share; C = nope + 2r."""
    k_nope_SHX, v_SHU = kv_SHX.split((nope, kv_SHX.shape[-1] - nope), dim=-1)
    k_rope_SHX = rotate(k_rope_SX[:, None], cos_Sr, sin_Sr, interleaved).expand(-1, kv_SHX.shape[1], -1)
    return torch.cat((k_nope_SHX, k_rope_SHX), dim=-1), v_SHU
