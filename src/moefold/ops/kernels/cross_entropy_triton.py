"""Chunked cross entropy: a chunk's logits are read once, and overwritten by their gradient in backward.

The loss needs two numbers per token, log-sum-exp(logits) and the target's logit. Torch computes them from a float32
copy of the logits, in passes for the maximum, the exponentials, their sum and the gather. Here one pass over the logits
in their own dtype computes both, with an online softmax: a running maximum, and a running sum that is rescaled when the
maximum grows. A chunk's result is merged into that of earlier chunks.

Backward recomputes a chunk's logits and overwrites them with the gradient,

    dlogit = exp(logit - lse) * d(lse) + [this is the target] * d(target logit)

which the two GEMMs that follow read, so that no second tensor of this size exists. Rows of ignored labels have zero
gradients; their logits are not loaded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.ops.kernels.aot_specs import Build, Traffic

# Vocabulary rows per chunk.
CHUNK = 8192
# Logits of one row that a program holds in registers at a time, and its warps.
STATS_BLOCK, STATS_WARPS = 4096, 8
GRADIENT_BLOCK, GRADIENT_WARPS = 1024, 4


# ---- the kernels ----


@triton.jit
def stats_kernel(logits, target, lse, target_logit, begin, num_columns, stride, BLOCK: tl.constexpr):
    """One row of one chunk, merged into the row's statistics. ``begin`` is the chunk's first vocabulary row."""
    row = tl.program_id(0).to(tl.int64)
    highest = float("-inf")
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + col, mask=col < num_columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    before = tl.load(lse + row)
    higher = tl.maximum(before, highest)
    tl.store(lse + row, higher + tl.log(tl.exp(before - higher) + total * tl.exp(highest - higher)))
    wanted = tl.load(target + row) - begin
    inside = (wanted >= 0) & (wanted < num_columns)
    found = tl.load(logits + row * stride + wanted, mask=inside, other=0.0).to(tl.float32)
    tl.store(target_logit + row, found, mask=inside)


@triton.jit
def gradient_kernel(logits, target, lse, dlse, dtarget_logit, begin, num_columns, stride, BLOCK: tl.constexpr):
    """One block of one row: overwrite the logits by their gradient."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < num_columns
    grad_lse = tl.load(dlse + row)
    grad_target = tl.load(dtarget_logit + row)
    place = logits + row * stride + col
    x = tl.load(place, mask=mask & (grad_lse != 0.0), other=float("-inf")).to(tl.float32)
    grad = tl.exp(x - tl.load(lse + row)) * grad_lse
    grad += tl.where(col == tl.load(target + row) - begin, grad_target, 0.0)
    tl.store(place, grad.to(logits.dtype.element_ty), mask=mask)


# ---- launches ----


def add_stats(logits_Sc: Tensor, target_S: Tensor, begin: int, lse_S: Tensor, target_logit_S: Tensor) -> None:
    """Merge a chunk whose first logit belongs to vocabulary row ``begin`` into the statistics of earlier chunks."""
    num_tokens, num_columns = logits_Sc.shape
    stats_kernel[(num_tokens,)](
        logits_Sc,
        target_S,
        lse_S,
        target_logit_S,
        begin,
        num_columns,
        logits_Sc.stride(0),
        BLOCK=STATS_BLOCK,
        num_warps=STATS_WARPS,
    )


def logits_to_gradient(
    logits_Sc: Tensor, target_S: Tensor, begin: int, lse_S: Tensor, dlse_S: Tensor, dtarget_logit_S: Tensor
) -> None:
    """Overwrite a chunk's logits by their gradient."""
    num_tokens, num_columns = logits_Sc.shape
    gradient_kernel[(num_tokens, triton.cdiv(num_columns, GRADIENT_BLOCK))](
        logits_Sc,
        target_S,
        lse_S,
        dlse_S,
        dtarget_logit_S,
        begin,
        num_columns,
        logits_Sc.stride(0),
        BLOCK=GRADIENT_BLOCK,
        num_warps=GRADIENT_WARPS,
    )


