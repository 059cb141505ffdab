"""Rows sorted by expert, and back to tokens.

t tokens, K choices per token, choice number token*K + k, N rows sorted by expert, E experts, D width.

Sorting is stable: an expert sees its tokens in their own order, so the same routing gives the same bits. There are two
forms. ``group_by_expert`` has as many rows as there are kept choices. ``group_padded`` gives every expert the same
number of slots, so no shape depends on the data. An empty slot has choice number t*K and token number t, one past the
end: it reads zeros and has weight 0, and what it holds on the way back goes nowhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.ops.segments import count_keys, rank_within_key, stable_order


class Choices(Protocol):
    """What is needed of a routing: each token's experts, and which of these choices were not dropped."""

    @property
    def expert_tK(self) -> Tensor: ...
    @property
    def kept_tK(self) -> Tensor | None: ...


class Grouped(NamedTuple):
    choice_N: Tensor
    token_N: Tensor


def count_choices(routing: Choices, num_experts: int) -> Tensor:
    """[E]: how many kept choices each expert has."""
    return count_keys(_expert_or_none(routing, num_experts), num_experts + 1)[:num_experts]


def group_by_expert(routing: Choices, num_experts: int, num_rows: int) -> Grouped:
    """Kept choices, of which there are ``num_rows``, in the order of their experts."""
    choice_N = stable_order(_expert_or_none(routing, num_experts), num_experts + 1)[:num_rows]
    return Grouped(choice_N, choice_N // routing.expert_tK.shape[1])


def group_padded(routing: Choices, num_experts: int, capacity: int) -> Grouped:
    """Slots expert by expert, ``capacity`` each, without a look at the data.

    Choices beyond an expert's slots have no place and are left out: drop by capacity before, so that there are none.
    """
    expert_tK, device = routing.expert_tK, routing.expert_tK.device
    num_choices, num_slots = expert_tK.numel(), num_experts * capacity
    key_N = _expert_or_none(routing, num_experts)
    place_N = rank_within_key(key_N, num_experts + 1)
    slot_N = (key_N * capacity + place_N).where((key_N < num_experts) & (place_N < capacity), num_slots)
    # One slot more than there are: choices without a place overwrite one another there, and it is cut off.
    choices = torch.full((num_slots + 1,), num_choices, device=device)
    choices = choices.scatter(0, slot_N, torch.arange(num_choices, device=device))[:num_slots]
    return Grouped(choices, choices // expert_tK.shape[1])


def take_rows(x_tD: Tensor, token_N: Tensor, padded: bool = True) -> Tensor:
    """Each slot's token; zeros for an empty slot, of which there are none unless ``padded``."""
    if not padded:
        return x_tD.index_select(0, token_N)
    return torch.cat([x_tD, x_tD.new_zeros(1, *x_tD.shape[1:])]).index_select(0, token_N)


def take_weights(weight_tK: Tensor, choice_N: Tensor, padded: bool = True) -> Tensor:
    """Each slot's routing weight; 0 for an empty slot."""
    return take_rows(weight_tK.flatten(), choice_N, padded)


def put_back(rows_ND: Tensor, token_N: Tensor, num_tokens: int, padded: bool = True) -> Tensor:
    """Add up the rows of each token, in the order in which they stand. The gradient of ``take_rows``."""
    home: Tensor = _PutBack.apply(rows_ND, token_N, num_tokens, padded)
    return home


class _PutBack(torch.autograd.Function):
    """Recomputation stops once it has everything that was saved. The token numbers are held, and not saved, so that it
    need not compute the rows again, which nobody looks at."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, token_N: Tensor, num_tokens: int, padded: bool) -> Tensor:
        ctx.token_N, ctx.padded = token_N, padded
        home = rows_ND.new_zeros(num_tokens + padded, *rows_ND.shape[1:]).index_add_(0, token_N, rows_ND)
        # Copied where it is cut: a module whose parameters are sharded must not return a view.
        return home[:num_tokens].clone() if padded else home

    @staticmethod
    def backward(ctx: Any, grad_tD: Tensor) -> tuple[Tensor, None, None, None]:
        return take_rows(grad_tD, ctx.token_N, ctx.padded), None, None, None


def group_by_expert_reference(routing: Choices, num_experts: int) -> list[list[int]]:
    """The twin of both groupings: the choice numbers of every expert."""
    groups: list[list[int]] = [[] for _ in range(num_experts)]
    kept_tK = torch.ones_like(routing.expert_tK, dtype=torch.bool) if routing.kept_tK is None else routing.kept_tK
    choices = zip(routing.expert_tK.flatten().tolist(), kept_tK.flatten().tolist(), strict=True)
    for choice, (expert, kept) in enumerate(choices):
        if kept:
            groups[expert].append(choice)
    return groups


def _expert_or_none(routing: Choices, num_experts: int) -> Tensor:
    """Dropped choices get the number after the last expert, so that they sort behind all others."""
    if routing.kept_tK is None:
        return routing.expert_tK.flatten()
    return routing.expert_tK.where(routing.kept_tK, num_experts).flatten()
