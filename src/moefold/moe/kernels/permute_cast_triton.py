"""Permute rows by expert, pad each expert's with zeros and narrow them for the first GEMM, in one pass.

One program per token, as in `permute_triton.py`: it reads a token once, narrows it once and writes rows, codes and
scales of its K assignments, so that K rows cost the arithmetic of one, and nothing reads permuted rows to narrow them.
After the programs of the tokens come those of the experts, which write padding rows: zeros, their codes, and the scale
of a block of zeros. Rows and probs are those of ``permute``, and codes and scales those of ``quantize(permute(x))``,
bit for bit (`moe_references.permute_cast`). Gradients are those of `permute_triton.py`.

Blocks lie along a row, whose codes depend on that row alone. Blocks along tokens have rows of several tokens: those
follow from the permuted rows, or from their codes (`precision/cast_kernels/requantize_triton.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.config.casts import SCALE_BYTES, Cast
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.moe.kernels.moe_references import RowMap
from moefold.moe.kernels.permute_triton import BLOCK_L, padding_of, permute
from moefold.ops.kernels.aot_specs import MODELS, Build, Traffic, moe_of
from moefold.precision.both_directions import narrows_rows_alone
from moefold.precision.cast_kernels.cast_triton import CODE_TYPE, SCALE_TYPE
from moefold.precision.cast_kernels.narrow_numbers_triton import cast_tile
from moefold.precision.quantize import FLOAT8, SCALE_DTYPES, Quantized


@triton.jit
def scatter_cast_kernel(
    x_tL, prob_tK, row_tK, start_E, count_E, rows_PL, prob_P, codes_PL, scales_Pc,
    num_tokens, num_experts, num_rows, L,
    K: tl.constexpr, PROBS_OUT: tl.constexpr, ELEMENT: tl.constexpr, RULE: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A token, narrowed, to its K rows; or one expert's padding rows, as a token of zeros."""
    program, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    c, num_c = tl.program_id(1) * (BLOCK // C) + tl.arange(0, BLOCK // C)[None, :], tl.cdiv(L, C)
    is_token, inside, there = program < num_tokens, column < L, c < num_c
    x = tl.load(x_tL + program.to(tl.int64) * L + column, mask=inside & is_token, other=0.0)
    code, stored, _ = cast_tile(x.to(tl.float32), 0.0, 0, ELEMENT, RULE, 1, C, False)
    scale = stored.to(scales_Pc.dtype.element_ty)
    if is_token:
        for k in tl.static_range(K):
            row = tl.load(row_tK + program * K + k).to(tl.int64)
            tl.store(rows_PL + row * L + column, x, mask=inside & (row >= 0))
            tl.store(codes_PL + row * L + column, code, mask=inside & (row >= 0))
            tl.store(scales_Pc + row * num_c + c, scale, mask=there & (row >= 0))
            if PROBS_OUT:
                prob = tl.load(prob_tK + program * K + k)
                tl.store(prob_P + row, prob, mask=(row >= 0) & (tl.program_id(1) == 0))
    else:
        first, end = padding_of(program - num_tokens, start_E, count_E, num_experts, num_rows)
        for row in range(first, end):
            tl.store(rows_PL + row * L + column, x, mask=inside)
            tl.store(codes_PL + row * L + column, code, mask=inside)
            tl.store(scales_Pc + row * num_c + c, scale, mask=there)
            if PROBS_OUT:
                tl.store(prob_P + row, 0.0, mask=tl.program_id(1) == 0)


def permute_cast(
    x_tL: Tensor, rows: RowMap, prob_tK: Tensor | None, cast: Cast
) -> tuple[Tensor, Tensor | None, Quantized]:
    """Every permuted row, its prob where probs are given, and codes and scales of the rows."""
    if not narrows_rows_alone(cast):
        raise ValueError(f"{cast}: a token is narrowed by scales of its own blocks, to nearest")
    made: list[Quantized] = []

    def scatter(x_tL: Tensor, rows: RowMap, prob_tK: Tensor | None) -> tuple[Tensor, Tensor]:
        rows_PL, prob_P, quantized = _launch(x_tL.contiguous(), rows, prob_tK, cast)
        made.append(quantized)
        return rows_PL, prob_P

    rows_PL, prob_P = permute(x_tL, rows, prob_tK, scatter)
    return rows_PL, prob_P, made[0]


def _launch(x_tL: Tensor, rows: RowMap, prob_tK: Tensor | None, cast: Cast) -> tuple[Tensor, Tensor, Quantized]:
    """An argument that the kernel does not read gets any tensor."""
    (num_tokens, dim), num_experts = x_tL.shape, rows.count_E.shape[0]
    rows_PL = x_tL.new_empty(rows.num_rows, dim)
    prob_P = rows_PL if prob_tK is None else prob_tK.new_empty(rows.num_rows)
    codes_PL = x_tL.new_empty(rows_PL.shape, dtype=FLOAT8.get(cast.element, torch.uint8))
    scales_Pc = x_tL.new_empty(cast.scale_shape(rows_PL.shape), dtype=SCALE_DTYPES[cast.scale])
    scatter_cast_kernel[num_tokens + num_experts, triton.cdiv(dim, BLOCK_L)](
        x_tL, rows.row_tK if prob_tK is None else prob_tK.contiguous(), rows.row_tK, rows.start_E, rows.count_E,
        rows_PL, prob_P, codes_PL, scales_Pc, num_tokens, num_experts, rows.num_rows, dim,
        K=rows.row_tK.shape[1], PROBS_OUT=prob_tK is not None, **_constants(cast),
    )  # fmt: skip
    return rows_PL, prob_P, Quantized(codes_PL, scales_Pc, None, cast)


def _constants(cast: Cast) -> dict[str, object]:
    assert cast.block is not None
    return {"ELEMENT": cast.element, "RULE": cast.scale, "C": cast.block[1], "BLOCK": BLOCK_L}


# ---- builds and traffic ----


def permute_cast_traffic(dim: int, top_k: int, cast: Cast) -> Traffic:
    """In bfloat16 with float32 probs. Padding is not counted: any implementation has to write it."""
    assert cast.block is not None
    scales = SCALE_BYTES[cast.scale] * dim / cast.block[1]
    moved = 2 * dim + top_k * (2 * dim + dim + scales + 12)
    return Traffic("2L + K (3L + 12 + scales)", moved, moved)


def _build(model: str, recipe: str, dim: int, top_k: int, cast: Cast | None) -> Build:
    assert cast is not None
    return Build(
        f"permute and cast, {recipe}, {model}", scatter_cast_kernel,
        {"x_tL": "*bf16", "prob_tK": "*fp32", "row_tK": "*i32", "start_E": "*i32", "count_E": "*i32",
         "rows_PL": "*bf16", "prob_P": "*fp32", "codes_PL": CODE_TYPE[cast.element],
         "scales_Pc": SCALE_TYPE.get(cast.scale, "*u8"), "num_tokens": "i32", "num_experts": "i32", "num_rows": "i32",
         "L": "i32:16"},
        {"K": top_k, "PROBS_OUT": True, **_constants(cast)}, permute_cast_traffic(dim, top_k, cast), registers=64,
        page="precision",
    )  # fmt: skip


_MODEL = "DeepSeek-V3"
BUILDS = tuple(
    _build(_MODEL, name, MODELS[_MODEL].dim, moe_of(MODELS[_MODEL]).top_k, PRECISION_RECIPES[name].casts.x_fprop)
    for name in ("mxfp8", "fp8_blockwise")
)
