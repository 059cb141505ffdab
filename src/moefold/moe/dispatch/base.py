"""The dispatcher interface: rows go to the ranks of their experts, and one summed row per token comes back.

A dispatcher moves rows and does nothing else. The rows received are source rows, each with its assignments to the
experts of this rank; the experts return one row for each, the sum over its experts of prob times expert output. So a
row with several experts on one rank need travel only once each way, and sorting rows by expert is the experts' job.

A dispatcher keeps no state between ``dispatch`` and ``combine``: what the way back needs is in the ticket, so any
number of microbatches can be in flight.

The splits of an uneven all-to-all must be on the host, and routing makes them on the device. A ``SplitSizeSource``
brings them over: ``SyncSplitSizes`` waits for the device and copies; the dry run knows them without any data.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor


class Routing(NamedTuple):
    """K assignments per row: expert numbers, probs, and which assignments are kept (None: all; others were dropped).

    [t, K] with global expert numbers where the router made it, [R, K] with this rank's own where rows were received.
    """

    experts: Tensor
    probs: Tensor
    kept: Tensor | None = None


class ExpertInput(NamedTuple):
    """Rows for the experts of this rank, with their assignments to those experts, numbered from 0."""

    rows_RL: Tensor
    assignments: Routing
    # How many kept assignments each expert has, and the same on the host.
    rows_per_expert_e: Tensor
    rows_per_expert: list[int]
    # Every expert computes exactly so many rows, padding included, so no shape depends on data; None if they differ.
    capacity: int | None
    ticket: Any


class Dispatcher(Protocol):
    def dispatch(self, x_tL: Tensor, routing: Routing) -> ExpertInput: ...

    def combine(self, expert_out_RL: Tensor, ticket: Any) -> Tensor:
        """[t, L]: each token's expert outputs summed; the experts have already multiplied them by the probs."""
        ...


# One deduplicated exchange: straight to the ranks, or across hosts first and then to the ranks inside a host.
ExchangeName = Literal["direct", "across", "inside"]


class SplitSizeSource(Protocol):
    """Counts on the host; each method is given the same counts on the device."""

    def leaving(self, rows_per_expert_E: Tensor) -> list[int]:
        """Rows of this rank's tokens for each expert."""
        ...

    def arriving(self, rows_from_We: Tensor) -> list[list[int]]:
        """Rows from each source rank for each expert of this rank."""
        ...

    def gathered(self, rows_per_expert_e: Tensor) -> list[int]:
        """Rows of all tokens of the expert block for each expert of this rank."""
        ...

    def tokens(self, tokens_of_W: Tensor) -> list[int]:
        """How many tokens each rank of the expert block holds."""
        ...

    def leaving_once(self, exchange: ExchangeName, rows_W: Tensor) -> list[int]:
        """Rows that leave for each rank of the exchange's group, each once however many experts it has there."""
        ...

    def arriving_once(self, exchange: ExchangeName, counts_WX: Tensor) -> list[list[int]]:
        """From each source rank: its rows, then its assignments to each expert at this end of the exchange."""
        ...


class SyncSplitSizes:
    """Waits for the device and copies the counts."""

    def leaving(self, rows_per_expert_E: Tensor) -> list[int]:
        return rows_per_expert_E.tolist()

    def arriving(self, rows_from_We: Tensor) -> list[list[int]]:
        return rows_from_We.tolist()

    def gathered(self, rows_per_expert_e: Tensor) -> list[int]:
        return rows_per_expert_e.tolist()

    def tokens(self, tokens_of_W: Tensor) -> list[int]:
        return tokens_of_W.tolist()

    def leaving_once(self, exchange: ExchangeName, rows_W: Tensor) -> list[int]:
        return rows_W.tolist()

    def arriving_once(self, exchange: ExchangeName, counts_WX: Tensor) -> list[list[int]]:
        return counts_WX.tolist()


SYNC_SPLIT_SIZES = SyncSplitSizes()
