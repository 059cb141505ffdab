"""RoPE of queries and keys in one launch, forward and backward.

One program rotates the last 2r entries of all heads of one token. The angle depends on the token only, so its cosines
and sines are loaded once and stay in registers; a program per head would load them H + J times. Pairs are (i, i + r),
or (2i, 2i + 1) when ``INTERLEAVED``; these are loaded together and split in registers, so that threads read consecutive
addresses.

Backward is the same kernel with the negative angle. (YaRN scales the tables. A gradient is multiplied by that scale as
well, not divided by it: backward is the transpose, not the inverse.)

Heads of latent attention have C - 2r entries that are not rotated. They are copied, unless the caller permits
``in_place``: then they are neither read nor written, forward or backward.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.ops.kernels.aot_specs import Build, Traffic

# Heads that one program rotates at a time.
HEADS = 16


# ---- the kernel ----


@triton.jit
def load_pairs(place, inside, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Both entries of every pair, in float32. ``place`` has the address of each head's first rotated entry."""
    if INTERLEAVED:
        entry = tl.arange(0, 2 * BLOCK)
        mask = inside[:, None] & (entry < 2 * PAIRS)[None, :]
        both = tl.load(place[:, None] + entry[None, :], mask=mask, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (HEADS, BLOCK, 2)))
    else:
        pair = tl.arange(0, BLOCK)
        mask = inside[:, None] & (pair < PAIRS)[None, :]
        first = tl.load(place[:, None] + pair[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(place[:, None] + PAIRS + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(
    place, inside, first, second,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        entry = tl.arange(0, 2 * BLOCK)
        mask = inside[:, None] & (entry < 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(first, second), (HEADS, 2 * BLOCK))
        tl.store(place[:, None] + entry[None, :], both.to(place.dtype.element_ty), mask=mask)
    else:
        pair = tl.arange(0, BLOCK)
        mask = inside[:, None] & (pair < PAIRS)[None, :]
        tl.store(place[:, None] + pair[None, :], first.to(place.dtype.element_ty), mask=mask)
        tl.store(place[:, None] + PAIRS + pair[None, :], second.to(place.dtype.element_ty), mask=mask)


@triton.jit
def load_tables(cos, sin, token, BACK: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """One token's cosines and sines; of the negative angle with BACK."""
    pair = tl.arange(0, BLOCK)
    c = tl.load(cos + token * PAIRS + pair, mask=pair < PAIRS, other=0.0)
    s = tl.load(sin + token * PAIRS + pair, mask=pair < PAIRS, other=0.0)
    if BACK:
        s = -s
    return c, s


@triton.jit
def _rotate_heads(
    x, out, stride, c, s,
    NUM: tl.constexpr, PLAIN: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, COPY: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PLAIN: tl.constexpr,
):  # fmt: skip
    """All heads of one token. ``stride`` is that of x's heads; heads of the output are contiguous."""
    for start in range(0, NUM, HEADS):
        head = start + tl.arange(0, HEADS)
        inside = head < NUM
        source = x + head * stride
        to = out + head * (stride if not COPY else PLAIN + 2 * PAIRS)
        first, second = load_pairs(source + PLAIN, inside, PAIRS, INTERLEAVED, HEADS, BLOCK)
        rotated = first * c[None, :] - second * s[None, :]
        other = second * c[None, :] + first * s[None, :]
        store_pairs(to + PLAIN, inside, rotated, other, PAIRS, INTERLEAVED, HEADS, BLOCK)
        if COPY and PLAIN > 0:
            entry = tl.arange(0, BLOCK_PLAIN)
            mask = inside[:, None] & (entry < PLAIN)[None, :]
            plain = tl.load(source[:, None] + entry[None, :], mask=mask, other=0.0)
            tl.store(to[:, None] + entry[None, :], plain, mask=mask)


@triton.jit
def rotate_kernel(
    q, k, out_q, out_k, cos, sin, q_token, q_head, k_token, k_head,
    H: tl.constexpr, J: tl.constexpr, PLAIN: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr, COPY: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PLAIN: tl.constexpr,
):  # fmt: skip
    """One token: its H query heads and its J key heads; J may be 0."""
    token = tl.program_id(0).to(tl.int64)
    c, s = load_tables(cos, sin, token, BACK, PAIRS, BLOCK)
    step_q = q_token if not COPY else H * (PLAIN + 2 * PAIRS)
    _rotate_heads(
        q + token * q_token, out_q + token * step_q, q_head, c, s,
        H, PLAIN, PAIRS, INTERLEAVED, COPY, HEADS, BLOCK, BLOCK_PLAIN,
    )  # fmt: skip
    if J > 0:
        step_k = k_token if not COPY else J * (PLAIN + 2 * PAIRS)
        _rotate_heads(
            k + token * k_token, out_k + token * step_k, k_head, c, s,
            J, PLAIN, PAIRS, INTERLEAVED, COPY, HEADS, BLOCK, BLOCK_PLAIN,
        )  # fmt: skip


# ---- launches ----


def launch(
    q_SHC: Tensor, k_SJC: Tensor | None, cos_Sr: Tensor, sin_Sr: Tensor, interleaved: bool, back: bool, in_place: bool
) -> tuple[Tensor, Tensor | None]:
    """The rotated heads: new tensors, or the given ones with ``in_place``."""
    (num_tokens, num_heads, head_dim), pairs = q_SHC.shape, cos_Sr.shape[1]
    if cos_Sr.dtype != torch.float32 or sin_Sr.dtype != torch.float32:
        raise ValueError(f"the kernel takes tables of float32, not {cos_Sr.dtype}; moefold.ops.rope takes any")
    q_SHC = _entries_adjacent(q_SHC, in_place)
    k = q_SHC if k_SJC is None else _entries_adjacent(k_SJC, in_place)
    out_q, out_k = (q_SHC, k) if in_place else (q_SHC.new_empty(q_SHC.shape), k.new_empty(k.shape))
    rotate_kernel[(num_tokens,)](
        q_SHC, k, out_q, out_k, cos_Sr.contiguous(), sin_Sr.contiguous(),
        q_SHC.stride(0), q_SHC.stride(1), k.stride(0), k.stride(1),
        H=num_heads, J=0 if k_SJC is None else k.shape[1], BACK=back,
        **shape_constants(head_dim, pairs, interleaved, in_place), num_warps=4,
    )  # fmt: skip
    return out_q, None if k_SJC is None else out_k


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


def _entries_adjacent(x_SHC: Tensor, in_place: bool) -> Tensor:
    """Tokens and heads may have any strides (a slice of a joint projection); a head's entries must be contiguous."""
    if in_place and not _can_be_overwritten(x_SHC):
        raise ValueError(f"cannot rotate in place: strides {x_SHC.stride()} of shape {tuple(x_SHC.shape)}")
    return x_SHC if x_SHC.stride(-1) == 1 else x_SHC.contiguous()


def _can_be_overwritten(x_SHC: Tensor) -> bool:
    """Contiguous entries, and no two heads at the same address, as in an expanded tensor."""
    return x_SHC.stride(-1) == 1 and 0 not in x_SHC.stride()


class _RotateQK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_SHC: Tensor, k_SJC: Tensor | None, cos_Sr: Tensor, sin_Sr: Tensor, interleaved: bool, in_place: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(cos_Sr, sin_Sr)
        ctx.interleaved, ctx.in_place = interleaved, in_place
        if in_place:
            ctx.mark_dirty(*(x for x in (q_SHC, k_SJC) if x is not None))
        return launch(q_SHC, k_SJC, cos_Sr, sin_Sr, interleaved, back=False, in_place=in_place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_Sr, sin_Sr = ctx.saved_tensors
        in_place = ctx.in_place and all(grad is None or _can_be_overwritten(grad) for grad in grads)
        dq, dk = launch(grads[0], grads[1], cos_Sr, sin_Sr, ctx.interleaved, back=True, in_place=in_place)
        return dq, dk, None, None, None, None


def rotate_qk(
    q_SHC: Tensor, k_SJC: Tensor | None, cos_Sr: Tensor, sin_Sr: Tensor, interleaved: bool, in_place: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Rotate the last 2r entries of every head by the token's angle. The reference is ``moefold.ops.rope.rotate_qk``.

    With ``in_place`` the caller guarantees that nothing else reads these tensors, nor their incoming gradients.
    """
    return _RotateQK.apply(q_SHC, k_SJC, cos_Sr, sin_Sr, interleaved, in_place)


# ---- builds and traffic ----


def traffic(heads: int, head_dim: int, pairs: int, in_place: bool, entry: int = 2) -> Traffic:
    """Per token, of queries and keys together; the tables are float32. The minimum skips entries without rotation."""
    tables, minimum = 8 * pairs, 2 * heads * 2 * pairs * entry
    if in_place:
        return Traffic("8r (H+J) + 8r", minimum + tables, minimum + tables)
    return Traffic("4C (H+J) + 8r", 2 * heads * head_dim * entry + tables, minimum + tables)


_POINTERS = dict.fromkeys(("q", "k", "out_q", "out_k"), "*bf16") | dict.fromkeys(("cos", "sin"), "*fp32")
_STRIDES = dict.fromkeys(("q_token", "q_head", "k_token", "k_head"), "i32:16")


def _build(
    name: str, heads: int, kv_heads: int, head_dim: int, pairs: int, interleaved: bool, back: bool, in_place: bool
) -> Build:
    constants = {"H": heads, "J": kv_heads, "BACK": back, **shape_constants(head_dim, pairs, interleaved, in_place)}
    moved = traffic(heads + kv_heads, head_dim, pairs, in_place)
    return Build(name, rotate_kernel, _POINTERS | _STRIDES, constants, moved, registers=64)


BUILDS = (
    _build("rope, Qwen3-235B", 64, 4, 128, 64, interleaved=False, back=False, in_place=False),
    _build("rope backward, Qwen3-235B", 64, 4, 128, 64, interleaved=False, back=True, in_place=False),
    _build("rope, Mixtral-8x7B", 32, 8, 128, 64, interleaved=False, back=False, in_place=False),
    _build("rope of queries, DeepSeek-V3", 128, 0, 192, 32, interleaved=True, back=False, in_place=False),
    _build("rope of queries, in place, DeepSeek-V3", 128, 0, 192, 32, interleaved=True, back=False, in_place=True),
)
