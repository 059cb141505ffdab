"""Every collective of a step: those in the ledger, and those of FSDP.

moefold's own collectives are recorded in the ledger. FSDP all-gathers parameters and reduce-scatters gradients itself:
a collective that is dispatched and is not in the ledger is one of these.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from moefold.comm.process_groups import Groups, Ledger, Traffic
from moefold.parallel.param_shards import DATA_GROUPS

# torch's operations that FSDP uses -> their names in the ledger.
_OPERATIONS = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}

# By (name, group).
TrafficTable = dict[tuple[str, str], Traffic]


class Collective(NamedTuple):
    """One operation over one group: number of calls, and bytes that this rank passed to it in all."""

    name: str
    group: str
    count: int  # type: ignore[assignment]
    bytes: int


class CollectiveTrace:
    def __init__(self, groups: Groups) -> None:
        self.groups, self.ledger, self.fsdp = groups, groups["world"].ledger, Ledger()
        self._matched = Counter(self._ledger_calls())
        self._first = dict(self.ledger.traffic)

    def on_collective(self, operation: str, args: tuple[Any, ...]) -> None:
        """Called for every collective that is dispatched."""
        name = _OPERATIONS.get(operation)
        if name is None:
            return
        if self._ledger_calls()[name] > self._matched[name]:
            self._matched[name] += 1
            return
        sent, group = (args[0][0], args[1]) if name == "all_reduce" else (args[1], args[2])
        assert isinstance(sent, Tensor)
        self.fsdp.record(name, self._name(group), sent)

    def traffic(self) -> TrafficTable:
        """All collectives since this trace was made."""
        recorded = {key: subtract(now, self._first.get(key, Traffic())) for key, now in self.ledger.traffic.items()}
        fsdp = self.fsdp.traffic
        found = {key: add(recorded.get(key, Traffic()), fsdp.get(key, Traffic())) for key in {**recorded, **fsdp}}
        return {key: traffic for key, traffic in found.items() if traffic.calls}

    def _ledger_calls(self) -> Counter[str]:
        calls: Counter[str] = Counter()
        for (name, _), traffic in self.ledger.traffic.items():
            calls[name] += traffic.calls
        return calls

    def _name(self, boxed: Any) -> str:
        """The group's name in `DATA_GROUPS`; that of dense parameters, where experts have the same ranks."""
        handle = dist.ProcessGroup.unbox(boxed)
        for name in (name for pair in DATA_GROUPS.values() for name in pair[::-1]):
            known = self.groups[name].handle
            if known is not None and known.group_name == handle.group_name:
                return name
        return "other"


def add(a: Traffic, b: Traffic, times: int = 1) -> Traffic:
    return Traffic(a.calls + times * b.calls, a.bytes_sent + times * b.bytes_sent)


def subtract(a: Traffic, b: Traffic) -> Traffic:
    return add(a, b, -1)


def gained(now: TrafficTable, before: TrafficTable) -> TrafficTable:
    found = {key: subtract(traffic, before.get(key, Traffic())) for key, traffic in now.items()}
    return {key: traffic for key, traffic in found.items() if traffic.calls}


def collectives(table: TrafficTable) -> tuple[Collective, ...]:
    return tuple(Collective(name, group, *table[name, group]) for name, group in sorted(table))
