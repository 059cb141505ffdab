"""Rowwise codes to columnwise codes in one pass: what is narrow along features is narrowed along tokens, for GPUs.

Rows that were sent to experts as codes have blocks along features, and wgrad needs them along tokens. A program reads a
square tile of codes with its scales, one byte a value instead of two, and narrows the values that they stand for along
the rows. The reference is ``requantize_reference`` of `precision/both_directions.py`, bit for bit. Codes lie as those
of `cast_both_triton.py` do.

Refused are scales that need the amax of the whole matrix, of which no tile knows, and stochastic rounding, whose noise
is a hash of values that were not rounded before.

Shapes: S matrices of M rows and K columns; C = columns of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moefold.config.casts import Cast
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.ops.kernels.aot_specs import Build, Traffic
from moefold.precision.both_directions import narrows_rows_alone, requantize_reference, share_a_read
from moefold.precision.cast_kernels.cast_both_triton import narrow_columns, side_of
from moefold.precision.cast_kernels.cast_triton import CODE_TYPE, SCALE_TYPE, warps_of
from moefold.precision.cast_kernels.narrow_numbers_triton import e8m0_to_float, from_codes, spread_over_block
from moefold.precision.quantize import FLOAT8, Quantized


@triton.jit
def decode_of(stored, RULE: tl.constexpr):
    """By what codes are multiplied, from scales as they are stored."""
    if RULE == "float32" or RULE == "power_of_two":
        decode = stored
    else:
        decode = e8m0_to_float(stored.to(tl.int32))
    return decode


@triton.jit
def requantize_kernel(
    codes, scales, column_codes, column_scales, M, K,
    ELEMENT: tl.constexpr, RULE: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """One tile. Codes are read as bytes, so that those beyond the matrix can be 0."""
    S = tl.program_id(2)
    m = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    k = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    inside = (m[:, None] < M) & (k[None, :] < K)
    code = tl.load(codes + S.to(tl.int64) * M * K + m[:, None] * K + k[None, :], mask=inside, other=0)
    if ELEMENT == "e4m3":
        code = code.to(tl.float8e4nv, bitcast=True)
    else:
        code = code.to(tl.float8e5, bitcast=True)
    c, num_c = tl.program_id(1) * (SIDE // C) + tl.arange(0, SIDE // C), tl.cdiv(K, C)
    place = (S.to(tl.int64) * M + m[:, None]) * num_c + c[None, :]
    stored = tl.load(scales + place, mask=(m[:, None] < M) & (c[None, :] < num_c), other=0)
    values = from_codes(code, ELEMENT)
    # A scale that is NaN reaches beyond the last column of its block.
    tile = tl.where(inside, values * spread_over_block(decode_of(stored, RULE), values, 1, C), 0.0)
    narrow_columns(tile, 0.0, column_codes, column_scales, 0, S, m, k, M, K, ELEMENT, RULE, C, False, False, SIDE)


def requantize_triton(row: Quantized, column: Cast) -> Quantized:
    cast = row.cast
    if not share_a_read(cast, column) or not narrows_rows_alone(cast) or not narrows_rows_alone(column):
        raise ValueError(f"{cast} to {column}: both need one format and one block of a row, and rounding to nearest")
    if cast.element not in FLOAT8:
        raise ValueError(f"{cast}: codes of 8 bits are narrowed along rows")
    if not row.codes_MK.numel():
        return requantize_reference(row, column)
    assert cast.block is not None
    *stack, rows, columns = row.codes_MK.shape
    side, num_blocks = side_of(cast), -(-rows // cast.block[1])
    codes = row.codes_MK.view(torch.uint8).contiguous()
    column_codes = row.codes_MK.new_empty(*stack, rows, columns)
    column_scales = row.scale_rc.new_empty(*stack, num_blocks, columns)
    grid = (triton.cdiv(rows, side), triton.cdiv(columns, side), codes.numel() // (rows * columns))
    requantize_kernel[grid](
        codes, row.scale_rc.contiguous(), column_codes, column_scales, rows, columns,
        **_constants(cast), num_warps=warps_of((side, side)),
    )  # fmt: skip
    return Quantized(column_codes.mT, column_scales.mT, None, column)


def _constants(cast: Cast) -> dict[str, object]:
    assert cast.block is not None
    return {"ELEMENT": cast.element, "RULE": cast.scale, "C": cast.block[1], "SIDE": side_of(cast)}


# ---- builds and traffic ----


def requantize_traffic(cast: Cast, dim: int) -> Traffic:
    """Per row: codes and scales are read, and written in the other direction."""
    moved = 2 * dim * cast.bytes_per_value
    return Traffic("2K + scales", moved, moved)


def _build(name: str, cast: Cast | None) -> Build:
    assert cast is not None
    side, scale = side_of(cast), SCALE_TYPE.get(cast.scale, "*u8")
    return Build(
        f"rowwise to columnwise, {name}", requantize_kernel,
        {"codes": "*u8", "scales": scale, "column_codes": CODE_TYPE[cast.element], "column_scales": scale,
         "M": "i32:16", "K": "i32:16"},
        _constants(cast), requantize_traffic(cast, 7168), warps_of((side, side)), page="precision",
    )  # fmt: skip


BUILDS = tuple(_build(name, PRECISION_RECIPES[name].casts.x_fprop) for name in ("mxfp8", "fp8_blockwise"))
