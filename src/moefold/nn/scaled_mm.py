"""Narrow GEMMs of torch (``kernels.narrow_gemm: scaled_mm``): the calls that torchao's training layers make as well.

``torch.nn.functional.scaled_mm`` multiplies codes under scales of a named kind, on GPUs by cuBLAS; on CPUs it has
scales of tensors and of rows. ``torch._scaled_grouped_mm`` multiplies the rows of all experts in one call, in MXFP8 and
with scales of rows; other recipes have one product per expert. What the calls want is arranged here:

    K       a multiple of 16 and of the block: codes of zero fill it
    N       a multiple of 16, and of 128 where blocks of B are square: the product is cut
    scales  1x128: M is the fastest dim; 128x128: K is, in multiples of 4 blocks; MXFP8 and NVFP4: in tiles of 128 x 4,
            in the order in which tensor cores read them (``swizzle_scales``), each expert's apart
    NVFP4   two codes a byte; a block of 16 x 16 is given as 16 of 1 x 16

Shapes: M rows, N columns of the product, K summed, r and c blocks of a matrix; P rows of e experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from moefold.config.casts import Cast
from moefold.nn.narrow_gemms import NarrowGemm
from moefold.precision.code_operands import RowCodes
from moefold.precision.quantize import Quantized, pack_e2m1, swizzle_scales

# Bytes in which tensor cores take codes along K, and rows of B.
_MULTIPLE = 16
_TILE_ROWS, _TILE_COLUMNS = 128, 4


class Arranged(NamedTuple):
    """One operand as ``scaled_mm`` takes it."""

    codes: Tensor
    scales: list[Tensor]
    kinds: list[ScalingType]
    swizzles: list[SwizzleType]


def product(a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
    columns = len(b_NK.codes_MK)
    if not a_MK.codes_MK.numel() or not b_NK.codes_MK.numel():
        return torch.zeros(len(a_MK.codes_MK), columns, dtype=dtype, device=a_MK.codes_MK.device)
    depth = _padded_depth(a_MK, b_NK)
    a, b = arrange(a_MK, depth, is_b=False), arrange(b_NK, depth, is_b=True)
    # Products under scales of rows have no other format there.
    out_dtype = torch.bfloat16 if a.kinds[0] == ScalingType.RowWise else dtype
    out_MN = F.scaled_mm(
        a.codes, b.codes.t(), a.scales, a.kinds, b.scales, b.kinds, a.swizzles, b.swizzles, output_dtype=out_dtype
    )
    return out_MN[:, :columns].to(dtype)


def _padded_depth(*operands: Quantized) -> int:
    """K as both take it."""
    blocks = [each.cast.block[1] for each in operands if each.cast.block is not None]
    multiple = max(2 * _MULTIPLE if operands[0].cast.element == "e2m1" else _MULTIPLE, *blocks, 0)
    return -(-operands[0].codes_MK.shape[1] // multiple) * multiple


def arrange(matrix: Quantized, depth: int, is_b: bool) -> Arranged:
    cast, (rows, columns) = matrix.cast, matrix.codes_MK.shape
    square = cast.block is not None and cast.block[0] > 1 and cast.scale != "two_level"
    padded_rows = -rows % ((_TILE_ROWS if square else _MULTIPLE) if is_b else 1)
    bytes_MK = F.pad(matrix.codes_MK.view(torch.uint8), (0, depth - columns, 0, padded_rows)).contiguous()
    if cast.element == "e2m1":
        codes = pack_e2m1(bytes_MK).view(torch.float4_e2m1fn_x2)
    else:
        codes = bytes_MK.view(matrix.codes_MK.dtype)
    scales, kinds, swizzles = _scales(matrix, cast, rows + padded_rows, is_b)
    return Arranged(codes, scales, kinds, swizzles)


def _scales(
    matrix: Quantized, cast: Cast, rows: int, is_b: bool
) -> tuple[list[Tensor], list[ScalingType], list[SwizzleType]]:
    scale_rc, plain = matrix.scale_rc, SwizzleType.NO_SWIZZLE
    if cast.scale == "two_level":
        assert matrix.tensor_scale is not None and cast.block is not None
        per_row = scale_rc.view(torch.uint8).repeat_interleave(cast.block[0], 0)[: len(matrix.codes_MK)]
        tiles = swizzle_scales(_with_rows(per_row, rows)).view(torch.float8_e4m3fn)
        kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        return [tiles, matrix.tensor_scale.reshape(1).float()], kinds, [SwizzleType.SWIZZLE_32_4_4, plain]
    if cast.scale.startswith("e8m0"):
        tiles = swizzle_scales(_with_rows(scale_rc, rows)).view(torch.float8_e8m0fnu)
        return [tiles], [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    if cast.block is None:
        return [scale_rc.reshape(1)], [ScalingType.TensorWise], [plain]
    if cast.block[1] == 0:
        scale = _with_rows(scale_rc, rows)
        return [scale.t().contiguous() if is_b else scale], [ScalingType.RowWise], [plain]
    if cast.block[0] == 1:
        return [_with_rows(scale_rc, rows).t().contiguous().t()], [ScalingType.BlockWise1x128], [plain]
    padded = F.pad(scale_rc, (0, -scale_rc.shape[1] % _TILE_COLUMNS)).contiguous()
    return [padded.t()], [ScalingType.BlockWise128x128], [plain]


def _with_rows(scale_rc: Tensor, rows: int) -> Tensor:
    """Of padding codes, which are zero, any finite scale will do."""
    return F.pad(scale_rc, (0, 0, 0, rows - len(scale_rc))).contiguous()


# ---- all experts in one call ----


def grouped(rows: RowCodes, weight_eNK: Quantized, ends_e: Tensor) -> Tensor | None:
    """[P, N]; None where there is no such call for the recipe."""
    if rows.whole is None or not _has_grouped(rows.whole, weight_eNK):
        return None
    codes_PK = rows.whole.codes_MK.contiguous()
    if rows.whole.cast.scale.startswith("e8m0"):
        scale_a = blocked_rows([each.scale_rc for each in rows.each])
        tiles = [swizzle_scales(scale_NC) for scale_NC in weight_eNK.scale_rc.unbind()]
        scale_b = torch.stack(tiles).view(torch.float8_e8m0fnu)
    else:
        scale_a, scale_b = rows.whole.scale_rc.flatten().contiguous(), weight_eNK.scale_rc.flatten(1).contiguous()
    weight_eKN = weight_eNK.codes_MK.contiguous().mT
    return torch._scaled_grouped_mm(codes_PK, weight_eKN, scale_a, scale_b, offs=ends_e, out_dtype=torch.bfloat16)


def grouped_weight_grad(grad: RowCodes, x: RowCodes, ends_e: Tensor) -> Tensor | None:
    """[e, Y, X]; groups lie along K."""
    first, second = grad.each[0], x.each[0]
    if not _has_grouped(first, second):
        return None
    codes_YP, codes_XP = (torch.cat([_bytes(each) for each in of.each], 1) for of in (grad, x))
    if first.cast.scale.startswith("e8m0"):
        scale_a, scale_b = (blocked_columns([each.scale_rc for each in of.each]) for of in (grad, x))
    else:
        scale_a, scale_b = (torch.cat([_scale_per_row(each) for each in of.each]) for of in (grad, x))
    a_YP, b_PX = codes_YP.view(first.codes_MK.dtype), codes_XP.view(second.codes_MK.dtype).t()
    return torch._scaled_grouped_mm(a_YP, b_PX, scale_a, scale_b, offs=ends_e, out_dtype=torch.bfloat16)


def _has_grouped(a: Quantized, b: Quantized) -> bool:
    def of_rows(cast: Cast) -> bool:
        return cast.element == "e4m3" and cast.block is not None and cast.block[0] == 1

    def fits(cast: Cast) -> bool:
        return of_rows(cast) and (cast.scale.startswith("e8m0") or cast.block == (1, 0))

    sizes = (*a.codes_MK.shape[-1:], *b.codes_MK.shape[-2:])
    return fits(a.cast) and fits(b.cast) and bool(a.codes_MK.numel()) and not any(size % _MULTIPLE for size in sizes)


def _scale_per_row(matrix: Quantized) -> Tensor:
    """Of an expert without rows there is none, and any will do."""
    return matrix.scale_rc.flatten() if matrix.scale_rc.numel() else matrix.scale_rc.new_ones(len(matrix.codes_MK))


def _bytes(matrix: Quantized) -> Tensor:
    return matrix.codes_MK.view(torch.uint8)


def blocked_rows(scales: Sequence[Tensor]) -> Tensor:
    """[rows, C] per expert: each in tiles of its own, one after the other."""
    columns = -(-scales[0].shape[1] // _TILE_COLUMNS) * _TILE_COLUMNS
    return torch.cat([swizzle_scales(scale_RC) for scale_RC in scales]).view(-1, columns).view(torch.float8_e8m0fnu)


def blocked_columns(scales: Sequence[Tensor]) -> Tensor:
    """[Y, C] per expert, whose blocks lie along K."""
    rows = -(-len(scales[0]) // _TILE_ROWS) * _TILE_ROWS
    return torch.cat([swizzle_scales(scale_YC) for scale_YC in scales]).view(rows, -1).view(torch.float8_e8m0fnu)


SCALED_MM = NarrowGemm(product, grouped, grouped_weight_grad)
