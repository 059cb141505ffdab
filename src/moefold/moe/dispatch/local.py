"""All experts live here: nothing travels.

t tokens, K choices per token, E experts, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, Arrived, Routing
from moefold.moe.permute import count_choices


class LocalDispatcher:
    """With ``slots`` every expert computes exactly that many rows: shapes are known, and nothing is read back.

    Without them, ``read`` brings the number of rows per expert to the host.
    """

    def __init__(
        self, num_experts: int, slots: int | None = None, read: Callable[[Tensor], list[int]] = SYNC_SPLIT_SIZES.leaving
    ) -> None:
        self.num_experts = num_experts
        self.slots = slots
        self.read = read

    def dispatch(self, x_tD: Tensor, routing: Routing) -> Arrived:
        if self.slots is not None:
            return Arrived(x_tD, routing, *even_counts(self.num_experts, self.slots, x_tD), self.slots, None)
        rows_per_expert_E = count_choices(routing, self.num_experts)
        return Arrived(x_tD, routing, rows_per_expert_E, self.read(rows_per_expert_E), None, None)

    def combine(self, answers_tD: Tensor, ticket: None) -> Tensor:
        return answers_tD


def even_counts(num_experts: int, slots: int, like: Tensor) -> tuple[Tensor, list[int]]:
    """The same number of rows for every expert, on the device and on the host."""
    return torch.full((num_experts,), slots, device=like.device), [slots] * num_experts
