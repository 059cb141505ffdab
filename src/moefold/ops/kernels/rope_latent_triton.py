"""The keys of latent attention (MLA) in one pass: every head's own nope entries, then the rotary ones that all share.

The up projection yields kv_SHX, a key part and a value part per head; the rotary part comes from the latent
projection, once per token. In torch, rotation writes it, expand and cat write all keys, and backward does the reverse:
slices padded to full size, a sum over heads, a rotation. Here:

- forward reads the key parts and the rotary part, rotates it in registers and writes it behind every head's own
  entries; values are a view and are not touched;
- backward reads d(key) and d(value) once and writes d(kv) in the projection's layout. The rotary entries' gradients are
  summed over the heads first, in float32, and rotated back once, since rotation is linear.
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
def _copy(source, to, inside, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """NUM entries of each of a block of heads, given their addresses."""
    entry = tl.arange(0, BLOCK)
    mask = inside[:, None] & (entry < NUM)[None, :]
    tl.store(to[:, None] + entry[None, :], tl.load(source[:, None] + entry[None, :], mask=mask, other=0.0), mask=mask)


@triton.jit
def forward_kernel(
    kv, k_rope, k, cos, sin, k_rope_token,
    H: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_NOPE: tl.constexpr,
):  # fmt: skip
    """All keys of one token."""
    token = tl.program_id(0).to(tl.int64)
    c, s = load_tables(cos, sin, token, False, PAIRS, BLOCK)
    every = tl.arange(0, HEADS)
    # Every head loads the shared part: the first from memory, the others from the cache.
    first, second = load_pairs(k_rope + token * k_rope_token + every * 0, every >= 0, PAIRS, INTERLEAVED, HEADS, BLOCK)
    rotated_first = first * c[None, :] - second * s[None, :]
    rotated_second = second * c[None, :] + first * s[None, :]
    for start in range(0, H, HEADS):
        head = start + every
        source = kv + (token * H + head) * (NOPE + VALUE)
        to = k + (token * H + head) * (NOPE + 2 * PAIRS)
        _copy(source, to, head < H, NOPE, BLOCK_NOPE)
        store_pairs(to + NOPE, head < H, rotated_first, rotated_second, PAIRS, INTERLEAVED, HEADS, BLOCK)


@triton.jit
def backward_kernel(
    dk, dv, dkv, dk_rope, cos, sin, dk_token, dk_head, dv_token, dv_head,
    H: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_NOPE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """The gradients of one token."""
    token = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, HEADS)
    sum_first = tl.zeros((HEADS, BLOCK), tl.float32)
    sum_second = tl.zeros((HEADS, BLOCK), tl.float32)
    for start in range(0, H, HEADS):
        head = start + every
        source = dk + token * dk_token + head * dk_head
        to = dkv + (token * H + head) * (NOPE + VALUE)
        _copy(source, to, head < H, NOPE, BLOCK_NOPE)
        _copy(dv + token * dv_token + head * dv_head, to + NOPE, head < H, VALUE, BLOCK_VALUE)
        first, second = load_pairs(source + NOPE, head < H, PAIRS, INTERLEAVED, HEADS, BLOCK)
        sum_first += first
        sum_second += second
    c, s = load_tables(cos, sin, token, True, PAIRS, BLOCK)
    first = tl.sum(sum_first, 0)[None, :]
    second = tl.sum(sum_second, 0)[None, :]
    one = tl.arange(0, 1)
    back_first = first * c[None, :] - second * s[None, :]
    back_second = second * c[None, :] + first * s[None, :]
    store_pairs(dk_rope + token * (2 * PAIRS) + one, one == 0, back_first, back_second, PAIRS, INTERLEAVED, 1, BLOCK)


def shape_constants(num_heads: int, nope: int, value: int, pairs: int, interleaved: bool) -> dict[str, int | bool]:
    return {
        "H": num_heads,
        "NOPE": nope,
        "VALUE": value,
        "PAIRS": pairs,
        "INTERLEAVED": interleaved,
        "HEADS": HEADS,
        "BLOCK": triton.next_power_of_2(pairs),
        "BLOCK_NOPE": triton.next_power_of_2(nope),
    }


class _KeysAndValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kv_SHX: Tensor, k_rope_SX: Tensor, cos_Sr: Tensor, sin_Sr: Tensor, nope: int, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        (num_tokens, num_heads, both), pairs = kv_SHX.shape, cos_Sr.shape[1]
        ctx.save_for_backward(cos_Sr, sin_Sr)
        ctx.constants = shape_constants(num_heads, nope, both - nope, pairs, interleaved)
        k_SHC = kv_SHX.new_empty(num_tokens, num_heads, nope + 2 * pairs)
        forward_kernel[(num_tokens,)](
            kv_SHX, k_rope_SX, k_SHC, cos_Sr, sin_Sr, k_rope_SX.stride(0), **ctx.constants, num_warps=4
        )
        return k_SHC, kv_SHX[..., nope:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_Sr, sin_Sr = ctx.saved_tensors
        dk_SHC, dv_SHU = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        (num_tokens, num_heads, value), nope = dv_SHU.shape, ctx.constants["NOPE"]
        dkv_SHX = dk_SHC.new_empty(num_tokens, num_heads, nope + value)
        dk_rope_SX = dk_SHC.new_empty(num_tokens, 2 * cos_Sr.shape[1])
        backward_kernel[(num_tokens,)](
            dk_SHC, dv_SHU, dkv_SHX, dk_rope_SX, cos_Sr, sin_Sr,
            dk_SHC.stride(0), dk_SHC.stride(1), dv_SHU.stride(0), dv_SHU.stride(1),
            **ctx.constants, BLOCK_VALUE=triton.next_power_of_2(value), num_warps=4,
        )  # fmt: skip
        return dkv_SHX, dk_rope_SX, None, None, None, None


def keys_and_values(
    kv_SHX: Tensor, k_rope_SX: Tensor, cos_Sr: Tensor, sin_Sr: Tensor, nope: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Keys [S, H, C] and values [S, H, U], which are a view, from the up projection and the shared rotary part.

    The reference is ``moefold.ops.rope.keys_and_values``.
    """
    if cos_Sr.dtype != torch.float32:
        raise ValueError(f"the kernel takes tables of float32, not {cos_Sr.dtype}; moefold.ops.rope takes any")
    k_rope_SX = k_rope_SX if k_rope_SX.stride(-1) == 1 else k_rope_SX.contiguous()
    kv_SHX, cos_Sr, sin_Sr = kv_SHX.contiguous(), cos_Sr.contiguous(), sin_Sr.contiguous()
    return _KeysAndValues.apply(kv_SHX, k_rope_SX, cos_Sr, sin_Sr, nope, interleaved)


