"""Do the ranks' collectives fit together, and would they all finish under NCCL's rules?

`disagreements` compares what the ranks of each communicator call: the n-th collective must be the same operation with
the same shapes, dtype and device on all of them, and the n-th message from one rank to another must be expected as it
is sent.

`replay` then executes the calls. NCCL's rules:

    - calls of one communicator run on a rank in the order of their launches, one launch at a time;
    - a collective starts when all ranks of its communicator have reached it, a transfer when both ends have;
    - transfers of one batch are one launch: they may finish in any order;
    - a call starts after everything that its stream waits for (`Call.waits`); a call of a CPU tensor blocks its thread,
      and so does a communicator that is made at its first use (`init`), until all its ranks are there.

What never starts is stuck, and a circle of calls that wait for each other is the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

TRANSFERS = ("send", "recv")


@dataclass(frozen=True)
class Call:
    """One call of one rank; ``number`` counts the rank's calls, ``waits`` are earlier ones that it starts after."""

    rank: int
    number: int
    operation: str
    communicator: str
    # Of the whole world.
    ranks: tuple[int, ...]
    # The other end of a transfer, by its rank in the world.
    peer: int | None = None
    # Shapes, dtype, device.
    signature: tuple[object, ...] = ()
    stream: int | None = None
    waits: tuple[int, ...] = ()
    thread: str = "MainThread"
    where: str = ""
    # Transfers of one batch have the number of its first call.
    batch: int | None = None

    @property
    def launch(self) -> int:
        return self.number if self.batch is None else self.batch

    def __str__(self) -> str:
        whom = "" if self.peer is None else f" {'to' if self.operation == 'send' else 'from'} rank {self.peer}"
        return f"rank {self.rank}: {self.operation}{whom} on {self.communicator}, call {self.number} ({self.where})"


Logs = Mapping[int, Sequence[Call]]


