"""The twin of the permuting kernels, in plain torch; autograd finds the gradients.

t tokens, K choices per token, R rows sorted by expert, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.ops.cast import widened
from moefold.ops.kernels.row_map import RowMap
from moefold.ops.permute import take_rows, take_weights


def permute(x_tD: Tensor, rows: RowMap, weight_tK: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Every row's token, and every row's routing weight where weights are given. Rows of no token are zeros."""
    choice_R = _choice_of_row(rows)
    weight_R = None if weight_tK is None else take_weights(weight_tK, choice_R)
    return take_rows(x_tD, choice_R // rows.row_tK.shape[1]), weight_R


def unpermute(rows_RD: Tensor, rows: RowMap, weight_tK: Tensor | None = None) -> Tensor:
    """Add up each token's rows, weighted where weights are given, in float32 at least."""
    row_tK = rows.row_tK.where(rows.row_tK >= 0, rows.num_rows).long()
    picked_tKD = widened(take_rows(rows_RD, row_tK.flatten())).view(*row_tK.shape, -1)
    if weight_tK is not None:
        picked_tKD = picked_tKD * widened(weight_tK)[:, :, None]
    return picked_tKD.sum(1).to(rows_RD.dtype)


def _choice_of_row(rows: RowMap) -> Tensor:
    """The map turned round; a row of no token has the number after the last choice."""
    num_choices, device = rows.row_tK.numel(), rows.row_tK.device
    row_N = rows.row_tK.where(rows.row_tK >= 0, rows.num_rows).long().flatten()
    choice_R = torch.full((rows.num_rows + 1,), num_choices, device=device)
    return choice_R.scatter(0, row_N, torch.arange(num_choices, device=device))[: rows.num_rows]
