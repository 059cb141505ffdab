"""``quantize`` and ``fake_quantize`` for GPUs: any cast, one direction, any strides; the reference is quantize.py.

A program has a tile of whole blocks, reads it once and writes codes and scales, or the values that codes stand for.
Where a scale needs the amax of the whole matrix (a scale per tensor, two_level), a first launch writes the amax of
every tile, after the Hadamard transform if there is one, and torch takes the largest: a fixed order, without atomics.

A transposed matrix is one with other strides, so blocks along tokens need no copy.

Shapes: S matrices of M rows and K columns; r and c their numbers of blocks.
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
from moefold.precision.cast_kernels.narrow_numbers_triton import (
    block_bits,
    cast_tile,
    finite_or_nan,
    hadamard,
    tensor_scales,
)
from moefold.precision.quantize import FLOAT8, SCALE_DTYPES, Quantized, fake_quantize, quantize

# Rows and columns of a tile, for blocks of one row; 4 warps have 32 values per thread.
TILE = (32, 128)
# Largest block that fits a tile, by rows: of square blocks a tile has one of 128 x 128, or several small ones.
SQUARE_TILE = (128, 128)
# Names of Triton's types, for builds.
CODE_TYPE = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5", "e2m1": "*u8"}
SCALE_TYPE = {"float32": "*fp32", "power_of_two": "*fp32", "two_level": "*fp8e4nv"}


# ---- the kernels ----


@triton.jit
def load_tile(x, S, M, K, stack_stride, row_stride, column_stride, BM: tl.constexpr, BK: tl.constexpr):
    """In float32, zeros beyond the matrix; the places of rows and columns, and which are inside."""
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    k = tl.program_id(1).to(tl.int64) * BK + tl.arange(0, BK)
    inside = (m[:, None] < M) & (k[None, :] < K)
    at = S.to(tl.int64) * stack_stride + m[:, None] * row_stride + k[None, :] * column_stride
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32), m, k, inside


@triton.jit
def amax_kernel(
    x, tile_amax, M, K, stack_stride, row_stride, column_stride,
    HADAMARD: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The amax of one tile; NaN if a value is not finite."""
    tile, _, _, _ = load_tile(x, tl.program_id(2), M, K, stack_stride, row_stride, column_stride, BM, BK)
    if HADAMARD:
        tile = hadamard(tile)
    bits = tl.max(tl.max(block_bits(finite_or_nan(tile), 1, BK), axis=1), axis=0)
    tiles = tl.num_programs(0) * tl.num_programs(1)
    at = tl.program_id(2) * tiles + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(tile_amax + at, bits.to(tl.float32, bitcast=True))