def disagreements(logs: Logs) -> list[str]:
    """In words: collectives and messages that differ between the ranks that should do the same."""
    found: list[str] = []
    collectives: dict[str, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    messages: dict[tuple[str, int, int], dict[str, list[Call]]] = defaultdict(lambda: {"send": [], "recv": []})
    for calls in logs.values():
        for call in calls:
            if call.operation in TRANSFERS:
                assert call.peer is not None
                ends = (call.rank, call.peer) if call.operation == "send" else (call.peer, call.rank)
                messages[call.communicator, *ends][call.operation].append(call)
            else:
                collectives[call.communicator][call.rank].append(call)
    for communicator, by_rank in collectives.items():
        found += _compare_collectives(communicator, by_rank, logs)
    for (communicator, source, to), calls_at in messages.items():
        found += _compare_messages(communicator, source, to, calls_at)
    return found


def _compare_collectives(communicator: str, by_rank: Mapping[int, list[Call]], logs: Logs) -> Iterable[str]:
    ranks = next(iter(by_rank.values()))[0].ranks
    first = by_rank.get(ranks[0], [])
    for rank in ranks[1:]:
        if rank not in logs:
            continue
        calls = by_rank.get(rank, [])
        for a, b in zip(first, calls, strict=False):
            if (a.operation, a.signature) != (b.operation, b.signature):
                yield f"{a} with {a.signature}, but {b} with {b.signature}"
                break
        else:
            if len(first) != len(calls):
                more = max(first, calls, key=len)[min(len(first), len(calls))]
                yield f"{more}, and no such call on rank {rank if more.rank == ranks[0] else ranks[0]}"


def _compare_messages(communicator: str, source: int, to: int, ends: Mapping[str, list[Call]]) -> Iterable[str]:
    sent, expected = ends["send"], ends["recv"]
    for a, b in zip(sent, expected, strict=False):
        if a.signature != b.signature:
            yield f"{a} with {a.signature}, but {b} with {b.signature}"
            break
    else:
        if len(sent) != len(expected):
            yield f"{communicator}: {len(sent)} messages from rank {source} to rank {to}, {len(expected)} expected"


@dataclass(frozen=True)
class Stuck:
    """Calls that never start, and the circle of those that wait for each other."""

    calls: tuple[Call, ...]
    circle: tuple[Call, ...]

    def __str__(self) -> str:
        chain = "\n  waits for ".join(map(str, self.circle[:8]))
        return f"{len(self.calls)} calls never start:\n  {chain}"


def replay(logs: Logs) -> Stuck | None:
    """None if every call finishes."""
    state = _Replay(logs)
    state.run()
    left = tuple(call for calls in logs.values() for call in calls if (call.rank, call.number) not in state.done)
    return Stuck(left, state.circle(left)) if left else None


class _Replay:
    def __init__(self, logs: Logs) -> None:
        self.logs, self.done = logs, set[tuple[int, int]]()
        # Launches of each (rank, communicator), in order; a launch is a list of calls.
        self.queues: dict[tuple[int, str], list[list[Call]]] = defaultdict(list)
        self.heads: dict[tuple[int, str], int] = defaultdict(int)
        self.blocking: dict[tuple[int, int], tuple[int, ...]] = {}
        self.of_rank: dict[int, set[str]] = defaultdict(set)
        self.of_communicator: dict[str, set[int]] = defaultdict(set)
        for rank, calls in logs.items():
            last_cpu: dict[str, int] = {}
            for call in calls:
                launches = self.queues[rank, call.communicator]
                self.of_rank[rank].add(call.communicator)
                self.of_communicator[call.communicator].add(rank)
                if launches and launches[-1][0].launch == call.launch:
                    launches[-1].append(call)
                else:
                    launches.append([call])
                before = last_cpu.get(call.thread)
                self.blocking[rank, call.number] = (*call.waits, *(() if before is None else (before,)))
                if call.stream is None:
                    last_cpu[call.thread] = call.number

    def run(self) -> None:
        waiting = set(self.queues)
        while waiting:
            now = waiting.pop()
            for rank, communicator in self._advance(*now):
                # Other calls of this rank may be ready now, and calls of others that met one of its at the head.
                waiting.update((rank, other) for other in self.of_rank[rank])
                waiting.update((other, communicator) for other in self.of_communicator[communicator])

    def _advance(self, rank: int, communicator: str) -> list[tuple[int, str]]:
        """Finish what can finish at the head of this queue; returns the queues that changed."""
        changed: list[tuple[int, str]] = []
        for call in self._head(rank, communicator):
            partners = self._partners(call)
            if partners is None or not all(map(self._ready, partners)):
                continue
            for partner in partners:
                self.done.add((partner.rank, partner.number))
                self._pop(partner.rank, communicator)
                changed.append((partner.rank, communicator))
        return changed

    def _head(self, rank: int, communicator: str) -> list[Call]:
        queue, head = self.queues.get((rank, communicator), []), self.heads[rank, communicator]
        left = queue[head] if head < len(queue) else []
        return [call for call in left if (call.rank, call.number) not in self.done]

    def _pop(self, rank: int, communicator: str) -> None:
        if not self._head(rank, communicator) and self.heads[rank, communicator] < len(self.queues[rank, communicator]):
            self.heads[rank, communicator] += 1

    def _ready(self, call: Call) -> bool:
        return all((call.rank, before) in self.done for before in self.blocking[call.rank, call.number])

    def _partners(self, call: Call) -> list[Call] | None:
        """This call and those that it meets; None while one of them is not at the head of its queue."""
        if call.operation in TRANSFERS:
            assert call.peer is not None
            other = TRANSFERS[1 - TRANSFERS.index(call.operation)]
            met = [each for each in self._head(call.peer, call.communicator) if _meets(each, other, call.rank)]
            return [call, met[0]] if met else None
        heads = [self._head(rank, call.communicator) for rank in call.ranks if rank in self.logs]
        if any(not head or head[0].operation in TRANSFERS for head in heads):
            return None
        return [head[0] for head in heads]

    # ---- why ----

    def circle(self, left: Sequence[Call]) -> tuple[Call, ...]:
        """Follow what each stuck call waits for until one comes up again."""
        path: list[Call] = []
        call: Call | None = left[0] if left else None
        while call is not None and call not in path:
            path.append(call)
            call = self._reason(call)
        return tuple(path[path.index(call) :]) if call is not None else tuple(path)

    def _reason(self, call: Call) -> Call | None:
        """A call that must finish before this one can start."""
        for before in self.blocking[call.rank, call.number]:
            if (call.rank, before) not in self.done:
                return self.logs[call.rank][before]
        head = self._head(call.rank, call.communicator)
        if call not in head:
            return head[0] if head else None
        for rank in call.ranks if call.peer is None else (call.peer,):
            other = self._head(rank, call.communicator)
            if rank != call.rank and other:
                same = [each for each in other if each.peer in (None, call.rank) and not self._ready(each)]
                return same[0] if same else other[0]
        return None


def _meets(call: Call, operation: str, peer: int) -> bool:
    return call.operation == operation and call.peer == peer
