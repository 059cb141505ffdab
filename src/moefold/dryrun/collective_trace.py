"""Every collective of a step, whoever asked for it: the ledger's, and those that sharded data parallelism makes itself.

moefold's own collectives write themselves into the ledger. Sharded data parallelism gathers parameters and reduces
gradients on its own; what passes by as an operation without having been written down is one of these.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from moefold.comm.ledger import Ledger, Traffic
from moefold.comm.process_groups import Groups
from moefold.parallel.param_shards import DATA_GROUPS

# torch's operations that sharding uses, by the names that the ledger gives them.
_OPERATIONS = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}

# By (name, group).
Book = dict[tuple[str, str], Traffic]


class Collective(NamedTuple):
    """One operation over one group: how often, and how many bytes this rank handed to it in all."""

    name: str
    group: str
    count: int  # type: ignore[assignment]
    bytes: int


class Wires:
    def __init__(self, groups: Groups) -> None:
        self.groups, self.ledger, self.unwritten = groups, groups["world"].ledger, Ledger()
        self._matched = Counter(self._written())
        self._first = dict(self.ledger.traffic)

    def overhear(self, operation: str, args: tuple[Any, ...]) -> None:
        """A collective passes by."""
        name = _OPERATIONS.get(operation)
        if name is None:
            return
        if self._written()[name] > self._matched[name]:
            self._matched[name] += 1
            return
        sent, group = (args[0][0], args[1]) if name == "all_reduce" else (args[1], args[2])
        assert isinstance(sent, Tensor)
        self.unwritten.record(name, self._name(group), sent)

    def book(self) -> Book:
        """Everything since these wires were laid."""
        written = {key: less(now, self._first.get(key, Traffic())) for key, now in self.ledger.traffic.items()}
        beside = self.unwritten.traffic
        found = {key: more(written.get(key, Traffic()), beside.get(key, Traffic())) for key in {**written, **beside}}
        return {key: traffic for key, traffic in found.items() if traffic.calls}

    def _written(self) -> Counter[str]:
        calls: Counter[str] = Counter()
        for (name, _), traffic in self.ledger.traffic.items():
            calls[name] += traffic.calls
        return calls

    def _name(self, boxed: Any) -> str:
        """The group by the name under which sharding knows it; dense first, where experts have the same ranks."""
        handle = dist.ProcessGroup.unbox(boxed)
        for name in (name for pair in DATA_GROUPS.values() for name in pair[::-1]):
            known = self.groups[name].handle
            if known is not None and known.group_name == handle.group_name:
                return name
        return "other"


def more(a: Traffic, b: Traffic, times: int = 1) -> Traffic:
    return Traffic(a.calls + times * b.calls, a.bytes_sent + times * b.bytes_sent)


def less(a: Traffic, b: Traffic) -> Traffic:
    return more(a, b, -1)


def gained(now: Book, before: Book) -> Book:
    found = {key: less(traffic, before.get(key, Traffic())) for key, traffic in now.items()}
    return {key: traffic for key, traffic in found.items() if traffic.calls}


def collectives(book: Book) -> tuple[Collective, ...]:
    return tuple(Collective(name, group, *book[name, group]) for name, group in sorted(book))
