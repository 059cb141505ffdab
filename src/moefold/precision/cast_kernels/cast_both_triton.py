"""One read, two casts: a matrix narrowed along its columns (rowwise) and along its rows (columnwise), for GPUs.

An operand of a linear layer is in two matmuls that sum over different dims. Two launches of `cast_triton.py` would read
the wide matrix twice; here a program reads a square tile once and writes codes and scales of both directions. The
reference is ``quantize_both_reference`` of `precision/both_directions.py`, bit for bit. Codes of both directions lie as
the matrix does, so that the columnwise copy, of which [K, M] is a view, has rows of tokens.

For two_level scales a first launch reads the matrix once for both amaxes: as it is, and after the Hadamard transform
along its rows.

Shapes: S matrices of M rows and K columns; C = columns of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.config.casts import Cast
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.ops.kernels.aot_specs import Build, Traffic
from moefold.ops.splitmix64 import wrapped
from moefold.precision.both_directions import BothWays, quantize_both_reference, share_a_read
from moefold.precision.cast_kernels.cast_triton import (
    CODE_TYPE,
    SCALE_TYPE,
    as_matrices,
    check_cast,
    load_tile,
    warps_of,
)
from moefold.precision.cast_kernels.narrow_numbers_triton import (
    block_bits,
    cast_tile,
    finite_or_nan,
    hadamard,
    tensor_scales,
)
from moefold.precision.quantize import FLOAT8, SCALE_DTYPES, Quantized

# A tile is square: blocks of both directions fit in. For blocks of up to 64 values, and for longer ones.
SIDE, LONG_SIDE = 64, 128


# ---- the kernels ----


@triton.jit
def along_rows(tile, HADAMARD: tl.constexpr):
    """What the columnwise copy narrows: the transposed tile, transformed along the matrix's rows."""
    turned = tl.trans(tile)
    if HADAMARD:
        turned = hadamard(turned)
    return turned


