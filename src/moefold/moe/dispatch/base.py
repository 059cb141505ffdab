"""What a dispatcher promises: rows and what was chosen for them go out, sums of answers come home in token order.

t tokens here, K choices per token, S rows arriving here, e experts of this rank, D width.

A dispatcher moves rows and nothing else. What arrives are source rows, each with its choices among the experts of this
rank; the experts answer with one row for each, the sum of its choices' weighed answers. So a row that several experts
here were chosen for need travel only once each way, and sorting rows by expert is the experts' own business.

Nothing stays on the dispatcher between ``dispatch`` and ``combine``: what the way home needs is in the ticket, so any
number of microbatches can be under way at once.

Where a dispatcher learns how many rows travel: the one thing about routing that the host must know.

E experts in all, e experts of this rank, S source ranks, P ranks of the block or of a hop's group.

Splits of an uneven exchange are numbers on the host, made of counts on the device. ``SyncSplitSizes`` waits for the
device and reads them. Whoever knows them beforehand can say so instead, and then nothing here looks at any data.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

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


# Where rows go once per rank: straight to their ranks, or across hosts first and then to the ranks inside.
ExchangeName = Literal["direct", "across", "inside"]


class SplitSizeSource(Protocol):
    """Counts on the host; each is asked with the same counts on the device."""

    def leaving(self, rows_per_expert_E: Tensor) -> list[int]:
        """Rows of this rank's tokens for each expert."""
        ...

    def arriving(self, rows_from_Se: Tensor) -> list[list[int]]:
        """Rows from each source for each expert of this rank."""
        ...

    def gathered(self, rows_per_expert_e: Tensor) -> list[int]:
        """Rows of the whole block's tokens for each expert of this rank."""
        ...

    def tokens(self, tokens_of_P: Tensor) -> list[int]:
        """How many tokens each rank of the block holds."""
        ...

    def leaving_once(self, hop: ExchangeName, rows_P: Tensor) -> list[int]:
        """Rows that leave for each rank of the hop's group, each once however many of its experts it chose."""
        ...

    def arriving_once(self, hop: ExchangeName, counts_S: Tensor) -> list[list[int]]:
        """From each source: its rows, and how many of them chose each expert of the hop's end."""
        ...


class SyncSplitSizes:
    """Waits for the device, and reads."""

    def leaving(self, rows_per_expert_E: Tensor) -> list[int]:
        return rows_per_expert_E.tolist()

    def arriving(self, rows_from_Se: Tensor) -> list[list[int]]:
        return rows_from_Se.tolist()

    def gathered(self, rows_per_expert_e: Tensor) -> list[int]:
        return rows_per_expert_e.tolist()

    def tokens(self, tokens_of_P: Tensor) -> list[int]:
        return tokens_of_P.tolist()

    def leaving_once(self, hop: ExchangeName, rows_P: Tensor) -> list[int]:
        return rows_P.tolist()

    def arriving_once(self, hop: ExchangeName, counts_S: Tensor) -> list[list[int]]:
        return counts_S.tolist()


SYNC_SPLIT_SIZES = SyncSplitSizes()
