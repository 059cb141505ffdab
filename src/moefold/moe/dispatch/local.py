"""All experts are on this rank: nothing is sent."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, ExpertInput, Routing, counts_of


class LocalDispatcher:
    """With a ``capacity`` every expert computes exactly that many rows: shapes are known without a sync.

    Without one, ``read`` brings the number of rows per expert to the host.
    """

    def __init__(
        self,
        num_experts: int,
        capacity: int | None = None,
        read: Callable[[Tensor], list[int]] = SYNC_SPLIT_SIZES.leaving,
    ) -> None:
        self.num_experts = num_experts
        self.capacity = capacity
        self.read = read

    def dispatch(self, x_tL: Tensor, routing: Routing) -> ExpertInput:
        if self.capacity is not None:
            counts = even_counts(self.num_experts, self.capacity, x_tL)
            return ExpertInput(x_tL, routing, *counts, self.capacity, None)
        rows_per_expert_E = counts_of(routing, self.num_experts)
        return ExpertInput(x_tL, routing, rows_per_expert_E, self.read(rows_per_expert_E), None, None)

    def combine(self, expert_out_tL: Tensor, ticket: None) -> Tensor:
        return expert_out_tL


def even_counts(num_experts: int, capacity: int, like: Tensor) -> tuple[Tensor, list[int]]:
    """The same number of rows for every expert, on the device and on the host."""
    return torch.full((num_experts,), capacity, device=like.device), [capacity] * num_experts
