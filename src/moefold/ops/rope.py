"""Rotary positions: pairs of a head's entries turn by an angle that grows with the token's position.

T tokens, H heads, d rotated entries per head, r = d/2 pairs.

Fast pairs tell near positions apart, slow pairs far ones. YaRN stretches a trained model to longer contexts: pairs that
turn often within the original context keep their speed, pairs that never complete a turn are slowed by the factor, and
a ramp joins the two. Because longer contexts flatten the softmax, it also sharpens the logits a little.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moefold.config.attention import RopeConfig, YarnConfig


def rotary_tables(rope: RopeConfig, dim: int, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every pair's angle, [T, r]. Angles are formed in float64: far positions lose digits in float32."""
    speed_r = pair_speeds(rope.theta, dim, rope.yarn, positions_T.device)
    angle_Tr = positions_T.double()[:, None] * speed_r
    sharpen = table_scale(rope.yarn)
    return (angle_Tr.cos() * sharpen).to(dtype), (angle_Tr.sin() * sharpen).to(dtype)


def pair_speeds(theta: float, dim: int, yarn: YarnConfig | None, device: torch.device) -> Tensor:
    """Radians per position of each pair, from 1 for the first down to nearly 1/theta."""
    pair_r = torch.arange(dim // 2, dtype=torch.float64, device=device)
    speed_r = theta ** (-2.0 * pair_r / dim)
    if yarn is None:
        return speed_r
    low, high = _ramp_range(theta, dim, yarn)
    slowed_r = ((pair_r - low) / (high - low)).clamp(0, 1)
    return speed_r * (1 - slowed_r) + speed_r / yarn.factor * slowed_r


def _ramp_range(theta: float, dim: int, yarn: YarnConfig) -> tuple[float, float]:
    """The pairs between which slowing sets in: those that turn beta_fast and beta_slow times in the first context."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(yarn.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001  # a ramp of no width would divide by zero


def table_scale(yarn: YarnConfig | None) -> float:
    """What cos and sin are multiplied by, so that every rotated logit grows by its square."""
    if yarn is None:
        return 1.0
    if yarn.mscale and yarn.mscale_all_dim:
        return _temperature(yarn.factor, yarn.mscale) / _temperature(yarn.factor, yarn.mscale_all_dim)
    return _temperature(yarn.factor, 1.0)


def latent_softmax_scale(yarn: YarnConfig | None) -> float:
    """Extra factor on the softmax scale of latent attention, whose unrotated entries the tables do not reach."""
    if yarn is None or not yarn.mscale_all_dim:
        return 1.0
    return _temperature(yarn.factor, yarn.mscale_all_dim) ** 2


def _temperature(factor: float, strength: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def rotate(x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, interleaved: bool) -> Tensor:
    """Turn the pairs (i, i + r), or (2i, 2i + 1) when ``interleaved``; computed in the tables' format.

    Nothing of ``x`` is kept: the gradient turns back by the same angles.
    """
    turned_THd: Tensor = _Rotate.apply(x_THd, cos_Tr, sin_Tr, interleaved)
    return turned_THd


def rotate_reference(x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, interleaved: bool) -> Tensor:
    """The same as it is written in papers, with the gradient by autograd: the twin of ``rotate``."""
    cos_T1r, sin_T1r = cos_Tr[:, None], sin_Tr[:, None]
    a, b = _pairs(x_THd, interleaved)
    turned = (a * cos_T1r - b * sin_T1r, b * cos_T1r + a * sin_T1r)
    out = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return out.to(x_THd.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos_Tr, sin_Tr)
        ctx.interleaved = interleaved
        return _turn(x_THd, cos_Tr, sin_Tr, interleaved, 1.0)

    @staticmethod
    def backward(ctx: Any, grad_THd: Tensor) -> tuple[Tensor, None, None, None]:
        cos_Tr, sin_Tr = ctx.saved_tensors
        return _turn(grad_THd, cos_Tr, sin_Tr, ctx.interleaved, -1.0), None, None, None


def _turn(x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, interleaved: bool, sign: float) -> Tensor:
    cos_T1r, sin_T1r = cos_Tr[:, None], sin_Tr[:, None]
    out_THd = torch.empty(x_THd.shape, dtype=x_THd.dtype, device=x_THd.device)
    (a, b), (out_a, out_b) = _pairs(x_THd.to(cos_Tr.dtype), interleaved), _pairs(out_THd, interleaved)
    out_a.copy_((a * cos_T1r).addcmul_(b, sin_T1r, value=-sign))
    out_b.copy_((b * cos_T1r).addcmul_(a, sin_T1r, value=sign))
    return out_THd


def _pairs(x_THd: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second of every pair."""
    if interleaved:
        return x_THd[..., 0::2], x_THd[..., 1::2]
    first, second = x_THd.chunk(2, dim=-1)
    return first, second
