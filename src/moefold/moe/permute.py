"""Permute rows by expert, and back to tokens.

An assignment has the number token * K + k. The sort is stable: an expert sees its tokens in their own order, so the
same routing gives the same bits. There are two forms. ``group_by_expert`` has one row per kept assignment.
``group_padded`` gives every expert ``capacity`` rows, so no shape depends on the data. A padding row has assignment
number t * K and token number t, one past the end: it reads zeros and prob 0, and is left out on the way back.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.ops.segments import count_keys, rank_within_key, stable_order


class Assignments(Protocol):
    """The experts of each token or row, [t, K] or [R, K], and which assignments are kept (None: all)."""

    @property
    def experts(self) -> Tensor: ...
    @property
    def kept(self) -> Tensor | None: ...


class Grouped(NamedTuple):
    assignment_N: Tensor
    token_N: Tensor


def count_assignments(routing: Assignments, num_experts: int) -> Tensor:
    """[E]: how many kept assignments each expert has."""
    return count_keys(flat_experts(routing, num_experts), num_experts + 1)[:num_experts]


def group_by_expert(routing: Assignments, num_experts: int, num_rows: int) -> Grouped:
    """The ``num_rows`` kept assignments in the order of their experts."""
    assignment_N = stable_order(flat_experts(routing, num_experts), num_experts + 1)[:num_rows]
    return Grouped(assignment_N, assignment_N // routing.experts.shape[1])


def group_padded(routing: Assignments, num_experts: int, capacity: int) -> Grouped:
    """``capacity`` rows per expert, without a sync.

    Assignments beyond an expert's capacity are left out: drop by capacity before, so that there are none.
    """
    experts, device = routing.experts, routing.experts.device
    num_assignments, num_rows = experts.numel(), num_experts * capacity
    key_N = flat_experts(routing, num_experts)
    rank_N = rank_within_key(key_N, num_experts + 1)
    row_N = (key_N * capacity + rank_N).where((key_N < num_experts) & (rank_N < capacity), num_rows)
    # One row more than there are: assignments without a row overwrite one another there, and it is cut off.
    assignment_P = torch.full((num_rows + 1,), num_assignments, device=device)
    assignment_P = assignment_P.scatter(0, row_N, torch.arange(num_assignments, device=device))[:num_rows]
    return Grouped(assignment_P, assignment_P // experts.shape[1])


def gather_rows(x: Tensor, token_N: Tensor, padded: bool = True) -> Tensor:
    """The row of each token number; zeros for padding, of which there is none unless ``padded``."""
    if not padded:
        return x.index_select(0, token_N)
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, token_N)


def gather_probs(prob_tK: Tensor, assignment_N: Tensor, padded: bool = True) -> Tensor:
    """The prob of each assignment number; 0 for padding."""
    return gather_rows(prob_tK.flatten(), assignment_N, padded)


def unpermute_rows(rows_NL: Tensor, token_N: Tensor, num_tokens: int, padded: bool = True) -> Tensor:
    """[t, L]: the sum of each token's rows, in their order. The gradient of ``gather_rows``."""
    summed: Tensor = _UnpermuteRows.apply(rows_NL, token_N, num_tokens, padded)
    return summed


class _UnpermuteRows(torch.autograd.Function):
    """Recomputation stops once it has every saved tensor. The token numbers are kept on ctx and not saved, so that it
    does not recompute the rows, which backward does not need."""

    @staticmethod
    def forward(ctx: Any, rows_NL: Tensor, token_N: Tensor, num_tokens: int, padded: bool) -> Tensor:
        ctx.token_N, ctx.padded = token_N, padded
        summed_tL = rows_NL.new_zeros(num_tokens + padded, *rows_NL.shape[1:]).index_add_(0, token_N, rows_NL)
        # Copied where it is cut: a module whose parameters are sharded must not return a view.
        return summed_tL[:num_tokens].clone() if padded else summed_tL

    @staticmethod
    def backward(ctx: Any, grad_tL: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_rows(grad_tL, ctx.token_N, ctx.padded), None, None, None


def group_by_expert_reference(routing: Assignments, num_experts: int) -> list[list[int]]:
    """Of both groupings: the assignment numbers of every expert."""
    groups: list[list[int]] = [[] for _ in range(num_experts)]
    all_kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
    assignments = zip(routing.experts.flatten().tolist(), all_kept.flatten().tolist(), strict=True)
    for number, (expert, kept) in enumerate(assignments):
        if kept:
            groups[expert].append(number)
    return groups


def flat_experts(routing: Assignments, num_experts: int) -> Tensor:
    """[N]: expert numbers; dropped assignments get the number after the last expert and sort behind all others."""
    if routing.kept is None:
        return routing.experts.flatten()
    return routing.experts.where(routing.kept, num_experts).flatten()
