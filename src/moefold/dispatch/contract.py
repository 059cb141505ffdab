"""What a dispatcher promises: rows and what was chosen for them go out, sums of answers come home in token order.

t tokens here, K choices per token, S rows arriving here, e experts of this rank, D width.

A dispatcher moves rows and nothing else. What arrives are source rows, each with its choices among the experts of this
rank; the experts answer with one row for each, the sum of its choices' weighed answers. So a row that several experts
here were chosen for need travel only once each way, and sorting rows by expert is the experts' own business.

Nothing stays on the dispatcher between ``dispatch`` and ``combine``: what the way home needs is in the ticket, so any
number of microbatches can be under way at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Routing(NamedTuple):
    """Every token's choices, by global expert number. A choice that is not kept was dropped and goes nowhere."""

    expert_tK: Tensor
    weight_tK: Tensor
    kept_tK: Tensor | None = None


class Arrived(NamedTuple):
    """Rows for the experts of this rank, with their choices among those, numbered from 0."""

    rows_SD: Tensor
    choices: Routing
    # How many kept choices each expert has, and the same on the host.
    rows_per_expert_e: Tensor
    rows_per_expert: list[int]
    # Every expert computes exactly so many rows, empty ones included, so no shape depends on data; None if they differ.
    slots: int | None
    ticket: Any


class Dispatcher(Protocol):
    def dispatch(self, x_tD: Tensor, routing: Routing) -> Arrived: ...

    def combine(self, answers_SD: Tensor, ticket: Any) -> Tensor:
        """Add up each token's answers, which the experts have already weighed."""
        ...
