"""The keys of latent attention, put together in one pass: every head's own entries, then the turned ones all share.

T tokens, H heads, n entries of a key that are not turned, 2r turned entries (r pairs), v entries of a value, m = n + v.

The up projection yields heads_THm, a key part and a value part per head; the turned part comes from the latent
projection, once per token. In torch operations, turning writes it, expanding and joining writes all keys, and backward
takes the same steps: slices padded back to full size, a sum over heads, a turn. Here:

- forward reads the key parts and the one turned part, turns it in registers and writes it behind every head's own
  entries; values are a view and are not touched;
- backward reads d(key) and d(value) once and writes d(heads) as the projection wants it, both parts in place. The
  turned entries' gradients are added over the heads first, in float32, and turned back once: a turn is linear.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.ops.kernels.aot_specs import Build, Traffic
from moefold.ops.kernels.rope_triton import HEADS, load_pairs, load_tables, store_pairs


@triton.jit
def _copy(source, to, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """WIDTH entries of each of a block of heads, given their addresses."""
    entry = tl.arange(0, BLOCK)
    here = inside[:, None] & (entry < WIDTH)[None, :]
    tl.store(to[:, None] + entry[None, :], tl.load(source[:, None] + entry[None, :], mask=here, other=0.0), mask=here)


@triton.jit
def join_kernel(
    heads, turned, k, cos, sin, turned_token,
    H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """All keys of one token."""
    token = tl.program_id(0).to(tl.int64)
    c, s = load_tables(cos, sin, token, False, PAIRS, BLOCK)
    every = tl.arange(0, HEADS)
    # Every head loads the shared part: the first from memory, the others from the cache beside the arithmetic.
    first, second = load_pairs(turned + token * turned_token + every * 0, every >= 0, PAIRS, INTERLEAVED, HEADS, BLOCK)
    turned_first = first * c[None, :] - second * s[None, :]
    turned_second = second * c[None, :] + first * s[None, :]
    for start in range(0, H, HEADS):
        head = start + every
        source = heads + (token * H + head) * (N + V)
        to = k + (token * H + head) * (N + 2 * PAIRS)
        _copy(source, to, head < H, N, BLOCK_N)
        store_pairs(to + N, head < H, turned_first, turned_second, PAIRS, INTERLEAVED, HEADS, BLOCK)


@triton.jit
def part_kernel(
    dk, dv, dheads, dturned, cos, sin, dk_token, dk_head, dv_token, dv_head,
    H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradients of one token."""
    token = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, HEADS)
    sum_first = tl.zeros((HEADS, BLOCK), tl.float32)
    sum_second = tl.zeros((HEADS, BLOCK), tl.float32)
    for start in range(0, H, HEADS):
        head = start + every
        source = dk + token * dk_token + head * dk_head
        to = dheads + (token * H + head) * (N + V)
        _copy(source, to, head < H, N, BLOCK_N)
        _copy(dv + token * dv_token + head * dv_head, to + N, head < H, V, BLOCK_V)
        first, second = load_pairs(source + N, head < H, PAIRS, INTERLEAVED, HEADS, BLOCK)
        sum_first += first
        sum_second += second
    c, s = load_tables(cos, sin, token, True, PAIRS, BLOCK)
    first = tl.sum(sum_first, 0)[None, :]
    second = tl.sum(sum_second, 0)[None, :]
    one = tl.arange(0, 1)
    back_first = first * c[None, :] - second * s[None, :]
    back_second = second * c[None, :] + first * s[None, :]
    store_pairs(dturned + token * (2 * PAIRS) + one, one == 0, back_first, back_second, PAIRS, INTERLEAVED, 1, BLOCK)


def shape_constants(num_heads: int, nope: int, value: int, pairs: int, interleaved: bool) -> dict[str, int | bool]:
    return {
        "H": num_heads,
        "N": nope,
        "V": value,
        "PAIRS": pairs,
        "INTERLEAVED": interleaved,
        "HEADS": HEADS,
        "BLOCK": triton.next_power_of_2(pairs),
        "BLOCK_N": triton.next_power_of_2(nope),
    }


