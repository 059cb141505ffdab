"""All experts live here: dispatch is a sort, combine is a sum.

t tokens, K choices per token, R rows, E experts, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.dispatch.contract import Arrived, Routing
from moefold.ops.permute import add_empty_row, group_by_expert, group_padded, put_back, take_rows


class LocalTicket(NamedTuple):
    """Whose answer each row is; token number ``num_tokens`` stands for an empty slot."""

    token_R: Tensor
    num_tokens: int


class LocalDispatcher:
    """With ``pad_to`` (tokens here -> rows per expert) every shape is known beforehand and nothing is read back."""

    def __init__(self, num_experts: int, pad_to: Callable[[int], int] | None = None) -> None:
        self.num_experts = num_experts
        self.pad_to = pad_to

    def dispatch(self, x_tD: Tensor, routing: Routing) -> Arrived:
        if self.pad_to is None:
            return self._sorted(x_tD, routing)
        return self._padded(x_tD, routing, self.pad_to(x_tD.shape[0]))

    def combine(self, rows_RD: Tensor, ticket: LocalTicket) -> Tensor:
        if self.pad_to is None:
            return put_back(rows_RD, ticket.token_R, ticket.num_tokens)
        return put_back(rows_RD, ticket.token_R, ticket.num_tokens + 1)[: ticket.num_tokens]

    def _sorted(self, x_tD: Tensor, routing: Routing) -> Arrived:
        groups = group_by_expert(routing.expert_tK, routing.kept_tK, self.num_experts)
        return Arrived(
            take_rows(x_tD, groups.token_N),
            take_rows(routing.weight_tK.flatten(), groups.choice_N),
            groups.rows_per_expert_E,
            groups.rows_per_expert_E.tolist(),
            LocalTicket(groups.token_N, x_tD.shape[0]),
        )

    def _padded(self, x_tD: Tensor, routing: Routing, capacity: int) -> Arrived:
        groups = group_padded(routing.expert_tK, routing.kept_tK, self.num_experts, capacity)
        return Arrived(
            take_rows(add_empty_row(x_tD), groups.token_P),
            take_rows(add_empty_row(routing.weight_tK.flatten()), groups.choice_P),
            torch.full((self.num_experts,), capacity, device=x_tD.device),
            [capacity] * self.num_experts,
            LocalTicket(groups.token_P, x_tD.shape[0]),
        )
