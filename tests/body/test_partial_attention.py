"""Parts of attention: fused against plain, both against autograd, and parts against the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moefold.attention.mask_blocks import band
from moefold.attention.partial_attention import FUSED, PLAIN, Parts, merge_, merge_sinks_, sink_gradients

BOTH = pytest.mark.parametrize("parts", [FUSED, PLAIN], ids=["fused", "plain"])
# blocks, heads, kv heads, queries, keys, qk dim, v dim
SHAPES = {
    "square": (1, 2, 2, 5, 5, 4, 4),
    "grouped": (2, 6, 2, 5, 9, 4, 4),
    "latent": (2, 3, 3, 7, 4, 6, 4),
    "wide values": (1, 2, 1, 3, 5, 4, 6),
    "no queries": (1, 2, 1, 0, 5, 4, 4),
    "no keys": (1, 2, 1, 3, 0, 4, 6),
}


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(7**i * n for i, n in enumerate(shape)))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _inputs(shape: tuple[int, ...]) -> list[Tensor]:
    blocks, heads, kv_heads, queries, keys, dim, value_dim = shape
    sizes = ((heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim), (heads, queries, value_dim))
    return [_random(blocks, *size) for size in sizes]


@pytest.mark.parametrize(
    "name, sight", [("square", "causal"), *((name, s) for name in SHAPES for s in ("full", "band"))]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fused_equals_plain(name: str, sight: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    queries, keys = shape[3:5]
    q, k, v, grad = (x.to(dtype) for x in _inputs(shape))
    # The band leaves some rows with nothing to see, before and behind it.
    mask = band(queries, keys, -1, 3, q.device) if sight == "band" else None
    how = {"scale": 0.3, "causal": sight == "causal", "mask_nm": mask}
    (out, lse), (plain_out, plain_lse) = (parts.attend(q, k, v, **how) for parts in (FUSED, PLAIN))
    assert out.dtype == dtype
    assert lse.dtype == plain_lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out, plain_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, plain_lse, rtol=tolerance, atol=tolerance)
    # As if more keys had been seen elsewhere.
    merge_(out, lse, _random(*out.shape).to(dtype), _random(*lse.shape).to(lse.dtype))
    fused, plain = (parts.gradients(grad, q, k, v, out, lse, **how) for parts in (FUSED, PLAIN))
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=tolerance, atol=tolerance)


@BOTH
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("with_sinks", [False, True])
def test_parts_add_up_to_the_whole(parts: Parts, shape: tuple[int, ...], with_sinks: bool) -> None:
    """Keys in three parts, one of them empty, some rows blind in one part or in all of them."""
    q, k, v, grad = _inputs(shape)
    queries, keys, heads = shape[3], shape[4], shape[1]
    mask = band(queries, keys, -1, 4, q.device)
    sinks = _random(heads)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    whole = _whole(*leaves[:3], mask, leaves[3] if with_sinks else None)

    cuts = [(0, keys // 2), (keys // 2, keys // 2), (keys // 2, keys)]
    out, lse = torch.zeros_like(grad), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
    for start, stop in cuts:
        part = parts.attend(
            q, k[:, :, start:stop], v[:, :, start:stop], scale=0.3, causal=False, mask_nm=mask[:, start:stop]
        )
        merge_(out, lse, *part)
    if with_sinks:
        merge_sinks_(out.transpose(1, 2), lse.transpose(1, 2), sinks)
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)

    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start, stop in cuts:
        add_q, add_k, add_v = parts.gradients(
            grad,
            q,
            k[:, :, start:stop],
            v[:, :, start:stop],
            out,
            lse,
            scale=0.3,
            causal=False,
            mask_nm=mask[:, start:stop],
        )
        dq += add_q
        dk[:, :, start:stop] += add_k
        dv[:, :, start:stop] += add_v
    expected = torch.autograd.grad(whole, leaves, grad, materialize_grads=True)
    for a, b in zip((dq, dk, dv), expected[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    if with_sinks:
        by_row = (x.transpose(1, 2).flatten(0, 1) for x in (grad, out, lse))
        torch.testing.assert_close(sink_gradients(*by_row, sinks), expected[3], rtol=1e-12, atol=1e-12)


def _whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    power = ((q @ k.transpose(-1, -2)) * 0.3).exp() * mask
    total = power.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return (power / torch.where(total == 0, 1.0, total)) @ v
