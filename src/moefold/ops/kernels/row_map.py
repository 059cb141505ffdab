"""One map says where every choice's row stands; permuting, unpermuting and both gradients read only this.

t tokens, K choices per token, E experts, R rows sorted by expert, m the multiple to which an expert's rows are filled.

Expert e owns the rows from start_E[e] to start_E[e + 1]. The first count_E[e] of them are tokens in their own order,
the rest are pads: a low-precision product wants its rows in blocks of 16 or 32, and a pad of zeros changes no sum. The
number of rows is bounded without a look at the data, so the host never waits for the device; rows past start_E[E]
belong to nobody and are zeros too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.ops.permute import Choices
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


def map_rows(choices: Choices, num_experts: int, multiple: int = 1) -> RowMap:
    expert_tK, kept_tK = choices.expert_tK, choices.kept_tK
    key_N = expert_tK if kept_tK is None else expert_tK.where(kept_tK, num_experts)
    key_N = key_N.flatten()
    count_E = count_keys(key_N, num_experts + 1)[:num_experts]
    padded_E = (count_E + (multiple - 1)) // multiple * multiple
    start_E = torch.cat([count_E.new_zeros(1), padded_E.cumsum(0)])
    row_N = start_E[key_N] + rank_within_key(key_N, num_experts + 1)
    row_tK = row_N.where(key_N < num_experts, -1).view_as(expert_tK)
    num_rows = most_rows(expert_tK.numel(), num_experts, multiple)
    return RowMap(row_tK.to(torch.int32), start_E.to(torch.int32), count_E.to(torch.int32), num_rows)
