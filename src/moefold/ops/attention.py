"""Causal attention within equal-length sequences: the obvious way, and the way that never writes the scores down.

B sequences of S tokens, T = B*S, H query heads, G key/value heads, d query and key entries, v value entries.

Query head h looks at key/value head h // (H/G). A window lets a token see that many positions back, itself included. A
sink is a learned logit per head that takes its part of the softmax and carries no value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.ops.cast import widened


def attend(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    num_sequences: int,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Through torch's fused attention, in memory that grows with T and not with its square."""
    q, k, v = (_by_head(x, num_sequences) for x in (q_THd, k_TGd, v_TGv))
    length, value_dim = q.shape[2], v.shape[-1]
    mask = None
    if sinks_H is not None:
        q, k, v, mask = _with_sink_key(q, k, v, visible(length, window, q.device), sinks_H / scale)
    elif window is not None and window < length:
        mask = visible(length, window, q.device)
    # The fused kernels want one width for keys and values; zeros in the value change nothing.
    v = F.pad(v, (0, q.shape[-1] - value_dim)) if value_dim < q.shape[-1] else v
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=gqa)
    return out[..., :value_dim].transpose(1, 2).flatten(0, 1)


def attend_naive(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    num_sequences: int,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Scores, mask, softmax, average: the twin that ``attend`` must equal."""
    q, k, v = (_by_head(x, num_sequences) for x in (q_THd, k_TGd, v_TGv))
    shared_by = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared_by, dim=1), v.repeat_interleave(shared_by, dim=1)
    scores = widened(q @ k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~visible(q.shape[2], window, q.device), -torch.inf)
    if sinks_H is not None:
        sink = sinks_H.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    share = scores.softmax(dim=-1)[..., : q.shape[2]]
    return (share.to(v.dtype) @ v).transpose(1, 2).flatten(0, 1)


def visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """[S, S], true where the row's token may look at the column's."""
    position = torch.arange(length, device=device)
    back = position[:, None] - position
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def _by_head(x_THd: Tensor, num_sequences: int) -> Tensor:
    return x_THd.unflatten(0, (num_sequences, -1)).transpose(1, 2)


def _with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink_logit_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sink as one more key with no value: queries get an entry that only this key answers.

    Its logit is then an ordinary query-key product, so the fused kernel needs to know nothing of sinks and their
    gradient arrives through the queries.
    """
    q_sink = sink_logit_H.to(q.dtype)[None, :, None, None].expand(*q.shape[:-1], 1)
    sink_key = F.pad(k.new_zeros(*k.shape[:2], 1, k.shape[-1]), (0, 1), value=1.0)
    q = torch.cat((q, q_sink), dim=-1)
    k = torch.cat((F.pad(k, (0, 1)), sink_key), dim=-2)
    return q, k, F.pad(v, (0, 0, 0, 1)), F.pad(mask, (0, 1), value=True)
