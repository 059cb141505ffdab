"""Which hosts train in the next start of a run over several hosts; nothing here touches a network or a file.

Launchers that want a start beat in a store, and the launcher that serves it decides. If all hosts beat, all take part.
Else it waits ``patience`` seconds, and goes on with those that beat, if they have a legal layout. A host that is known
to be lost is not waited for. The decision is a `HostStart`: numbered, written once, the same for all hosts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass

from moefold.errors import TrainingError

# A host that has not beaten for so long has ended, or is not reached.
ALIVE_SECONDS = 5.0


@dataclass(frozen=True)
class HostStart:
    """One start of the ranks: host ``hosts[i]`` has the ranks from ``i * ranks`` on, and host ``store`` decided it.

    ``came``: for how many hosts the layout was chosen, which may need fewer.
    """

    number: int
    store: int
    hosts: tuple[int, ...]
    came: int
    ranks: int
    world: int
    layout: str

    def first_rank(self, host: int) -> int:
        return self.hosts.index(host) * self.ranks

    def ranks_of(self, host: int) -> int:
        """The last host may have ranks that the layout does not need."""
        return min(self.ranks, self.world - self.first_rank(host))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> HostStart:
        """Raises ValueError if it is something else."""
        data = json.loads(text)
        try:
            numbers = [data[name] for name in ("number", "store", "came", "ranks", "world")]
            hosts, layout = tuple(data["hosts"]), data["layout"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a start of hosts: {error}") from None
        if not (hosts and all(isinstance(one, int) for one in (*numbers, *hosts)) and isinstance(layout, str)):
            raise ValueError("not a start of hosts: wrong types")
        number, store, came, ranks, world = numbers
        return cls(number, store, hosts, came, ranks, world, layout)


@dataclass(frozen=True)
class Fit:
    """The layout of a number of hosts: its world, and in words."""

    world: int
    layout: str


# From the number of hosts; raises a `TrainingError` if the run must not go on with so few.
FitHosts = Callable[[int], Fit]


class Beats:
    """Who is there, by counters that advance; clocks of other hosts are not read."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._advanced: dict[int, float] = {}

    def see(self, counts: Collection[int], now: float) -> frozenset[int]:
        """Hosts whose counter advanced within the last `ALIVE_SECONDS`; ``counts`` has one of each host.

        A counter that is seen for the first time may be one of an earlier start.
        """
        for host, count in enumerate(counts):
            if self._last.setdefault(host, count) != count:
                self._last[host], self._advanced[host] = count, now
        return frozenset(host for host, at in self._advanced.items() if now - at < ALIVE_SECONDS)


def choose_start(
    hosts: int,
    ranks: int,
    came: Collection[int],
    lost: Collection[int],
    waited: float,
    patience: float,
    fit: FitHosts,
    before: int,
    leader: int,
) -> HostStart | str:
    """The start after number ``before``, or why it has to wait.

    ``leader`` decides, so it is among ``came``, and takes part in every start: it must notice when one ends.
    """
    missing = sorted(set(range(hosts)) - set(came))
    if leader not in came:
        return f"host {leader} does not reach the store that it serves"
    if missing:
        if not patience:
            return f"hosts {missing} are missing, and with a host patience of 0 nothing goes on without them"
        if waited < patience and not set(missing) <= set(lost):
            return f"hosts {missing} have not come"
    try:
        chosen = fit(hosts - len(missing))
    except TrainingError as error:
        return f"hosts {missing} are missing, and without them the run cannot go on: {error}"
    # Where the layout takes fewer hosts than came, the others stand by.
    needed = -(-chosen.world // ranks)
    first = [leader, *(host for host in sorted(came) if host != leader)][:needed]
    return HostStart(before + 1, leader, tuple(sorted(first)), len(came), ranks, chosen.world, chosen.layout)


def candidates_in_order(count: int, store: int | None) -> tuple[int, ...]:
    """Hosts that may serve the store: the one that served it last, then the next ones, around.

    Before the first start there is nothing to agree with, so host 0 alone may.
    """
    return (0,) if store is None else tuple((store + step) % count for step in range(count))
