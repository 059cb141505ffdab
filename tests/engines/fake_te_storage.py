"""A fake of Transformer Engine's storages of narrow tensors: what their codes and scales stand for, entry by entry.

Values are read as its quantizers document them (`get_scale_shape`, the layout of scales for GEMMs); storages of other
shapes are refused. Only the rowwise half is there, which layout TN reads.
"""

from __future__ import annotations

from enum import IntEnum
from types import ModuleType

import torch
from tests.engines.rank_threads import require
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class DType(IntEnum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


FLOAT8 = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Storage:
    codes: Tensor
    dtype: DType

    def values(self) -> Tensor:
        raise NotImplementedError

    def read(self) -> Tensor:
        require(self.codes.dtype == torch.uint8 and self.codes.is_contiguous(), "codes are contiguous bytes")
        return self.codes.view(FLOAT8[self.dtype]).float()


class Float8TensorStorage(Storage):
    def __init__(self, *, data: Tensor, fp8_scale_inv: Tensor, fp8_dtype: DType) -> None:
        self.codes, self.scale, self.dtype = data, fp8_scale_inv, fp8_dtype

    def values(self) -> Tensor:
        require(self.scale.shape == (1,) and self.scale.dtype == torch.float32, "one scale")
        return self.read() * self.scale


class MXFP8TensorStorage(Storage):
    def __init__(
        self,
        rowwise_data: Tensor,
        rowwise_scale_inv: Tensor,
        columnwise_data: None,
        columnwise_scale_inv: None,
        fp8_dtype: DType,
        quantizer: None,
        with_gemm_swizzled_scales: bool,
    ) -> None:
        require(not with_gemm_swizzled_scales, "the fake reads scales as they are")
        self.codes, self.scale, self.dtype = rowwise_data, rowwise_scale_inv, fp8_dtype

    def values(self) -> Tensor:
        rows, columns = self.codes.shape
        require(rows % 32 == 0 and columns % 32 == 0, "multiples of 32")
        require(self.scale.shape == (up(rows, 128), up(columns // 32, 4)), "scales are padded to 128 x 4")
        exponent = self.scale[:rows].int() - 127
        of_column = torch.arange(columns) // 32
        return self.read() * torch.exp2(exponent[:, of_column].float())


class Float8BlockwiseQTensorStorage(Storage):
    def __init__(
        self,
        rowwise_data: Tensor,
        rowwise_scale_inv: Tensor,
        columnwise_data: None,
        columnwise_scale_inv: None,
        fp8_dtype: DType,
        quantizer: None,
        is_2D_scaled: bool,
    ) -> None:
        self.codes, self.scale, self.dtype, self.square = rowwise_data, rowwise_scale_inv, fp8_dtype, is_2D_scaled

    def values(self) -> Tensor:
        rows, columns = self.codes.shape
        blocks, of_row, of_column = -(-columns // 128), torch.arange(rows) // 128, torch.arange(columns) // 128
        if self.square:
            require(self.scale.shape == (-(-rows // 128), up(blocks, 4)), "scales of squares")
            return self.read() * self.scale[of_row][:, of_column]
        require(self.scale.shape == (blocks, up(rows, 4)), "scales of rows are transposed")
        return self.read() * self.scale[of_column, :rows].t()


class NVFP4TensorStorage(Storage):
    def __init__(
        self,
        rowwise_data: Tensor,
        rowwise_scale_inv: Tensor,
        columnwise_data: None,
        columnwise_scale_inv: None,
        amax_rowwise: Tensor,
        amax_columnwise: None,
        fp4_dtype: DType,
        quantizer: None,
        with_gemm_swizzled_scales: bool,
    ) -> None:
        require(not with_gemm_swizzled_scales and fp4_dtype == DType.kFloat4E2M1, "the fake reads scales as they are")
        self.codes, self.scale, self.amax = rowwise_data, rowwise_scale_inv, amax_rowwise

    def values(self) -> Tensor:
        require(self.codes.is_contiguous() and self.codes.dtype == torch.uint8, "codes are contiguous bytes")
        rows, columns = self.codes.shape[0], 2 * self.codes.shape[1]
        require(self.scale.shape == (up(rows, 128), up(columns // 16, 4)), "scales are padded to 128 x 4")
        values = torch.empty(rows, columns)
        values[:, ::2], values[:, 1::2] = E2M1[(self.codes & 15).int()], E2M1[(self.codes >> 4).int()]
        scale = self.scale[:rows].view(torch.float8_e4m3fn).float()[:, torch.arange(columns) // 16]
        return values * scale * (self.amax / (448 * 6))


def fake_te_storage() -> ModuleType:
    module = ModuleType("transformer_engine.pytorch.tensor.storage")
    kinds = (Float8TensorStorage, MXFP8TensorStorage, Float8BlockwiseQTensorStorage, NVFP4TensorStorage)
    module.__dict__.update({kind.__name__: kind for kind in kinds})
    return module
