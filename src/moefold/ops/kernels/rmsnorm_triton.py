"""RMSNorm, forward and backward; a row stays in registers from its load to its store.

    rstd = 1 / sqrt(mean(x^2) + eps)        out = x * rstd * weight
    dx = rstd * (g - xn * mean(g * xn))     with xn = x * rstd, g = dout * weight
    dweight = sum over rows of dout * xn

Rows are tokens, or heads of tokens. A row is read once although it is used twice, for its mean and for its result: a
program holds full rows, with as many threads as needed. Rows of up to 8192 entries, more than any recipe's model dim,
spill no register; up to 16384 still fit. Short rows, such as query heads, share a program. Saved for backward are x and
one float32 per row.

``dweight`` is a sum over all rows, reduced in two stages: a fixed number B of programs loops over the rows, each with
its own sum in registers, and writes it once; a second kernel adds these B sums. There are no atomics, so the order of
additions, and the result, is the same in every run on the same machine.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.ops.kernels.aot_specs import Build, Traffic

MAX_DIM = 16384


# ---- the kernels ----


@triton.jit
def _narrowed(value, like):
    """Round to the other's dtype, and back to float32."""
    return value.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def forward_kernel(x, weight, out, rstd, num_rows, eps, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS full rows. The weight multiplies after the rounding, as the published models were trained."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (col < D)[None, :]
    place = row.to(tl.int64)[:, None] * D + col[None, :]
    x_row = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_row * x_row, 1) / D + eps)
    factor = _narrowed(tl.load(weight + col, mask=col < D, other=0.0), out)
    normed = _narrowed(x_row * scale[:, None], out)
    tl.store(out + place, (normed * factor[None, :]).to(out.dtype.element_ty), mask=mask)
    tl.store(rstd + row, scale, mask=row < num_rows)