class _KeysAndValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads_THm: Tensor, turned_Ts: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, nope: int, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        (num_tokens, num_heads, both), pairs = heads_THm.shape, cos_Tr.shape[1]
        ctx.save_for_backward(cos_Tr, sin_Tr)
        ctx.constants = shape_constants(num_heads, nope, both - nope, pairs, interleaved)
        k_THd = heads_THm.new_empty(num_tokens, num_heads, nope + 2 * pairs)
        join_kernel[(num_tokens,)](
            heads_THm, turned_Ts, k_THd, cos_Tr, sin_Tr, turned_Ts.stride(0), **ctx.constants, num_warps=4
        )
        return k_THd, heads_THm[..., nope:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_Tr, sin_Tr = ctx.saved_tensors
        dk_THd, dv_THv = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        (num_tokens, num_heads, value), nope = dv_THv.shape, ctx.constants["N"]
        dheads_THm = dk_THd.new_empty(num_tokens, num_heads, nope + value)
        dturned_Ts = dk_THd.new_empty(num_tokens, 2 * cos_Tr.shape[1])
        part_kernel[(num_tokens,)](
            dk_THd, dv_THv, dheads_THm, dturned_Ts, cos_Tr, sin_Tr,
            dk_THd.stride(0), dk_THd.stride(1), dv_THv.stride(0), dv_THv.stride(1),
            **ctx.constants, BLOCK_V=triton.next_power_of_2(value), num_warps=4,
        )  # fmt: skip
        return dheads_THm, dturned_Ts, None, None, None, None


def keys_and_values(
    heads_THm: Tensor, turned_Ts: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, nope: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Keys [T, H, n + 2r] and values [T, H, v], which are a view, from the up projection and the shared turned part.

    The twin is in ``rope_torch.py``.
    """
    if cos_Tr.dtype != torch.float32:
        raise ValueError(f"the kernel takes tables of float32, not {cos_Tr.dtype}; its twin takes any")
    turned_Ts = turned_Ts if turned_Ts.stride(-1) == 1 else turned_Ts.contiguous()
    heads_THm, cos_Tr, sin_Tr = heads_THm.contiguous(), cos_Tr.contiguous(), sin_Tr.contiguous()
    return _KeysAndValues.apply(heads_THm, turned_Ts, cos_Tr, sin_Tr, nope, interleaved)


# ---- what it is built for, and what it moves ----


def join_traffic(heads: int, nope: int, pairs: int, entry: int = 2) -> Traffic:
    """Per token. The least that ends in keys of full size, which is what attention kernels take."""
    moved = entry * (heads * (2 * nope + 2 * pairs) + 2 * pairs) + 8 * pairs
    return Traffic("4H (n + r) + 12r", moved, moved)


def part_traffic(heads: int, nope: int, value: int, pairs: int, entry: int = 2) -> Traffic:
    moved = entry * (heads * (2 * nope + 2 * value + 2 * pairs) + 2 * pairs) + 8 * pairs
    return Traffic("4H (n + v + r) + 12r", moved, moved)


_TABLES = {"cos": "*fp32", "sin": "*fp32"}
_STRIDES = dict.fromkeys(("dk_token", "dk_head", "dv_token", "dv_head"), "i32:16")
_DEEPSEEK = shape_constants(128, 128, 128, 32, interleaved=True)
BUILDS = (
    Build(
        "latent keys, DeepSeek-V3", join_kernel,
        {"heads": "*bf16", "turned": "*bf16", "k": "*bf16", "turned_token": "i32:16", **_TABLES}, _DEEPSEEK,
        join_traffic(128, 128, 32), registers=64,
    ),
    Build(
        "latent keys backward, DeepSeek-V3", part_kernel,
        {"dk": "*bf16", "dv": "*bf16", "dheads": "*bf16", "dturned": "*bf16", **_TABLES, **_STRIDES},
        _DEEPSEEK | {"BLOCK_V": 128}, part_traffic(128, 128, 128, 32), registers=80,
    ),
)  # fmt: skip
