"""Rows sorted by expert, and back to tokens.

t tokens, K choices per token, choice number token*K + k, N rows sorted by expert, E experts, C rows per expert where
every expert gets the same, P = E*C slots, D width.

Sorting is stable: an expert sees its tokens in their own order, so the same routing gives the same bits. There are two
forms. ``group_by_expert`` has as many rows as there are kept choices. ``group_padded`` gives every expert C slots, so
no shape depends on the data; an empty slot points one past the end, at the row that ``add_empty_row`` puts there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.ops.segments import count_keys, rank_within_key, stable_order


class Grouped(NamedTuple):
    choice_N: Tensor
    token_N: Tensor
    rows_per_expert_E: Tensor


class PaddedGroups(NamedTuple):
    """Empty slots hold choice number t*K and token number t."""

    choice_P: Tensor
    token_P: Tensor
    filled_P: Tensor


def group_by_expert(expert_tK: Tensor, kept_tK: Tensor | None, num_experts: int) -> Grouped:
    """Kept choices in the order of their experts. Where some were dropped, the number of the rest is read back."""
    key_N = _expert_or_none(expert_tK, kept_tK, num_experts)
    rows_per_key = count_keys(key_N, num_experts + 1)
    choice_N = stable_order(key_N, num_experts + 1)
    if kept_tK is not None:
        choice_N = choice_N[: int(rows_per_key[:num_experts].sum())]
    return Grouped(choice_N, choice_N // expert_tK.shape[1], rows_per_key[:num_experts])


def group_padded(expert_tK: Tensor, kept_tK: Tensor | None, num_experts: int, capacity: int) -> PaddedGroups:
    """Slots expert by expert, ``capacity`` each, without a look at the data.

    Choices beyond an expert's slots have no place and are left out: drop by capacity before, so that there are none.
    """
    num_choices, num_slots = expert_tK.numel(), num_experts * capacity
    key_N = _expert_or_none(expert_tK, kept_tK, num_experts)
    place_N = rank_within_key(key_N, num_experts + 1)
    slot_N = (key_N * capacity + place_N).where((key_N < num_experts) & (place_N < capacity), num_slots)
    # One slot more than there are: choices without a place overwrite one another there, and it is cut off.
    choice_P = torch.full((num_slots + 1,), num_choices, device=expert_tK.device)
    choice_P = choice_P.scatter(0, slot_N, torch.arange(num_choices, device=expert_tK.device))[:num_slots]
    return PaddedGroups(choice_P, choice_P // expert_tK.shape[1], choice_P < num_choices)


def _expert_or_none(expert_tK: Tensor, kept_tK: Tensor | None, num_experts: int) -> Tensor:
    """Dropped choices get the number after the last expert, so that they sort behind all others."""
    return (expert_tK if kept_tK is None else expert_tK.where(kept_tK, num_experts)).flatten()


def add_empty_row(x_tD: Tensor) -> Tensor:
    """One row of zeros at the end, for empty slots to point at."""
    return torch.cat([x_tD, x_tD.new_zeros(1, *x_tD.shape[1:])])


def take_rows(x_tD: Tensor, token_N: Tensor) -> Tensor:
    return x_tD.index_select(0, token_N)


def put_back(rows_ND: Tensor, token_N: Tensor, num_tokens: int) -> Tensor:
    """Add up the rows of each token, in the order in which they stand. The gradient of ``take_rows``."""
    return rows_ND.new_zeros(num_tokens, *rows_ND.shape[1:]).index_add(0, token_N, rows_ND)


def group_by_loop(expert_tK: Tensor, kept_tK: Tensor | None, num_experts: int) -> list[list[int]]:
    """The twin of both groupings: the choice numbers of every expert."""
    groups: list[list[int]] = [[] for _ in range(num_experts)]
    kept = torch.ones_like(expert_tK, dtype=torch.bool) if kept_tK is None else kept_tK
    for choice, (expert, keep) in enumerate(zip(expert_tK.flatten().tolist(), kept.flatten().tolist(), strict=True)):
        if keep:
            groups[expert].append(choice)
    return groups