# ---- builds and traffic ----


def forward_traffic(heads: int, nope: int, pairs: int, entry: int = 2) -> Traffic:
    """Per token. The minimum for keys of full size, as attention kernels take them."""
    moved = entry * (heads * (2 * nope + 2 * pairs) + 2 * pairs) + 8 * pairs
    return Traffic("4H (C - r) + 12r", moved, moved)


def backward_traffic(heads: int, nope: int, value: int, pairs: int, entry: int = 2) -> Traffic:
    moved = entry * (heads * (2 * nope + 2 * value + 2 * pairs) + 2 * pairs) + 8 * pairs
    return Traffic("4H (C + U - r) + 12r", moved, moved)


_TABLES = {"cos": "*fp32", "sin": "*fp32"}
_STRIDES = dict.fromkeys(("dk_token", "dk_head", "dv_token", "dv_head"), "i32:16")
_DEEPSEEK = shape_constants(128, 128, 128, 32, interleaved=True)
BUILDS = (
    Build(
        "latent keys, DeepSeek-V3", forward_kernel,
        {"kv": "*bf16", "k_rope": "*bf16", "k": "*bf16", "k_rope_token": "i32:16", **_TABLES}, _DEEPSEEK,
        forward_traffic(128, 128, 32), registers=64,
    ),
    Build(
        "latent keys backward, DeepSeek-V3", backward_kernel,
        {"dk": "*bf16", "dv": "*bf16", "dkv": "*bf16", "dk_rope": "*bf16", **_TABLES, **_STRIDES},
        _DEEPSEEK | {"BLOCK_VALUE": 128}, backward_traffic(128, 128, 128, 32), registers=80,
    ),
)  # fmt: skip
