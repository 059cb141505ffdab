"""The twins of the kernels that turn queries and keys, in plain torch.

T tokens, H heads of queries, G of keys, d entries per head, r pairs that turn: the last 2r entries of a head.
For latent attention: n entries of a key that do not turn, v of a value, m = n + v, s = 2r.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.ops.rope import rotate


def turn(
    q_THd: Tensor, k_TGd: Tensor | None, cos_Tr: Tensor, sin_Tr: Tensor, interleaved: bool, in_place: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Turn the last 2r entries of every head by the token's angle. ``in_place`` is allowed and not made use of."""

    def turned(x_THd: Tensor) -> Tensor:
        if x_THd.shape[-1] == 2 * cos_Tr.shape[-1]:
            return rotate(x_THd, cos_Tr, sin_Tr, interleaved)
        still, turning = x_THd.split((x_THd.shape[-1] - 2 * cos_Tr.shape[-1], 2 * cos_Tr.shape[-1]), dim=-1)
        return torch.cat((still, rotate(turning, cos_Tr, sin_Tr, interleaved)), dim=-1)

    return turned(q_THd), None if k_TGd is None else turned(k_TGd)


def keys_and_values(
    heads_THm: Tensor, turned_Ts: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, nope: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Keys [T, H, n + 2r] and values [T, H, v] from the up projection and the turned part that all heads share."""
    plain_THn, v_THv = heads_THm.split((nope, heads_THm.shape[-1] - nope), dim=-1)
    turned_THs = rotate(turned_Ts[:, None], cos_Tr, sin_Tr, interleaved).expand(-1, heads_THm.shape[1], -1)
    return torch.cat((plain_THn, turned_THs), dim=-1), v_THv
