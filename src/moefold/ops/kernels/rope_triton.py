"""Rotary positions of queries and keys in one launch, forward and backward.

T tokens, H query heads, G key heads, d entries per head, of which the last 2r are turned as r pairs.

One program turns all heads of one token. The angle depends on the token only, so its cosines and sines are loaded once
and stay in registers while the heads pass by; a program per head would load them H + G times. Pairs are (i, i + r), or
neighbours when ``INTERLEAVED``; neighbours are loaded together and taken apart in registers, so that threads still read
consecutive addresses.

Backward is the same kernel with the angle's sign changed: what it turned, it turns back. (YaRN makes the tables longer
than 1. A gradient is then multiplied by that length once more, not divided: the transpose of a turn, not its inverse.)

Heads of latent attention have d - 2r entries that are not turned. They are copied, unless the caller allows the kernel
to work ``in_place``: then they are not even looked at, in either direction.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.ops.kernels.aot_specs import Build, Traffic

# Heads that one program turns at a time.
HEADS = 16


# ---- the kernel ----


@triton.jit
def load_pairs(place, inside, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Both entries of every pair, in float32. ``place`` has the address of each head's first turned entry."""
    if INTERLEAVED:
        entry = tl.arange(0, 2 * BLOCK)
        here = inside[:, None] & (entry < 2 * PAIRS)[None, :]
        both = tl.load(place[:, None] + entry[None, :], mask=here, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (HEADS, BLOCK, 2)))
    else:
        pair = tl.arange(0, BLOCK)
        here = inside[:, None] & (pair < PAIRS)[None, :]
        first = tl.load(place[:, None] + pair[None, :], mask=here, other=0.0).to(tl.float32)
        second = tl.load(place[:, None] + PAIRS + pair[None, :], mask=here, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(
    place, inside, first, second,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        entry = tl.arange(0, 2 * BLOCK)
        here = inside[:, None] & (entry < 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(first, second), (HEADS, 2 * BLOCK))
        tl.store(place[:, None] + entry[None, :], both.to(place.dtype.element_ty), mask=here)
    else:
        pair = tl.arange(0, BLOCK)
        here = inside[:, None] & (pair < PAIRS)[None, :]
        tl.store(place[:, None] + pair[None, :], first.to(place.dtype.element_ty), mask=here)
        tl.store(place[:, None] + PAIRS + pair[None, :], second.to(place.dtype.element_ty), mask=here)


@triton.jit
def load_tables(cos, sin, token, BACK: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """One token's cosines and sines; of the opposite angle with BACK."""
    pair = tl.arange(0, BLOCK)
    c = tl.load(cos + token * PAIRS + pair, mask=pair < PAIRS, other=0.0)
    s = tl.load(sin + token * PAIRS + pair, mask=pair < PAIRS, other=0.0)
    if BACK:
        s = -s
    return c, s


@triton.jit
def _turn_heads(
    x, out, stride, c, s,
    NUM: tl.constexpr, PLAIN: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, COPY: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PLAIN: tl.constexpr,
):  # fmt: skip
    """All heads of one token. ``stride`` lies between two heads of x; heads of the result are next to each other."""
    for start in range(0, NUM, HEADS):
        head = start + tl.arange(0, HEADS)
        inside = head < NUM
        source = x + head * stride
        to = out + head * (stride if not COPY else PLAIN + 2 * PAIRS)
        first, second = load_pairs(source + PLAIN, inside, PAIRS, INTERLEAVED, HEADS, BLOCK)
        turned = first * c[None, :] - second * s[None, :]
        other = second * c[None, :] + first * s[None, :]
        store_pairs(to + PLAIN, inside, turned, other, PAIRS, INTERLEAVED, HEADS, BLOCK)
        if COPY and PLAIN > 0:
            entry = tl.arange(0, BLOCK_PLAIN)
            here = inside[:, None] & (entry < PLAIN)[None, :]
            plain = tl.load(source[:, None] + entry[None, :], mask=here, other=0.0)
            tl.store(to[:, None] + entry[None, :], plain, mask=here)


@triton.jit
def turn_kernel(
    q, k, out_q, out_k, cos, sin, q_token, q_head, k_token, k_head,
    H: tl.constexpr, G: tl.constexpr, PLAIN: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr, COPY: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PLAIN: tl.constexpr,
):  # fmt: skip
    """One token: its H query heads and its G key heads, which may be none."""
    token = tl.program_id(0).to(tl.int64)
    c, s = load_tables(cos, sin, token, BACK, PAIRS, BLOCK)
    step_q = q_token if not COPY else H * (PLAIN + 2 * PAIRS)
    _turn_heads(
        q + token * q_token, out_q + token * step_q, q_head, c, s,
        H, PLAIN, PAIRS, INTERLEAVED, COPY, HEADS, BLOCK, BLOCK_PLAIN,
    )  # fmt: skip
    if G > 0:
        step_k = k_token if not COPY else G * (PLAIN + 2 * PAIRS)
        _turn_heads(
            k + token * k_token, out_k + token * step_k, k_head, c, s,
            G, PLAIN, PAIRS, INTERLEAVED, COPY, HEADS, BLOCK, BLOCK_PLAIN,
        )  # fmt: skip


# ---- how it is called ----


def launch(
    q_THd: Tensor, k_TGd: Tensor | None, cos_Tr: Tensor, sin_Tr: Tensor, interleaved: bool, back: bool, in_place: bool
) -> tuple[Tensor, Tensor | None]:
    """The turned heads: new tensors, or the given ones."""
    (num_tokens, num_heads, head_dim), pairs = q_THd.shape, cos_Tr.shape[1]
    if cos_Tr.dtype != torch.float32 or sin_Tr.dtype != torch.float32:
        raise ValueError(f"the kernel takes tables of float32, not {cos_Tr.dtype}; moefold.ops.rope takes any")
    q_THd = _entries_adjacent(q_THd, in_place)
    k = q_THd if k_TGd is None else _entries_adjacent(k_TGd, in_place)
    out_q, out_k = (q_THd, k) if in_place else (q_THd.new_empty(q_THd.shape), k.new_empty(k.shape))
    turn_kernel[(num_tokens,)](
        q_THd, k, out_q, out_k, cos_Tr.contiguous(), sin_Tr.contiguous(),
        q_THd.stride(0), q_THd.stride(1), k.stride(0), k.stride(1),
        H=num_heads, G=0 if k_TGd is None else k.shape[1], BACK=back,
        **shape_constants(head_dim, pairs, interleaved, in_place), num_warps=4,
    )  # fmt: skip
    return out_q, None if k_TGd is None else out_k


def shape_constants(head_dim: int, pairs: int, interleaved: bool, in_place: bool) -> dict[str, int | bool]:
    plain = head_dim - 2 * pairs
    return {
        "PLAIN": plain,
        "PAIRS": pairs,
        "INTERLEAVED": interleaved,
        "COPY": not in_place,
        "HEADS": HEADS,
        "BLOCK": triton.next_power_of_2(pairs),
        "BLOCK_PLAIN": triton.next_power_of_2(max(plain, 1)),
    }


def _entries_adjacent(x_THd: Tensor, in_place: bool) -> Tensor:
    """Tokens and heads may lie anywhere (a slice of a joint projection), the entries of a head must be neighbours."""
    if in_place and not _can_be_overwritten(x_THd):
        raise ValueError(f"cannot turn in place: strides {x_THd.stride()} of shape {tuple(x_THd.shape)}")
    return x_THd if x_THd.stride(-1) == 1 else x_THd.contiguous()


def _can_be_overwritten(x_THd: Tensor) -> bool:
    """Neighbouring entries, and no two heads in the same place, as in an expanded tensor."""
    return x_THd.stride(-1) == 1 and 0 not in x_THd.stride()


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THd: Tensor, k_TGd: Tensor | None, cos_Tr: Tensor, sin_Tr: Tensor, interleaved: bool, in_place: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(cos_Tr, sin_Tr)
        ctx.interleaved, ctx.in_place = interleaved, in_place
        if in_place:
            ctx.mark_dirty(*(x for x in (q_THd, k_TGd) if x is not None))
        return launch(q_THd, k_TGd, cos_Tr, sin_Tr, interleaved, back=False, in_place=in_place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_Tr, sin_Tr = ctx.saved_tensors
        in_place = ctx.in_place and all(grad is None or _can_be_overwritten(grad) for grad in grads)
        dq, dk = launch(grads[0], grads[1], cos_Tr, sin_Tr, ctx.interleaved, back=True, in_place=in_place)
        return dq, dk, None, None, None, None


def turn(
    q_THd: Tensor, k_TGd: Tensor | None, cos_Tr: Tensor, sin_Tr: Tensor, interleaved: bool, in_place: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Turn the last 2r entries of every head by the token's angle. The twin is in ``rope_torch.py``.

    ``in_place`` is the caller's word that nobody else reads these tensors, nor the gradients that come back for them.
    """
    return _Turn.apply(q_THd, k_TGd, cos_Tr, sin_Tr, interleaved, in_place)


# ---- what it is built for, and what it moves ----


def traffic(heads: int, head_dim: int, pairs: int, in_place: bool, entry: int = 2) -> Traffic:
    """Per token, of queries and keys together; the tables are float32. The least is to leave unturned entries alone."""
    tables, least = 8 * pairs, 2 * heads * 2 * pairs * entry
    if in_place:
        return Traffic("8r (H+G) + 8r", least + tables, least + tables)
    return Traffic("4d (H+G) + 8r", 2 * heads * head_dim * entry + tables, least + tables)


_POINTERS = dict.fromkeys(("q", "k", "out_q", "out_k"), "*bf16") | dict.fromkeys(("cos", "sin"), "*fp32")
_STRIDES = dict.fromkeys(("q_token", "q_head", "k_token", "k_head"), "i32:16")


def _build(
    name: str, heads: int, kv_heads: int, head_dim: int, pairs: int, interleaved: bool, back: bool, in_place: bool
) -> Build:
    constants = {"H": heads, "G": kv_heads, "BACK": back, **shape_constants(head_dim, pairs, interleaved, in_place)}
    moved = traffic(heads + kv_heads, head_dim, pairs, in_place)
    return Build(name, turn_kernel, _POINTERS | _STRIDES, constants, moved, registers=64)


BUILDS = (
    _build("rope, Qwen3-235B", 64, 4, 128, 64, interleaved=False, back=False, in_place=False),
    _build("rope backward, Qwen3-235B", 64, 4, 128, 64, interleaved=False, back=True, in_place=False),
    _build("rope, Mixtral-8x7B", 32, 8, 128, 64, interleaved=False, back=False, in_place=False),
    _build("rope of queries, DeepSeek-V3", 128, 0, 192, 32, interleaved=True, back=False, in_place=False),
    _build("rope of queries, in place, DeepSeek-V3", 128, 0, 192, 32, interleaved=True, back=False, in_place=True),
)
