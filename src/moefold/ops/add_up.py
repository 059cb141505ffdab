"""Sums of chosen rows, in one pass.

P rows, S sums, C chosen rows in the order of their sums, L width.

torch's ``embedding_bag`` reads each chosen row once, times its weight, and adds up in float32 at least.
It is an operation of ours here, so that whoever watches memory sees its answer and not what torch notes down beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.library.custom_op(
    "moefold::add_up", mutates_args=(), schema="(Tensor rows, Tensor row, Tensor first, Tensor? weight) -> Tensor"
)
def add_up(rows_PL: Tensor, row_C: Tensor, first_S: Tensor, weight_C: Tensor | None) -> Tensor:
    """[S, L]: sum i is of the rows ``row[first[i]:first[i + 1]]``, times their weights if there are any."""
    weight_C = None if weight_C is None else weight_C.to(rows_PL.dtype)
    return F.embedding_bag(row_C, rows_PL, first_S, mode="sum", per_sample_weights=weight_C)


@add_up.register_fake
def _shape(rows_PL: Tensor, row_C: Tensor, first_S: Tensor, weight_C: Tensor | None) -> Tensor:
    return rows_PL.new_empty(first_S.shape[0], rows_PL.shape[1])


def add_up_by_loop(rows_PL: Tensor, row_C: Tensor, first_S: Tensor, weight_C: Tensor | None) -> Tensor:
    """The twin."""
    weight_C = torch.ones_like(row_C, dtype=rows_PL.dtype) if weight_C is None else weight_C.to(rows_PL.dtype)
    ends = [*first_S.tolist()[1:], row_C.shape[0]]
    sums = [
        (rows_PL[row_C[start:stop]].double() * weight_C[start:stop, None].double()).sum(0)
        for start, stop in zip(first_S.tolist(), ends, strict=True)
    ]
    return torch.stack(sums).to(rows_PL.dtype) if sums else rows_PL.new_zeros(0, rows_PL.shape[1])
