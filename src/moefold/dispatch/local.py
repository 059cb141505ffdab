"""All experts live here: dispatch is a sort, combine is a sum.

t tokens, K choices per token, R rows, E experts, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moefold.dispatch.contract import Arrived, Routing
from moefold.dispatch.counts import READ_BACK
from moefold.ops.permute import group_by_expert, group_padded, put_back, take_rows, take_weights


class LocalTicket(NamedTuple):
    token_R: Tensor
    num_tokens: int


class LocalDispatcher:
    """With a ``capacity`` every expert gets exactly that many rows: shapes are known, and nothing is read back.

    Without one, ``read`` brings the number of rows per expert to the host.
    """

    def __init__(
        self, num_experts: int, capacity: int | None = None, read: Callable[[Tensor], list[int]] = READ_BACK.leaving
    ) -> None:
        self.num_experts = num_experts
        self.capacity = capacity
        self.read = read

    def dispatch(self, x_tD: Tensor, routing: Routing) -> Arrived:
        if self.capacity is None:
            groups = group_by_expert(routing, self.num_experts, self.read)
        else:
            groups = group_padded(routing, self.num_experts, self.capacity)
        return Arrived(
            take_rows(x_tD, groups.token_N),
            take_weights(routing.weight_tK, groups.choice_N),
            groups.rows_per_expert_E,
            groups.rows_per_expert,
            LocalTicket(groups.token_N, x_tD.shape[0]),
        )

    def combine(self, rows_RD: Tensor, ticket: LocalTicket) -> Tensor:
        return put_back(rows_RD, ticket.token_R, ticket.num_tokens)
