"""Where a dispatcher learns how many rows travel: the one thing about routing that the host must know.

E experts in all, e experts of this rank, S source ranks, P ranks of the block or of a hop's group.

Splits of an uneven exchange are numbers on the host, made of counts on the device. ``ReadBack`` waits for the device
and reads them. Whoever knows them beforehand can say so instead, and then nothing here looks at any data.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

# Where rows go once per rank: straight to their ranks, or across hosts first and then to the ranks inside.
HopName = Literal["direct", "across", "inside"]


class HostCounts(Protocol):
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

    def leaving_once(self, hop: HopName, rows_P: Tensor) -> list[int]:
        """Rows that leave for each rank of the hop's group, each once however many of its experts it chose."""
        ...

    def arriving_once(self, hop: HopName, counts_S: Tensor) -> list[list[int]]:
        """From each source: its rows, and how many of them chose each expert of the hop's end."""
        ...


class ReadBack:
    """Waits for the device, and reads."""

    def leaving(self, rows_per_expert_E: Tensor) -> list[int]:
        return rows_per_expert_E.tolist()

    def arriving(self, rows_from_Se: Tensor) -> list[list[int]]:
        return rows_from_Se.tolist()

    def gathered(self, rows_per_expert_e: Tensor) -> list[int]:
        return rows_per_expert_e.tolist()

    def tokens(self, tokens_of_P: Tensor) -> list[int]:
        return tokens_of_P.tolist()

    def leaving_once(self, hop: HopName, rows_P: Tensor) -> list[int]:
        return rows_P.tolist()

    def arriving_once(self, hop: HopName, counts_S: Tensor) -> list[list[int]]:
        return counts_S.tolist()


READ_BACK = ReadBack()
