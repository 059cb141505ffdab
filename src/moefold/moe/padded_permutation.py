"""The permutation of ``CpuFusedExperts``: every expert's rows rounded up to a multiple of ``STEP``.

A matmul library plans a GEMM for its exact shape. Routing changes at every step, so experts would meet a new shape each
time and pay for a new plan. Rounded up, few shapes are left, and they come back. A padding row repeats received row 0
with prob 0: it costs its part of the GEMM, needs no clearing, and its output is not read. N is the list of kept
assignments, in the order of the received rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.moe.permute import Assignments, group_by_expert
from moefold.ops.padded_runs import aligned, padded_places

STEP = 32


class PaddedRowMap(NamedTuple):
    """Rows are ordered by expert, ``sizes[i]`` of them for expert i."""

    sizes: tuple[int, ...]
    received_P: Tensor
    # The way back: the row of each kept assignment, and where the assignments of each received row begin.
    row_N: Tensor
    first_R: Tensor
    # The number (received row * K + k) of each kept assignment; None where all are kept.
    assignment_N: Tensor | None


def pad_rows(assignments: Assignments, rows_per_expert: Sequence[int]) -> PaddedRowMap:
    """``rows_per_expert``: kept assignments of each expert, on the host."""
    num_rows, top_k = assignments.experts.shape
    device = assignments.experts.device
    groups = group_by_expert(assignments, len(rows_per_expert), sum(rows_per_expert))
    sizes = tuple(aligned(rows_per_expert, STEP))
    place_N = padded_places(rows_per_expert, sizes, device)
    received_P = torch.zeros(sum(sizes), dtype=torch.int64, device=device).index_copy_(0, place_N, groups.token_N)
    row_of_assignment = torch.empty(num_rows * top_k, dtype=torch.int64, device=device)
    row_of_assignment.index_copy_(0, groups.assignment_N, place_N)
    if assignments.kept is None:
        first_R = torch.arange(0, num_rows * top_k, top_k, device=device)
        return PaddedRowMap(sizes, received_P, row_of_assignment, first_R, None)
    kept_R = assignments.kept.sum(1)
    assignment_N = groups.assignment_N.sort().values
    return PaddedRowMap(
        sizes, received_P, row_of_assignment.index_select(0, assignment_N), kept_R.cumsum(0) - kept_R, assignment_N
    )


def probs_of_assignments(prob_RK: Tensor, row_map: PaddedRowMap) -> Tensor:
    """Of the kept assignments, in the order of ``row_N``."""
    return (
        prob_RK.flatten() if row_map.assignment_N is None else prob_RK.flatten().index_select(0, row_map.assignment_N)
    )


def probs_of_rows(prob_RK: Tensor, row_map: PaddedRowMap) -> Tensor:
    """Of each permuted row; 0 for padding."""
    prob_N = probs_of_assignments(prob_RK, row_map)
    return prob_N.new_zeros(row_map.received_P.shape[0]).index_copy_(0, row_map.row_N, prob_N)


def assignments_of_rows(value_P: Tensor, row_map: PaddedRowMap, shape: torch.Size) -> Tensor:
    """Each row's value at its assignment; 0 for one that was dropped."""
    value_N = value_P.index_select(0, row_map.row_N)
    if row_map.assignment_N is None:
        return value_N.view(shape)
    return value_P.new_zeros(shape.numel()).index_copy_(0, row_map.assignment_N, value_N).view(shape)
