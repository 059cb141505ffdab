"""Messages of narrow numbers: codes, and behind them the scales of their blocks, as bytes.

One message has both, so that nothing is sent twice, and bytes are what every backend sends (gloo refuses float8). A
row's bytes depend on that row alone (``NarrowRowCodec``), so rows may be narrowed before or after they are permuted; a
part of a sum is narrowed as a whole, because its blocks may have several rows (``NarrowPartCodec``).

Shapes: N rows, D columns, c their blocks, B bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.config.casts import Cast
from moefold.precision.operands import REFERENCE, Quantizers
from moefold.precision.quantize import FLOAT8, SCALE_DTYPES, Quantized, dequantize


class NarrowRowCodec:
    """A ``RowCodec`` of ``comm/message_codecs.py``, by a cast with blocks along rows."""

    def __init__(self, cast: Cast, quantizers: Quantizers = REFERENCE) -> None:
        assert cast.block is not None and cast.block[0] == 1 and cast.element in FLOAT8, f"not a cast of rows: {cast}"
        self.cast, self.quantizers = cast, quantizers
        self.scale_dtype = SCALE_DTYPES[cast.scale]

    def pack(self, rows_ND: Tensor) -> Tensor:
        quantized = self.quantizers.quantize(rows_ND, self.cast)
        codes_ND, scales_Nc = quantized.codes_MK, quantized.scale_rc
        return torch.cat([_packed_copy(part).view(torch.uint8) for part in (codes_ND, scales_Nc)], 1)

    def unpack(self, packed_NB: Tensor, like: Tensor) -> Tensor:
        codes, scales = packed_NB.split([like.shape[-1], packed_NB.shape[-1] - like.shape[-1]], 1)
        codes_ND = _packed_copy(codes).view(FLOAT8[self.cast.element])
        scales_Nc = _packed_copy(scales).view(self.scale_dtype)
        return dequantize(Quantized(codes_ND, scales_Nc, None, self.cast)).to(like.dtype)

    def round(self, rows_ND: Tensor) -> Tensor:
        """What rows are after they were packed and unpacked."""
        rounded: Tensor = self.quantizers.fake_quantize(rows_ND, self.cast).to(rows_ND.dtype)
        return rounded


class NarrowPartCodec:
    """A ``PartCodec`` of ``comm/message_codecs.py``."""

    def __init__(self, cast: Cast, quantizers: Quantizers = REFERENCE) -> None:
        assert cast.element in FLOAT8 and not cast.scales_whole_matrix, f"not a cast of blocks: {cast}"
        self.cast, self.quantizers = cast, quantizers
        self.scale_dtype = SCALE_DTYPES[cast.scale]

    def pack(self, part_ND: Tensor) -> Tensor:
        quantized = self.quantizers.quantize(part_ND, self.cast)
        return torch.cat([part.flatten().view(torch.uint8) for part in (quantized.codes_MK, quantized.scale_rc)])

    def unpack(self, packed: Tensor, shape: torch.Size) -> Tensor:
        codes, scales = packed[: shape.numel()], packed[shape.numel() :]
        scale_rc = _packed_copy(scales).view(self.scale_dtype).view(self.cast.scale_shape(shape))
        return dequantize(Quantized(codes.view(FLOAT8[self.cast.element]).view(shape), scale_rc, None, self.cast))


def _packed_copy(columns: Tensor) -> Tensor:
    """A copy whose columns lie side by side, so that it can be viewed as another dtype: a single row or column counts
    as contiguous whatever its stride, and a slice may start where the dtype may not."""
    return columns.clone(memory_format=torch.contiguous_format)