@triton.jit
def backward_kernel(
    dout,
    x,
    weight,
    rstd,
    dx,
    partial,
    num_rows,
    num_programs,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every num_programs-th group of ROWS rows, and the weight gradient of all of them."""
    col = tl.arange(0, BLOCK)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, num_programs * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & (col < D)[None, :]
        place = row.to(tl.int64)[:, None] * D + col[None, :]
        scale = tl.load(rstd + row, mask=row < num_rows, other=0.0)[:, None]
        normed = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) * scale
        grad = tl.load(dout + place, mask=mask, other=0.0).to(tl.float32)
        dweight += grad * normed
        grad *= _narrowed(tl.load(weight + col, mask=col < D, other=0.0), dx)[None, :]
        along = tl.sum(grad * normed, 1)[:, None] / D
        tl.store(dx + place, ((grad - normed * along) * scale).to(dx.dtype.element_ty), mask=mask)
    tl.store(partial + tl.program_id(0) * D + col, tl.sum(dweight, 0), mask=col < D)


@triton.jit
def column_sum_kernel(partial, total, num_programs, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the rows of [B, D], BLOCK columns per program."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, num_programs, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < num_programs)[:, None] & (col < D)[None, :]
        sums += tl.load(partial + row[:, None] * D + col[None, :], mask=mask, other=0.0)
    tl.store(total + col, tl.sum(sums, 0).to(total.dtype.element_ty), mask=col < D)


# ---- launches ----


def tile_of(dim: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps: at most 16 entries of a tensor per thread."""
    block = triton.next_power_of_2(dim)
    rows = max(1, 2048 // block)
    return rows, block, max(4, min(32, rows * block // 512))


SUM_TILE = (32, 64, 4)  # of the second stage: rows, columns, warps


def launch_forward(x_XD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised rows, and 1 / root mean square of each in float32."""
    num_rows, dim = x_XD.shape
    if dim > MAX_DIM:
        raise ValueError(f"rows of {dim} entries do not fit one program; the maximum is {MAX_DIM}")
    out_XD = torch.empty_like(x_XD, memory_format=torch.contiguous_format)
    rstd_X = x_XD.new_empty(num_rows, dtype=torch.float32)
    rows, block, warps = tile_of(dim)
    forward_kernel[(triton.cdiv(num_rows, rows),)](
        x_XD.contiguous(),
        weight_D,
        out_XD,
        rstd_X,
        num_rows,
        eps,
        D=dim,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    return out_XD, rstd_X


def launch_backward(
    dout_XD: Tensor, x_XD: Tensor, weight_D: Tensor, rstd_X: Tensor, max_programs: int
) -> tuple[Tensor, Tensor]:
    """The weight's gradient is in float32; autograd casts it to the dtype in which the weight collects it."""
    num_rows, dim = x_XD.shape
    rows, block, warps = tile_of(dim)
    programs = max(1, min(max_programs, triton.cdiv(num_rows, rows)))
    dx_XD = torch.empty_like(x_XD, memory_format=torch.contiguous_format)
    partial_BD = x_XD.new_empty(programs, dim, dtype=torch.float32)
    backward_kernel[(programs,)](
        dout_XD.contiguous(),
        x_XD.contiguous(),
        weight_D,
        rstd_X,
        dx_XD,
        partial_BD,
        num_rows,
        programs,
        D=dim,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    dweight_D = torch.empty_like(weight_D, dtype=torch.float32)
    rows, block, warps = SUM_TILE
    column_sum_kernel[(triton.cdiv(dim, block),)](
        partial_BD, dweight_D, programs, D=dim, ROWS=rows, BLOCK=block, num_warps=warps
    )
    return dx_XD, dweight_D


def programs_on(device: torch.device) -> int:
    """Two per SM, so that one loads while the other computes; any number will do in the interpreter."""
    if device.type != "cuda":
        return 4
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        out_XD, rstd_X = launch_forward(x_XD, weight_D, eps)
        ctx.save_for_backward(x_XD, weight_D, rstd_X)
        return out_XD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_XD, weight_D, rstd_X = ctx.saved_tensors
        dx_XD, dweight_D = launch_backward(grads[0], x_XD, weight_D, rstd_X, programs_on(x_XD.device))
        return dx_XD, dweight_D, None


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise the last dim. The reference is ``moefold.ops.rmsnorm.rms_norm``."""
    return _RmsNorm.apply(x.reshape(-1, x.shape[-1]), weight_D, eps).view(x.shape)


# ---- builds and traffic ----


def forward_traffic(dim: int, rows: int, tokens: int, entry: int = 2) -> Traffic:
    """Per token, which has ``rows`` rows (1, or its heads); the weight is shared by all tokens."""
    moved = rows * (2 * dim * entry + 4) + 4 * dim / tokens
    return Traffic("X/T (4D + 4) + 4D/T", moved, moved)


def backward_traffic(dim: int, rows: int, tokens: int, programs: int, entry: int = 2) -> Traffic:
    """Above the minimum by the sums of the B programs, which are written and read once."""
    least = rows * (3 * dim * entry + 4) + 8 * dim / tokens
    return Traffic("X/T (6D + 4) + (8B + 8) D/T", least + 8 * programs * dim / tokens, least)


# Tokens of a microbatch, and programs on an H100 with 132 SMs.
_TOKENS, _PROGRAMS = 16384, 264


def _builds(name: str, dim: int, heads: int, registers: int) -> tuple[Build, ...]:
    rows, block, warps = tile_of(dim)
    constants = {"D": dim, "ROWS": rows, "BLOCK": block}
    forward = {"x": "*bf16", "weight": "*fp32", "rstd": "*fp32", "num_rows": "i32"}
    return (
        Build(
            f"rms norm, {name}", forward_kernel, forward | {"out": "*bf16", "eps": "fp32"}, constants,
            forward_traffic(dim, heads, _TOKENS), warps, registers=48,
        ),
        Build(
            f"rms norm backward, {name}", backward_kernel,
            forward | {"dout": "*bf16", "dx": "*bf16", "partial": "*fp32", "num_programs": "i32"}, constants,
            backward_traffic(dim, heads, _TOKENS, _PROGRAMS), warps, registers=registers,
        ),
    )  # fmt: skip


_SUM_BUILD = Build(
    "rms norm backward, sum of programs", column_sum_kernel,
    {"partial": "*fp32", "total": "*fp32", "num_programs": "i32"},
    {"D": 7168, "ROWS": SUM_TILE[0], "BLOCK": SUM_TILE[1]}, num_warps=SUM_TILE[2], registers=48,
)  # fmt: skip

# Dim of a row, rows per token, registers of the backward kernel.
BUILDS = (
    *_builds("DeepSeek-V3", 7168, 1, 96),
    *_builds("DeepSeek-V3 query latent", 1536, 1, 96),
    *_builds("Qwen3-235B, Mixtral-8x7B", 4096, 1, 96),
    *_builds("Qwen3-235B query heads", 128, 64, 96),
    _SUM_BUILD,
)
