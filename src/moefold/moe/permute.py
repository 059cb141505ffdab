"""Permute rows by expert, and back to tokens.

An assignment has the number token * K + k. The sort is stable: an expert sees its tokens in their own order, so the
same routing gives the same bits. There are three forms. ``group_by_expert`` has one row per kept assignment.
``group_padded`` gives every expert ``capacity`` rows, so no shape depends on the data; ``group_aligned`` gives it a
multiple of some number, which narrow matmuls need. A padding row has assignment number t * K and token number t, one
past the end: it reads zeros and prob 0, and is left out on the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from moefold.ops.padded_runs import aligned, padded_places
from moefold.ops.segments import count_keys, stable_order, stable_sort

Index = TypeVar("Index")


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
    return Grouped(assignment_N, token_of(assignment_N, routing.experts.shape[1]))


def group_padded(routing: Assignments, num_experts: int, capacity: int, experts_per_group: int = 1) -> Grouped:
    """``capacity`` rows per expert, or per group of neighbouring experts, without a sync.

    Assignments beyond a capacity are left out: drop by capacity before, so that there are none.
    """
    device, (num_tokens, top_k) = routing.experts.device, routing.experts.shape
    num_assignments, key_N = num_tokens * top_k, flat_experts(routing, num_experts)
    sorted_N, order_N = stable_sort(key_N, num_experts + 1)
    # Where each expert's (or group's) run of sorted assignments begins, and where the last one ends.
    begins_E = torch.arange(0, num_experts + 1, experts_per_group, dtype=sorted_N.dtype, device=device)
    first_E = torch.searchsorted(sorted_N, begins_E)
    place_EP = torch.arange(capacity, device=device) + first_E[:-1, None]
    is_padding_P = (place_EP >= first_E[1:, None]).flatten()
    # Padding reads the last assignment there is, or the one after it where there is none.
    order_N = order_N if num_assignments else order_N.new_zeros(1)
    place_P = place_EP.flatten().clamp_(max=max(num_assignments - 1, 0))
    assignment_P = order_N.index_select(0, place_P).masked_fill_(is_padding_P, num_assignments)
    return Grouped(assignment_P, token_of(assignment_P, top_k))


def group_aligned(routing: Assignments, rows_per_expert: Sequence[int], multiple: int) -> Grouped:
    """Each expert's kept assignments, followed by padding up to a multiple of rows; an expert without any has none."""
    groups = group_by_expert(routing, len(rows_per_expert), sum(rows_per_expert))
    assignment_P = align_rows(groups.assignment_N, rows_per_expert, multiple, routing.experts.numel())
    return Grouped(assignment_P, token_of(assignment_P, routing.experts.shape[1]))


def align_rows(number_N: Tensor, rows_per_expert: Sequence[int], multiple: int, padding: int) -> Tensor:
    """Numbers of rows sorted by expert, with ``padding`` as the number of rows that fill each expert's multiple."""
    sizes = aligned(rows_per_expert, multiple)
    return number_N.new_full((sum(sizes),), padding).index_copy_(
        0, padded_places(rows_per_expert, sizes, number_N.device), number_N
    )


def token_of(assignment_N: Tensor, top_k: int) -> Tensor:
    return assignment_N if top_k == 1 else assignment_N // top_k


def gather_rows(x: Tensor, token_N: Tensor, padded: bool = True) -> Tensor:
    """The row of each token number; zeros for padding, of which there is none unless ``padded``."""
    if not padded:
        return x.index_select(0, token_N)
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, token_N)


def gather_probs(prob_tK: Tensor, assignment_N: Tensor, padded: bool = True) -> Tensor:
    """The prob of each assignment number; 0 for padding."""
    return gather_rows(prob_tK.flatten(), assignment_N, padded)


def apply_with_transpose(
    rows: Tensor, index: Index, there: Callable[[Tensor, Index], Tensor], back: Callable[[Tensor, Index], Tensor]
) -> Tensor:
    """``there(rows, index)``, whose gradient is ``back(grad, index)``: linear maps of which each is the other's
    transpose. The index is kept on ctx and not saved, so that recomputation can stop before this."""
    moved: Tensor = _WithTranspose.apply(rows, index, there, back)
    return moved


class _IndexContext(Protocol):
    index: object
    back: Callable[..., Tensor]


class _WithTranspose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _IndexContext,
        rows: Tensor,
        index: object,
        there: Callable[..., Tensor],
        back: Callable[..., Tensor],
    ) -> Tensor:
        ctx.index, ctx.back = index, back
        return there(rows, index)

    @staticmethod
    def backward(ctx: _IndexContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.index), None, None, None


def by_expert(rows: Tensor, sizes_We: list[list[int]]) -> Tensor:
    """From runs of rows by source and then by expert to runs by expert and then by source."""
    moved: Tensor = rows if _one_run(sizes_We) else _MoveRuns.apply(rows, sizes_We, False)
    return moved


def by_source(rows: Tensor, sizes_We: list[list[int]]) -> Tensor:
    """The way back of ``by_expert``, and its gradient."""
    moved: Tensor = rows if _one_run(sizes_We) else _MoveRuns.apply(rows, sizes_We, True)
    return moved


def _one_run(sizes_We: list[list[int]]) -> bool:
    """Whether both orders are the same."""
    return len(sizes_We) == 1 or len(sizes_We[0]) == 1


class _MoveRuns(torch.autograd.Function):
    """One copy of all runs. Their sizes are known on the host, so there is no index and no sort."""

    @staticmethod
    def forward(ctx: _Runs, rows: Tensor, sizes_We: list[list[int]], back: bool) -> Tensor:
        ctx.sizes_We, ctx.back = sizes_We, back
        return _move_runs(rows, sizes_We, back)

    @staticmethod
    def backward(ctx: _Runs, grad: Tensor) -> tuple[Tensor, None, None]:
        return _move_runs(grad, ctx.sizes_We, not ctx.back), None, None


class _Runs(Protocol):
    sizes_We: list[list[int]]
    back: bool


def _move_runs(rows: Tensor, sizes_We: list[list[int]], back: bool) -> Tensor:
    """``back``: rows are by expert, and returned by source."""
    num_sources, num_experts = len(sizes_We), len(sizes_We[0])
    outer, inner = (num_experts, num_sources) if back else (num_sources, num_experts)
    if len(set(chain.from_iterable(sizes_We))) == 1:
        # Runs of one size: a transposition.
        return rows.unflatten(0, (outer, inner, sizes_We[0][0])).transpose(0, 1).flatten(0, 2)
    sizes = [sizes_We[j][i] if back else sizes_We[i][j] for i in range(outer) for j in range(inner)]
    runs = rows.split(sizes)
    return torch.cat([runs[i * inner + j] for j in range(inner) for i in range(outer)])


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
