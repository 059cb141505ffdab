"""Which row of which expert a choice becomes, when every expert's rows are rounded up to a few distinct numbers.

S source rows, K choices per row, C kept choices (source row by source row), P rows with pads, e experts.

A matmul library plans a product for its exact shape. Routing changes at every step, so experts would meet a new shape
each time and pay for a new plan. Rounded up to a multiple of ``STEP`` rows, few shapes are left, and they come back. A
pad repeats source row 0 with weight 0: it costs its share of the product, needs no clearing, and its answer is never
looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.moe.permute import Choices, group_by_expert

STEP = 32


class ExpertRows(NamedTuple):
    """Rows stand expert by expert, ``sizes[i]`` of them for expert i."""

    sizes: tuple[int, ...]
    source_P: Tensor
    # The way back: the row of each kept choice, and where the choices of each source row begin.
    row_C: Tensor
    first_S: Tensor
    # The number (source row * K + k) of each kept choice; None where all are kept.
    choice_C: Tensor | None


def rounded_up(rows: int) -> int:
    return -(-rows // STEP) * STEP


def lay_out_rows(routing: Choices, rows_per_expert: Sequence[int]) -> ExpertRows:
    """``rows_per_expert``: how many choices of each expert are kept, on the host."""
    num_sources, num_choices = routing.expert_tK.shape
    device = routing.expert_tK.device
    groups = group_by_expert(routing, len(rows_per_expert), sum(rows_per_expert))
    sizes = tuple(map(rounded_up, rows_per_expert))
    place_C = _places(rows_per_expert, sizes, device)
    source_P = torch.zeros(sum(sizes), dtype=torch.int64, device=device).index_copy_(0, place_C, groups.token_N)
    row_of_choice = torch.empty(num_sources * num_choices, dtype=torch.int64, device=device)
    row_of_choice.index_copy_(0, groups.choice_N, place_C)
    if routing.kept_tK is None:
        first_S = torch.arange(0, num_sources * num_choices, num_choices, device=device)
        return ExpertRows(sizes, source_P, row_of_choice, first_S, None)
    kept_S = routing.kept_tK.sum(1)
    choice_C = groups.choice_N.sort().values
    return ExpertRows(sizes, source_P, row_of_choice.index_select(0, choice_C), kept_S.cumsum(0) - kept_S, choice_C)


def weights_of_choices(weight_SK: Tensor, rows: ExpertRows) -> Tensor:
    """Of the kept choices, in the order of ``row_C``."""
    return weight_SK.flatten() if rows.choice_C is None else weight_SK.flatten().index_select(0, rows.choice_C)


def weights_of_rows(weight_SK: Tensor, rows: ExpertRows) -> Tensor:
    """Of each row; 0 for a pad."""
    weight_C = weights_of_choices(weight_SK, rows)
    return weight_C.new_zeros(rows.source_P.shape[0]).index_copy_(0, rows.row_C, weight_C)


def choices_of_rows(value_P: Tensor, rows: ExpertRows, shape_SK: torch.Size) -> Tensor:
    """Each row's value at its choice; 0 for a choice that was dropped."""
    value_C = value_P.index_select(0, rows.row_C)
    if rows.choice_C is None:
        return value_C.view(shape_SK)
    return value_P.new_zeros(shape_SK.numel()).index_copy_(0, rows.choice_C, value_C).view(shape_SK)


def _places(rows_per_expert: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Where each row, sorted by expert without pads, stands among the rows with pads."""
    starts = [0]
    for size, rows in zip(sizes, rows_per_expert, strict=True):
        starts.append(starts[-1] + size - rows)
    shift_e = torch.tensor(starts[:-1], device=device)
    rows_e = torch.tensor(rows_per_expert, device=device)
    total = sum(rows_per_expert)
    return torch.arange(total, device=device) + shift_e.repeat_interleave(rows_e, output_size=total)