@triton.jit
def cast_kernel(
    x, tensor_amax, codes, scales, tensor_scale, values, seed,
    M, K, stack_stride, row_stride, column_stride,
    ELEMENT: tl.constexpr, RULE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr, VALUES: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile: with VALUES what its codes stand for, in float32; else codes and scales."""
    S = tl.program_id(2)
    tile, m, k, inside = load_tile(x, S, M, K, stack_stride, row_stride, column_stride, BM, BK)
    if HADAMARD:
        tile = hadamard(tile)
    amax = 0.0
    if ROWS == 0 or RULE == "two_level":
        amax = tl.load(tensor_amax + S)
    code, stored, value = cast_tile(tile, amax, seed, ELEMENT, RULE, ROWS, COLUMNS, STOCHASTIC)
    at = S.to(tl.int64) * M * K + m[:, None] * K + k[None, :]
    if VALUES:
        tl.store(values + at, value, mask=inside)
    else:
        tl.store(codes + at, code, mask=inside)
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        if ROWS == 0:
            tl.store(scales + S, stored.to(scales.dtype.element_ty), mask=first)
        else:
            r = tl.program_id(0) * (BM // ROWS) + tl.arange(0, BM // ROWS)
            c = tl.program_id(1) * (BK // COLUMNS) + tl.arange(0, BK // COLUMNS)
            num_r, num_c = tl.cdiv(M, ROWS), tl.cdiv(K, COLUMNS)
            place = S.to(tl.int64) * num_r * num_c + r[:, None].to(tl.int64) * num_c + c[None, :]
            kept = (r[:, None] < num_r) & (c[None, :] < num_c)
            tl.store(scales + place, stored.to(scales.dtype.element_ty), mask=kept)
        if RULE == "two_level":
            _, inverse = tensor_scales(amax)
            tl.store(tensor_scale + S, inverse, mask=first)


# ---- launches ----


def quantize_triton(x_MK: Tensor, cast: Cast, *, seed: int = 0, amax: Tensor | None = None) -> Quantized:
    if not x_MK.numel():
        return quantize(x_MK, cast, seed=seed, amax=amax)
    x_SMK, stack = as_matrices(x_MK), x_MK.shape[:-2]
    codes = x_SMK.new_empty(x_MK.shape, dtype=FLOAT8.get(cast.element, torch.uint8))
    scales = x_SMK.new_empty(cast.scale_shape(x_MK.shape), dtype=SCALE_DTYPES[cast.scale])
    tensor_scale = x_SMK.new_empty(stack, dtype=torch.float32) if cast.scale == "two_level" else None
    _launch(x_SMK, cast, seed, amax, codes, scales, tensor_scale, None)
    return Quantized(codes, scales, tensor_scale, cast)


def fake_quantize_triton(x_MK: Tensor, cast: Cast, *, seed: int = 0, amax: Tensor | None = None) -> Tensor:
    if cast.element == "bf16" or not x_MK.numel():
        return fake_quantize(x_MK, cast, seed=seed, amax=amax)
    values = x_MK.new_empty(x_MK.shape, dtype=torch.float32)
    _launch(as_matrices(x_MK), cast, seed, amax, None, None, None, values)
    return values


def tensor_amax(x_SMK: Tensor, uses_hadamard: bool) -> Tensor:
    """[S], after the transform if there is one."""
    tiles = (triton.cdiv(x_SMK.shape[1], TILE[0]), triton.cdiv(x_SMK.shape[2], TILE[1]))
    found = x_SMK.new_empty(x_SMK.shape[0], *tiles, dtype=torch.float32)
    amax_kernel[(*tiles, x_SMK.shape[0])](
        x_SMK, found, *x_SMK.shape[1:], *x_SMK.stride(), HADAMARD=uses_hadamard, BM=TILE[0], BK=TILE[1]
    )
    return found.flatten(1).amax(1)


def _launch(
    x_SMK: Tensor,
    cast: Cast,
    seed: int,
    amax: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    tensor_scale: Tensor | None,
    values: Tensor | None,
) -> None:
    check_cast(x_SMK, cast)
    num, rows, columns = x_SMK.shape
    whole = None
    if cast.block is None or cast.scale == "two_level":
        given = None if amax is None else amax.float().reshape(-1).expand(num).contiguous()
        whole = tensor_amax(x_SMK, cast.hadamard) if given is None else given
    tile = tile_of(cast)
    cast_kernel[(triton.cdiv(rows, tile[0]), triton.cdiv(columns, tile[1]), num)](
        x_SMK, whole, codes, scales, tensor_scale, values, wrapped(seed),
        rows, columns, *x_SMK.stride(), **constants_of(cast), HADAMARD=cast.hadamard, VALUES=values is not None,
        BM=tile[0], BK=tile[1], num_warps=warps_of(tile),
    )  # fmt: skip


def constants_of(cast: Cast) -> dict[str, object]:
    """Names in the arguments of kernels."""
    rows, columns = cast.block or (0, 0)
    return {
        "ELEMENT": cast.element,
        "RULE": cast.scale,
        "ROWS": rows,
        "COLUMNS": columns,
        "STOCHASTIC": cast.rounding == "stochastic",
    }


def tile_of(cast: Cast) -> tuple[int, int]:
    return TILE if cast.block is None or max(cast.block[0], 1) <= TILE[0] else SQUARE_TILE


def warps_of(tile: tuple[int, int]) -> int:
    """32 values per thread."""
    return max(1, tile[0] * tile[1] // 1024)


def check_cast(x: Tensor, cast: Cast) -> None:
    if cast.rounding == "stochastic" and cast.block is None:
        raise ValueError(
            f"{cast}: noise is a hash of a block, which no tile of a kernel holds; use kernels.casts torch"
        )
    tile = tile_of(cast)
    if cast.block is not None and (tile[0] % cast.block[0] or tile[1] % cast.block[1]):
        raise ValueError(f"{cast}: a tile of {tile[0]} x {tile[1]} values has no whole block; use kernels.casts torch")
    if cast.hadamard and x.shape[-1] % 16:
        raise ValueError(f"a Hadamard transform of groups of 16 cannot divide {x.shape[-1]} columns")


def as_matrices(x_MK: Tensor) -> Tensor:
    """A stack with one leading dim, a view where strides allow; float64 and float16 as float32."""
    if x_MK.dtype not in (torch.float32, torch.bfloat16):
        x_MK = x_MK.float()
    return x_MK if x_MK.dim() == 3 else x_MK.reshape(-1, *x_MK.shape[-2:])


# ---- builds and traffic ----


def cast_traffic(cast: Cast, dim: int, passes: int = 1) -> Traffic:
    """Per row of bfloat16; casts whose scales need the whole matrix read it twice."""
    written = {"e4m3": 1, "e5m2": 1, "e2m1": 1}[cast.element] * dim
    rows, columns = cast.block or (1 << 62, 1 << 62)
    scales = {"float32": 4, "power_of_two": 4}.get(cast.scale, 1) * dim / (rows * columns)
    moved = passes * 2 * dim + written + scales
    return Traffic(f"{2 * passes + 1}K + scales", moved, 2 * dim + written + scales)


def _build(name: str, cast: Cast, dim: int, values: bool = False, transposed: bool = False) -> Build:
    """As the strides of a contiguous matrix, or of one that is transposed, make Triton specialise it."""
    strides = {"row_stride": "i64:16"} if not transposed else {"column_stride": "i64:16"}
    one = {"column_stride": 1} if not transposed else {"row_stride": 1}
    used = {
        "tensor_amax": ("*fp32", cast.block is None or cast.scale == "two_level"),
        "codes": (CODE_TYPE[cast.element], not values),
        "scales": (SCALE_TYPE.get(cast.scale, "*u8"), not values),
        "tensor_scale": ("*fp32", cast.scale == "two_level" and not values),
        "values": ("*fp32", values),
    }
    signature = {"x": "*bf16", "seed": "i64", "M": "i32", "K": "i32:16", "stack_stride": "i64:16", **strides}
    signature |= {name: kind for name, (kind, there) in used.items() if there}
    absent: dict[str, object] = {name: None for name, (_, there) in used.items() if not there}
    tile = tile_of(cast)
    constants = {**constants_of(cast), "HADAMARD": cast.hadamard, "VALUES": values, "BM": tile[0], "BK": tile[1]}
    passes = 2 if cast.block is None or cast.scale == "two_level" else 1
    traffic = None if values else cast_traffic(cast, dim, passes)
    return Build(
        f"cast {name}", cast_kernel, signature, {**constants, **absent, **one}, traffic, warps_of(tile),
        page="precision",
    )  # fmt: skip


_DIM = 7168
_CASTS = {name: PRECISION_RECIPES[name].casts for name in ("fp8_tensor", "fp8_blockwise", "mxfp8", "nvfp4")}  # type: ignore[index]
_NAMED: dict[str, Cast | None] = {
    "fp8_tensor, x": _CASTS["fp8_tensor"].x_fprop,
    "fp8_tensor, dy": _CASTS["fp8_tensor"].dy_dgrad,
    "fp8_blockwise, x": _CASTS["fp8_blockwise"].x_fprop,
    "fp8_blockwise, w": _CASTS["fp8_blockwise"].w_fprop,
    "mxfp8": _CASTS["mxfp8"].x_fprop,
    "nvfp4, x": _CASTS["nvfp4"].x_fprop,
    "nvfp4, w": _CASTS["nvfp4"].w_fprop,
    "nvfp4, dy": _CASTS["nvfp4"].dy_dgrad,
}
BUILDS = (
    *(_build(name, cast, _DIM) for name, cast in _NAMED.items() if cast is not None),
    _build("nvfp4, dy along tokens", _CASTS["nvfp4"].dy_wgrad, _DIM, transposed=True),  # type: ignore[arg-type]
    _build("values, mxfp8 along tokens", _CASTS["mxfp8"].x_wgrad, _DIM, values=True, transposed=True),  # type: ignore[arg-type]
    *(
        Build(
            f"amax{', Hadamard' if uses else ''}", amax_kernel,
            {"x": "*bf16", "tile_amax": "*fp32", "M": "i32", "K": "i32:16", "stack_stride": "i64:16",
             "row_stride": "i64:16"},
            {"column_stride": 1, "HADAMARD": uses, "BM": TILE[0], "BK": TILE[1]},
            Traffic("2K", 2 * _DIM, 2 * _DIM), warps_of(TILE), page="precision",
        )
        for uses in (False, True)
    ),
)  # fmt: skip
