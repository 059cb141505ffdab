"""Both copies of an operand from one read of it, where its casts and its rows allow that.

Every operand is narrowed twice, for two matmuls that sum over different dims: along features (rowwise) and along tokens
(columnwise). A backend that has ``quantize_both`` makes both copies when the first is needed; the second waits for its
matmul as codes and scales, found by the tensor and no longer than that lives:

    X     rowwise for fprop, columnwise for wgrad, where inputs are kept narrow (`narrow_inputs.py`);
    dY    rowwise for dgrad, columnwise for wgrad, which a schedule may defer: codes wait;
    W     rowwise for fprop, columnwise for dgrad, once per step (`operands.py`).

Otherwise each copy is made when its matmul needs it, as with backends that have no ``quantize_both``: the same bits.

Where values are those of rowwise codes (rows that were sent to experts as such), the columnwise copy follows from the
codes (``requantize``), which are half of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from moefold.config.casts import Cast
from moefold.precision.quantize import Quantized, dequantize, quantize


class BothWays(NamedTuple):
    """Of a matrix and of its transpose: both with blocks along their last dim."""

    row: Quantized
    column: Quantized


def quantize_both_reference(x_MK: Tensor, row: Cast, column: Cast, *, seed: int = 0) -> BothWays:
    return BothWays(quantize(x_MK, row, seed=seed), quantize(x_MK.mT, column, seed=seed))


def requantize_reference(row: Quantized, column: Cast) -> Quantized:
    """From codes along columns to those along rows, of the transpose: the values that codes stand for, narrowed again.

    Under scales that are powers of two most of them are numbers of the new blocks too; others are rounded once more.
    """
    return quantize(dequantize(row).mT, column)


def share_a_read(row: Cast | None, column: Cast | None) -> bool:
    """One format and one block of a part of a row. A square block has one copy for both directions, and whole matrices
    and rows no tile that holds them; the columnwise cast alone may be transformed."""
    if row is None or column is None or row.block is None or row.block[0] != 1 or not row.block[1]:
        return False
    same = (row.element, row.block, row.scale) == (column.element, column.block, column.scale)
    return same and not row.hadamard and not row.delayed and not column.delayed


def narrows_rows_alone(cast: Cast | None) -> bool:
    """Scales are those of parts of one row, and nothing is drawn: a row has the same codes wherever it lies."""
    return cast is not None and share_a_read(cast, cast) and not cast.scales_whole_matrix and cast.rounding == "nearest"


def rows_are_whole(cast: Cast, rows_per_expert: Sequence[int], align: int) -> bool:
    """Whether no rows of zeros have to be put in for blocks along tokens: rows are aligned already, no block has rows
    of two experts, and no scale is that of one expert's rows."""
    if any(rows % align for rows in rows_per_expert):
        return False
    if len(rows_per_expert) == 1:
        return True
    assert cast.block is not None
    return not cast.scales_whole_matrix and not any(rows % cast.block[1] for rows in rows_per_expert)


class WaitingCopies:
    """Codes and scales that were made ahead, by tensor."""

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()

    def put(self, x: Tensor, copy: Quantized) -> None:
        self._copies[x] = (x._version, copy)

    def get(self, x: Tensor, cast: Cast | None) -> Quantized | None:
        """None if there is none, or the tensor has changed since."""
        version, copy = self._copies.get(x, (None, None))
        return copy if copy is not None and version == x._version and copy.cast == cast else None

    def take(self, x: Tensor, cast: Cast | None) -> Quantized | None:
        """The same, which then waits no longer."""
        copy = self.get(x, cast)
        self._copies.pop(x, None)
        return copy

    def clear(self) -> None:
        self._copies.clear()
