"""Narrow GEMMs of Transformer Engine (``kernels.narrow_gemm: transformer_engine``): its storages around our codes.

Its GEMM functions take narrow operands as storages, which hold codes and scales and convert nothing. The weight is its
operand A; layout TN multiplies A [N, K] and B [M, K] as `code_operands.py` gives them, and reads the rowwise half of a
storage alone. Scales are given as its quantizers write them; MXFP8's and NVFP4's are put into the order of tensor cores
by its GEMM.

    per tensor   codes; one float32
    blockwise    1x128: scales [K blocks, M], M in multiples of 4; 128x128: [M blocks, K blocks], K in multiples of 4
    MXFP8        scales [M, K blocks], M in multiples of 128, K blocks in multiples of 4
    NVFP4        the same, two codes a byte, a block of 16 x 16 as 16 of 1 x 16; the amax of the matrix, which its GEMM
                 divides by 448 * 6

Operands are contiguous, as the library assumes. All experts are one call of its grouped GEMM, which launches one GEMM
per expert that has rows. Nothing is multiplied that has no entries.

Shapes: M rows, N columns of the product, K summed, r and c blocks of a matrix; P rows of e experts.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.errors import BackendError
from moefold.nn.narrow_gemms import NarrowGemm, matrix_of
from moefold.ops.engines import load_engine
from moefold.precision.code_operands import RowCodes
from moefold.precision.quantize import TOP, Quantized, pack_e2m1

# Of rows and of K; scales that are not here want multiples of 16 of K alone.
_MULTIPLES: Final = {"e8m0_rceil": 32, "e8m0_floor": 32, "two_level": 32}
_CODES: Final = {"e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2", "e2m1": "kFloat4E2M1"}


def product(a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
    if not a_MK.codes_MK.numel() or not b_NK.codes_MK.numel():
        return torch.zeros(len(a_MK.codes_MK), len(b_NK.codes_MK), dtype=dtype, device=a_MK.codes_MK.device)
    library = load_engine("transformer_engine_gemm")
    out: Tensor
    out, _, _, _ = library.general_gemm(storage(b_NK), storage(a_MK), out_dtype=dtype, layout="TN")
    return out


def grouped(rows: RowCodes, weight_eNK: Quantized, ends_e: Tensor) -> Tensor:
    counts, columns = [len(each.codes_MK) for each in rows.each], weight_eNK.codes_MK.shape[1]
    out_PN = torch.zeros(sum(counts), columns, dtype=rows.dtype, device=weight_eNK.codes_MK.device)
    filled = [place for place, count in enumerate(counts) if count]
    if filled:
        library = load_engine("transformer_engine_gemm")
        library.general_grouped_gemm(
            [storage(matrix_of(weight_eNK, place)) for place in filled],
            [storage(rows.each[place]) for place in filled],
            [out_PN],
            [None] * len(filled),
            rows.dtype,
            layout="TN",
            m_splits=[counts[place] for place in filled],
            single_output=True,
        )
    return out_PN


def grouped_weight_grad(grad: RowCodes, x: RowCodes, ends_e: Tensor) -> Tensor:
    """[e, Y, X]"""
    shape = (len(grad.each), len(grad.each[0].codes_MK), len(x.each[0].codes_MK))
    out_eYX = torch.zeros(shape, dtype=grad.dtype, device=grad.each[0].codes_MK.device)
    filled = [place for place, each in enumerate(grad.each) if each.codes_MK.shape[1]]
    if filled:
        library = load_engine("transformer_engine_gemm")
        library.general_grouped_gemm(
            [storage(x.each[place]) for place in filled],
            [storage(grad.each[place]) for place in filled],
            [out_eYX[place] for place in filled],
            [None] * len(filled),
            grad.dtype,
            layout="TN",
            m_splits=[shape[1]] * len(filled),
        )
    return out_eYX


def storage(matrix: Quantized) -> object:
    """As the GEMM functions take it; only its rowwise half is there."""
    cast, (rows, columns) = matrix.cast, matrix.codes_MK.shape
    multiple = _MULTIPLES.get(cast.scale, 16)
    if columns % multiple or rows % (multiple if multiple > 16 else 1):
        raise BackendError(
            f"kernels.narrow_gemm: transformer_engine takes matrices of {cast} in multiples of {multiple}, not "
            f"{rows} x {columns}; use scaled_mm, or keep this module wide by precision.wide"
        )
    storages, library = load_engine("transformer_engine_storage"), load_engine("transformer_engine_gemm")
    dtype = getattr(library.DType, _CODES[cast.element])
    codes_MK = matrix.codes_MK.view(torch.uint8).contiguous()
    if cast.block is None:
        return storages.Float8TensorStorage(data=codes_MK, fp8_scale_inv=matrix.scale_rc.reshape(1), fp8_dtype=dtype)
    if cast.scale == "two_level":
        assert matrix.tensor_scale is not None
        per_row = matrix.scale_rc.view(torch.uint8).repeat_interleave(cast.block[0], 0)[:rows]
        amax = matrix.tensor_scale.reshape(1).float() * (TOP["e4m3"] * TOP["e2m1"])
        # Columnwise codes, scales and amax; no quantizer; scales are not swizzled yet.
        return storages.NVFP4TensorStorage(
            pack_e2m1(codes_MK), _padded(per_row, 128, 4), None, None, amax, None, dtype, None, False
        )
    if cast.scale.startswith("e8m0"):
        return storages.MXFP8TensorStorage(codes_MK, _padded(matrix.scale_rc, 128, 4), None, None, dtype, None, False)
    square = cast.block[0] > 1
    scale = _padded(matrix.scale_rc if square else matrix.scale_rc.t(), 1, 4)
    return storages.Float8BlockwiseQTensorStorage(codes_MK, scale, None, None, dtype, None, square)


def _padded(scale_rc: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(scale_rc, (0, -scale_rc.shape[1] % columns, 0, -scale_rc.shape[0] % rows)).contiguous()


TE_GEMM = NarrowGemm(product, grouped, grouped_weight_grad)
