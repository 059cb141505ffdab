"""One map says where every choice's row stands; permuting, unpermuting and both gradients read only this.

t tokens, K choices per token, E experts, R rows sorted by expert, m the multiple to which an expert's rows are filled.

Expert e owns the rows from start_E[e] to start_E[e + 1]. The first count_E[e] of them are tokens in their own order,
the rest are pads: a low-precision product wants its rows in blocks of 16 or 32, and zeros change no sum. Where
the host does not know how many rows there are, the most there can be is taken, so it never waits for the device; rows
past start_E[E] belong to nobody and are zeros too.

The twin of the permuting kernels, in plain torch; autograd finds the gradients.

t tokens, K choices per token, R rows sorted by expert, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.moe.permute import Choices, take_rows, take_weights
from moefold.ops.fp32_linear import upcast
from moefold.ops.segments import count_keys, rank_within_key


@dataclass(frozen=True)
class RowMap:
    # int32; -1 where the choice was dropped.
    row_tK: Tensor
    # int32, E + 1 entries.
    start_E: Tensor
    count_E: Tensor
    num_rows: int


def most_rows(num_choices: int, num_experts: int, multiple: int) -> int:
    """The most that any routing needs: every expert that has a row may waste all but one row of its last block."""
    most = num_choices + min(num_experts, num_choices) * (multiple - 1)
    return most // multiple * multiple


def map_rows(choices: Choices, num_experts: int, multiple: int = 1, num_rows: int | None = None) -> RowMap:
    """``num_rows``: how many there are with pads, where that is known."""
    expert_tK, key_N = choices.expert_tK, _expert_or_none(choices, num_experts)
    count_E = count_keys(key_N, num_experts + 1)[:num_experts]
    padded_E = (count_E + (multiple - 1)) // multiple * multiple
    start_E = torch.cat([count_E.new_zeros(1), padded_E.cumsum(0)])
    row_N = start_E[key_N] + rank_within_key(key_N, num_experts + 1)
    row_tK = row_N.where(key_N < num_experts, -1).view_as(expert_tK)
    num_rows = most_rows(expert_tK.numel(), num_experts, multiple) if num_rows is None else num_rows
    return RowMap(row_tK.to(torch.int32), start_E.to(torch.int32), count_E.to(torch.int32), num_rows)


def map_slots(choices: Choices, num_experts: int, slots: int) -> RowMap:
    """Every expert owns ``slots`` rows, whatever was chosen. A choice beyond them is left out, so drop it before."""
    key_N = _expert_or_none(choices, num_experts)
    place_N = rank_within_key(key_N, num_experts + 1)
    row_N = (key_N * slots + place_N).where((key_N < num_experts) & (place_N < slots), -1)
    count_E = count_keys(key_N, num_experts + 1)[:num_experts].clamp(max=slots)
    start_E = torch.arange(num_experts + 1, dtype=torch.int32, device=key_N.device) * slots
    row_tK = row_N.view_as(choices.expert_tK).to(torch.int32)
    return RowMap(row_tK, start_E, count_E.to(torch.int32), num_experts * slots)


def _expert_or_none(choices: Choices, num_experts: int) -> Tensor:
    """Dropped choices get the number after the last expert."""
    if choices.kept_tK is None:
        return choices.expert_tK.flatten()
    return choices.expert_tK.where(choices.kept_tK, num_experts).flatten()


def permute(x_tD: Tensor, rows: RowMap, weight_tK: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Every row's token, and every row's routing weight where weights are given. Rows of no token are zeros."""
    choice_R = _choice_of_row(rows)
    weight_R = None if weight_tK is None else take_weights(weight_tK, choice_R)
    return take_rows(x_tD, choice_R // rows.row_tK.shape[1]), weight_R


def unpermute(rows_RD: Tensor, rows: RowMap, weight_tK: Tensor | None = None) -> Tensor:
    """Add up each token's rows, weighted where weights are given, in float32 at least."""
    row_tK = rows.row_tK.where(rows.row_tK >= 0, rows.num_rows).long()
    picked_tKD = upcast(take_rows(rows_RD, row_tK.flatten())).view(*row_tK.shape, -1)
    if weight_tK is not None:
        picked_tKD = picked_tKD * upcast(weight_tK)[:, :, None]
    return picked_tKD.sum(1).to(rows_RD.dtype)


def _choice_of_row(rows: RowMap) -> Tensor:
    """The map turned round; a row of no token has the number after the last choice."""
    num_choices, device = rows.row_tK.numel(), rows.row_tK.device
    row_N = rows.row_tK.where(rows.row_tK >= 0, rows.num_rows).long().flatten()
    choice_R = torch.full((rows.num_rows + 1,), num_choices, device=device)
    return choice_R.scatter(0, row_N, torch.arange(num_choices, device=device))[: rows.num_rows]
