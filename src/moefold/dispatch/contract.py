"""What a dispatcher promises: rows go out sorted by expert, answers come home in token order.

t tokens here, K choices per token, R rows arriving here, e experts of this rank, D width.

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
    """Rows for the experts of this rank, sorted by expert, each with the weight its token gave to the choice."""

    rows_RD: Tensor
    weight_R: Tensor
    rows_per_expert_e: Tensor
    # The same counts on the host where they are known there without a look at the device; None keeps it sync-free.
    rows_per_expert: list[int] | None
    ticket: Any


class Dispatcher(Protocol):
    def dispatch(self, x_tD: Tensor, routing: Routing) -> Arrived: ...

    def combine(self, rows_RD: Tensor, ticket: Any) -> Tensor:
        """Add up each token's answers, which the experts have already weighed."""
        ...
