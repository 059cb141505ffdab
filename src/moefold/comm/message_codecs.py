"""Messages that are narrower than what is computed with: what collectives need to know of them.

Rows that are moved and not summed are packed and unpacked one by one (``RowCodec``). Of a sum over ranks, each part is
packed as a whole (``PartCodec``). `precision/row_messages.py` has both in narrow formats.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class RowCodec(Protocol):
    """Rows as bytes and back, each row by itself."""

    def pack(self, rows_ND: Tensor) -> Tensor:
        """[N, B] in uint8, which every backend sends."""
        ...

    def unpack(self, packed_NB: Tensor, like: Tensor) -> Tensor:
        """[N, D] with the last dim and in the dtype of ``like``."""
        ...


class PartCodec(Protocol):
    """One rank's part of a sum [N, D] as bytes and back."""

    def pack(self, part_ND: Tensor) -> Tensor:
        """Flat, in uint8; as many bytes for every part of this shape."""
        ...

    def unpack(self, packed: Tensor, shape: torch.Size) -> Tensor:
        """In float32."""
        ...


class BFloat16Parts:
    """Parts that are rounded to bfloat16, a ``PartCodec``."""

    def pack(self, part_ND: Tensor) -> Tensor:
        return part_ND.bfloat16().flatten().view(torch.uint8)

    def unpack(self, packed: Tensor, shape: torch.Size) -> Tensor:
        return packed.view(torch.bfloat16).view(shape).float()


# How a sum over ranks is computed: in a dtype (None: at least float32), or from narrow parts.
SumFormat = torch.dtype | PartCodec


def sum_parts(parts_WN: Tensor, total_N: Tensor) -> None:
    """Added in the dtype of the sum, in the order of the ranks."""
    total_N.copy_(parts_WN[0])
    for part_N in parts_WN[1:]:
        total_N.add_(part_N)