class _VocabStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, weight_vD: Tensor, target_S: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        lse_S = x_SD.new_full(x_SD.shape[:1], -torch.inf, dtype=torch.float32)
        target_logit_S = torch.zeros_like(lse_S)
        for begin in range(0, weight_vD.shape[0], chunk):
            weight_cD = weight_vD[begin : begin + chunk].to(x_SD.dtype)
            add_stats(x_SD @ weight_cD.T, target_S, begin, lse_S, target_logit_S)
        ctx.save_for_backward(x_SD, weight_vD, target_S, lse_S)
        ctx.chunk = chunk
        return lse_S, target_logit_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_SD, weight_vD, target_S, lse_S = ctx.saved_tensors
        dlse_S, dtarget_logit_S = (grad.contiguous() for grad in grads)
        need_x, need_weight = ctx.needs_input_grad[:2]
        dx_SD = torch.zeros_like(x_SD, dtype=torch.float32) if need_x else None
        dweight_vD = torch.empty_like(weight_vD) if need_weight else None
        for begin in range(0, weight_vD.shape[0], ctx.chunk):
            weight_cD = weight_vD[begin : begin + ctx.chunk].to(x_SD.dtype)
            dlogits_Sc = x_SD @ weight_cD.T
            logits_to_gradient(dlogits_Sc, target_S, begin, lse_S, dlse_S, dtarget_logit_S)
            if dx_SD is not None:
                dx_SD += dlogits_Sc @ weight_cD
            if dweight_vD is not None:
                dweight_vD[begin : begin + ctx.chunk] = dlogits_Sc.T @ x_SD
        return (None if dx_SD is None else dx_SD.to(x_SD.dtype)), dweight_vD, None, None


def vocab_stats(x_SD: Tensor, weight_vD: Tensor, target_S: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """log-sum-exp over these rows, and the target's logit (0 where the target is not one of these rows).

    The reference is ``moefold.ops.cross_entropy.vocab_stats``, which also takes float64.
    """
    if x_SD.dtype == torch.float64:
        raise ValueError("the kernel sums in float32; moefold.ops.cross_entropy.vocab_stats takes float64")
    lse_S, target_logit_S = _VocabStats.apply(x_SD, weight_vD, target_S.contiguous(), chunk)
    return lse_S, target_logit_S


# ---- builds and traffic ----


def stats_traffic(vocabulary: int, chunk: int, entry: int = 2) -> Traffic:
    """Per token. Each of the v/c chunks reads the target and updates the sum; the target's logit is written once."""
    chunks = -(-vocabulary // chunk)
    return Traffic("2v + 16v/c + 4", vocabulary * entry + 16 * chunks + 4, vocabulary * entry + 8 + 8)


def gradient_traffic(vocabulary: int, chunk: int, entry: int = 2) -> Traffic:
    """Each chunk reads the target and three numbers of the token."""
    chunks = -(-vocabulary // chunk)
    return Traffic("4v + 20v/c", 2 * vocabulary * entry + 20 * chunks, 2 * vocabulary * entry + 20)


_NUMBERS = {"target": "*i64", "lse": "*fp32", "begin": "i32", "num_columns": "i32:16", "stride": "i32:16"}


def _builds(model: str, vocabulary: int) -> tuple[Build, ...]:
    return (
        Build(
            f"cross entropy, {model}", stats_kernel,
            {"logits": "*bf16", "target_logit": "*fp32", **_NUMBERS}, {"BLOCK": STATS_BLOCK},
            stats_traffic(vocabulary, CHUNK), STATS_WARPS, registers=64,
        ),
        Build(
            f"cross entropy backward, {model}", gradient_kernel,
            {"logits": "*bf16", "dlse": "*fp32", "dtarget_logit": "*fp32", **_NUMBERS}, {"BLOCK": GRADIENT_BLOCK},
            gradient_traffic(vocabulary, CHUNK), GRADIENT_WARPS, registers=40,
        ),
    )  # fmt: skip


BUILDS = (*_builds("DeepSeek-V3", 129_280), *_builds("Qwen3-235B", 151_936), *_builds("Mixtral-8x7B", 32_000))