@triton.jit
def _tile_amax(tile, SIDE: tl.constexpr):
    bits = tl.max(tl.max(block_bits(finite_or_nan(tile), 1, SIDE), axis=1), axis=0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def amax_both_kernel(
    x, row_amax, column_amax, M, K, stack_stride, row_stride, column_stride, HADAMARD: tl.constexpr, SIDE: tl.constexpr
):
    """The amax of one tile, and that of its columnwise copy; NaN if a value is not finite."""
    S = tl.program_id(2)
    tile, _, _, _ = load_tile(x, S, M, K, stack_stride, row_stride, column_stride, SIDE, SIDE)
    at = (S * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
    tl.store(row_amax + at, _tile_amax(tile, SIDE))
    tl.store(column_amax + at, _tile_amax(along_rows(tile, HADAMARD), SIDE))


@triton.jit
def narrow_both(
    tile, row_amax, column_amax, row_codes, row_scales, column_codes, column_scales, seed, S, m, k, M, K,
    ELEMENT: tl.constexpr, RULE: tl.constexpr, C: tl.constexpr, STOCHASTIC: tl.constexpr,
    COLUMN_STOCHASTIC: tl.constexpr, HADAMARD: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of a tile, zeros beyond the matrix, whose rows are m and whose columns are k."""
    stack, blocks = S.to(tl.int64), tl.arange(0, SIDE // C)

    code, stored, _ = cast_tile(tile, row_amax, seed, ELEMENT, RULE, 1, C, STOCHASTIC)
    tl.store(row_codes + stack * M * K + m[:, None] * K + k[None, :], code, mask=(m[:, None] < M) & (k[None, :] < K))
    c, num_c = tl.program_id(1) * (SIDE // C) + blocks, tl.cdiv(K, C)
    place = (stack * M + m[:, None]) * num_c + c[None, :]
    tl.store(row_scales + place, stored.to(row_scales.dtype.element_ty), mask=(m[:, None] < M) & (c[None, :] < num_c))

    narrow_columns(
        tile, column_amax, column_codes, column_scales, seed, S, m, k, M, K, ELEMENT, RULE, C, COLUMN_STOCHASTIC,
        HADAMARD, SIDE,
    )  # fmt: skip


@triton.jit
def narrow_columns(
    tile, amax, codes, scales, seed, S, m, k, M, K,
    ELEMENT: tl.constexpr, RULE: tl.constexpr, C: tl.constexpr, STOCHASTIC: tl.constexpr, HADAMARD: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """The columnwise copy alone."""
    stack, blocks = S.to(tl.int64), tl.arange(0, SIDE // C)
    code, stored, _ = cast_tile(along_rows(tile, HADAMARD), amax, seed, ELEMENT, RULE, 1, C, STOCHASTIC)
    inside = (k[:, None] < K) & (m[None, :] < M)
    tl.store(codes + stack * M * K + m[None, :] * K + k[:, None], code, mask=inside)
    c, num_c = tl.program_id(0) * (SIDE // C) + blocks, tl.cdiv(M, C)
    place = (stack * num_c + c[None, :]) * K + k[:, None]
    tl.store(scales + place, stored.to(scales.dtype.element_ty), mask=(k[:, None] < K) & (c[None, :] < num_c))


@triton.jit
def cast_both_kernel(
    x, amaxes, row_codes, row_scales, column_codes, column_scales, tensor_scale, seed,
    M, K, num_matrices, stack_stride, row_stride, column_stride,
    ELEMENT: tl.constexpr, RULE: tl.constexpr, C: tl.constexpr, STOCHASTIC: tl.constexpr,
    COLUMN_STOCHASTIC: tl.constexpr, HADAMARD: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """One tile in both directions. ``amaxes`` and ``tensor_scale`` are [2, S]: rowwise, columnwise."""
    S = tl.program_id(2)
    tile, m, k, _ = load_tile(x, S, M, K, stack_stride, row_stride, column_stride, SIDE, SIDE)
    row_amax, column_amax = 0.0, 0.0
    if RULE == "two_level":
        row_amax, column_amax = tl.load(amaxes + S), tl.load(amaxes + num_matrices + S)
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        _, inverse = tensor_scales(row_amax)
        tl.store(tensor_scale + S, inverse, mask=first)
        _, inverse = tensor_scales(column_amax)
        tl.store(tensor_scale + num_matrices + S, inverse, mask=first)
    narrow_both(
        tile, row_amax, column_amax, row_codes, row_scales, column_codes, column_scales, seed, S, m, k, M, K,
        ELEMENT, RULE, C, STOCHASTIC, COLUMN_STOCHASTIC, HADAMARD, SIDE,
    )  # fmt: skip


# ---- launches ----


def quantize_both_triton(x_MK: Tensor, row: Cast, column: Cast, *, seed: int = 0) -> BothWays:
    if not share_a_read(row, column):
        raise ValueError(f"{row} and {column}: both directions need one format and one block of a row")
    if not x_MK.numel():
        return quantize_both_reference(x_MK, row, column, seed=seed)
    check_cast(x_MK.mT, column)
    x_SMK, side = as_matrices(x_MK), side_of(row)
    num, rows, columns = x_SMK.shape
    amaxes = _amaxes(x_SMK, column.hadamard) if row.scale == "two_level" else None
    tensor_scale = None if amaxes is None else torch.empty_like(amaxes)
    both, outputs = empty_copies(x_MK, row, column, tensor_scale)
    cast_both_kernel[(triton.cdiv(rows, side), triton.cdiv(columns, side), num)](
        x_SMK, amaxes, *outputs, tensor_scale, wrapped(seed), rows, columns, num, *x_SMK.stride(),
        **constants_of_pair(row, column), SIDE=side, num_warps=warps_of((side, side)),
    )  # fmt: skip
    return both


def empty_copies(
    x_MK: Tensor, row: Cast, column: Cast, tensor_scale: Tensor | None = None
) -> tuple[BothWays, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What kernels write, as it is read, and as it lies: codes and scales of both directions."""
    assert row.block is not None
    *stack, rows, columns = x_MK.shape
    blocks, scale_type = (
        (-(-rows // row.block[1]), -(-columns // row.block[1])),
        SCALE_DTYPES[row.scale],
    )
    # Each in memory of its own: whoever keeps one copy must not keep the other.
    row_codes, column_codes = (x_MK.new_empty(x_MK.shape, dtype=FLOAT8.get(row.element, torch.uint8)) for _ in range(2))
    row_scales = x_MK.new_empty(*stack, rows, blocks[1], dtype=scale_type)
    column_scales = x_MK.new_empty(*stack, blocks[0], columns, dtype=scale_type)
    whole = (None, None) if tensor_scale is None else [each.view(stack) for each in tensor_scale]
    both = BothWays(
        Quantized(row_codes, row_scales, whole[0], row),
        Quantized(column_codes.mT, column_scales.mT, whole[1], column),
    )
    return both, (row_codes, row_scales, column_codes, column_scales)


def side_of(cast: Cast) -> int:
    assert cast.block is not None
    return SIDE if cast.block[1] <= SIDE else LONG_SIDE


def _amaxes(x_SMK: Tensor, uses_hadamard: bool) -> Tensor:
    """[2, S]"""
    num, rows, columns = x_SMK.shape
    tiles = (triton.cdiv(rows, SIDE), triton.cdiv(columns, SIDE))
    found = x_SMK.new_empty(2, num, *tiles, dtype=torch.float32)
    amax_both_kernel[(*tiles, num)](
        x_SMK, *found.unbind(), rows, columns, *x_SMK.stride(), HADAMARD=uses_hadamard, SIDE=SIDE,
        num_warps=warps_of((SIDE, SIDE)),
    )  # fmt: skip
    return found.flatten(2).amax(2)


def constants_of_pair(row: Cast, column: Cast) -> dict[str, object]:
    assert row.block is not None
    return {
        "ELEMENT": row.element, "RULE": row.scale, "C": row.block[1], "STOCHASTIC": row.rounding == "stochastic",
        "COLUMN_STOCHASTIC": column.rounding == "stochastic", "HADAMARD": column.hadamard,
    }  # fmt: skip


# ---- builds and traffic ----


def both_traffic(cast: Cast, dim: int) -> Traffic:
    """Per row of bfloat16: read once, or twice where the amax of the matrix must be known first."""
    assert cast.block is not None
    scales = 2 * (4 if cast.scale in ("float32", "power_of_two") else 1) * dim / cast.block[1]
    reads = 2 if cast.scale == "two_level" else 1
    least = 2 * dim + 2 * dim + scales
    return Traffic(f"{2 * reads + 2}K + scales", least + 2 * dim * (reads - 1), least)


def output_types(row: Cast) -> dict[str, str]:
    code, scale = CODE_TYPE[row.element], SCALE_TYPE.get(row.scale, "*u8")
    return {"row_codes": code, "row_scales": scale, "column_codes": code, "column_scales": scale}


def _build(name: str, row: Cast | None, column: Cast | None) -> Build:
    assert row is not None and column is not None
    side = side_of(row)
    sizes = {"M": "i32:16", "K": "i32:16", "num_matrices": "i32", "stack_stride": "i64:16", "row_stride": "i64:16"}
    whole = {"amaxes": "*fp32", "tensor_scale": "*fp32"}
    signature = {
        "x": "*bf16",
        **output_types(row),
        "seed": "i64",
        **sizes,
        **(whole if row.scale == "two_level" else {}),
    }
    absent: dict[str, object] = {} if row.scale == "two_level" else dict.fromkeys(whole)
    constants = {**constants_of_pair(row, column), "SIDE": side, "column_stride": 1, **absent}
    return Build(
        f"cast both ways, {name}", cast_both_kernel, signature, constants, both_traffic(row, _DIM),
        warps_of((side, side)), page="precision",
    )  # fmt: skip


_DIM = 7168
_BLOCKWISE, _MXFP8, _NVFP4 = (PRECISION_RECIPES[name].casts for name in ("fp8_blockwise", "mxfp8", "nvfp4"))
BUILDS = (
    _build("mxfp8", _MXFP8.x_fprop, _MXFP8.x_wgrad),
    _build("fp8_blockwise", _BLOCKWISE.x_fprop, _BLOCKWISE.x_wgrad),
    _build("nvfp4, x", _NVFP4.x_fprop, _NVFP4.x_wgrad),
    _build("nvfp4, dy", _NVFP4.dy_dgrad, _NVFP4.dy_wgrad),
    Build(
        "amax both ways, Hadamard", amax_both_kernel,
        {"x": "*bf16", "row_amax": "*fp32", "column_amax": "*fp32", "M": "i32:16", "K": "i32:16",
         "stack_stride": "i64:16", "row_stride": "i64:16"},
        {"column_stride": 1, "HADAMARD": True, "SIDE": SIDE}, Traffic("2K", 2 * _DIM, 2 * _DIM),
        warps_of((SIDE, SIDE)), page="precision",
    ),
)  # fmt: skip
