"""Which rank holds the others up, from what was recorded of each of them.

In a hang most ranks are innocent: they wait for the one that has not come. So the culprit is the *least advanced* rank,
and six kinds of evidence are asked for it, the surest first:

1. The kernel says that a rank is stopped.
2. Ranks have started different collectives as the same number of a communicator. Those in the minority are wrong.
3. The kernel has no route from a rank to a peer it is connected to: its interface is down. Which rank is behind then
   depends on whose last message was still delivered, and says nothing.
4. The stack of a rank is not in a communication: what it does instead is what the others wait for. (torch's FSDP starts
   collectives that the ledger does not have, and receives of a pipeline are not numbered.)
5. A rank has started fewer collectives over a communicator than its peers there: they wait for it.
6. All have come and all wait: the network. It is told which bytes nobody acknowledged.

Everything here is a function of the evidence; `watchdog.py` collects it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from moefold.comm.heartbeat import P2P, Entry, RankRecord
from moefold.errors import name_ranks

# Ranks pass tensors of different sizes to these.
UNEVEN = ("all_to_all",)
# A frame is `  File "path", line 12 in name`, the innermost first.
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')
_WAITING_FILES = re.compile(r"/torch/distributed/|/moefold/comm/(?!spawn)")
_LIBRARY_OF_PYTHON = re.compile(r"/(threading|queue|selectors)\.py$|/concurrent/futures/")


class RankEvidence(NamedTuple):
    """What is known about a rank: its own record, the kernel's state of its process, and its threads' stacks."""

    rank: int
    record: RankRecord
    # One letter of /proc/PID/stat; empty if there is no such process.
    state: str = ""
    # As faulthandler writes them; empty if the rank did not answer.
    stacks: str = ""
    # Sentences about its network: a route that is gone, bytes without an answer.
    network: tuple[str, ...] = ()

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def last(self) -> Entry | None:
        return self.record.entries[-1] if self.record.entries else None

    @property
    def place(self) -> str:
        pulse = self.record.pulse
        return f"in step {pulse.step}, {pulse.phase}" if pulse.step else f"in {pulse.phase}"


class Verdict(NamedTuple):
    """``culprits`` is empty if the evidence names no rank; ``kind`` says which evidence did."""

    kind: str
    culprits: tuple[int, ...]
    sentence: str


SourceLine = Callable[[str, int], str]


def diagnose(ranks: Sequence[RankEvidence], source_line: SourceLine) -> Verdict:
    """``source_line(path, number)`` reads a line of source, to see whether it waits."""
    busy = [rank for rank in ranks if rank.stacks and not waits(rank.stacks, source_line)]
    # All ranks busy says as little as none.
    busy = busy if len(busy) < len(ranks) else []
    certain = _stopped(ranks) or mismatch(ranks) or _no_route(ranks)
    return certain or _behind(ranks, busy or ranks) or _busy(ranks, busy) or _network(ranks)


def _stopped(ranks: Sequence[RankEvidence]) -> Verdict | None:
    found = [rank for rank in ranks if rank.stopped]
    if not found:
        return None
    said = "; ".join(
        f"rank {rank.rank} is stopped by a signal (state {rank.state}) {rank.place}, {_last_of(rank)}" for rank in found
    )
    return Verdict("stopped", _numbers(found), f"{said}{_waiting_for(ranks, found)}")


# ---- 2: different collectives ----


def mismatch(ranks: Sequence[RankEvidence]) -> Verdict | None:
    """The first number of a communicator at which its members started different collectives.

    Where its own members are of two minds, ranks of the other communicators of that name vote with them: in a step,
    groups of one name run the same program.
    """
    calls: dict[tuple[str, int], dict[int, Entry]] = {}
    for rank in ranks:
        for entry in rank.record.entries:
            if entry.operation not in P2P:
                communicator = rank.record.communicators.get(entry.group, entry.group)
                calls.setdefault((communicator, entry.number), {})[rank.rank] = entry
    differing = [key for key, entries in calls.items() if len({_signature(entry) for entry in entries.values()}) > 1]
    if not differing:
        return None
    first = min(differing, key=lambda key: min(entry.time for entry in calls[key].values()))
    entries = calls[first]
    votes = Counter(_signature(entry) for entry in entries.values())
    if _tied(votes):
        names = {entry.group for entry in entries.values()}
        for (_, number), others in calls.items():
            if number == first[1] and others is not entries:
                votes.update(_signature(entry) for entry in others.values() if entry.group in names)
    right = votes.most_common(1)[0][0]
    wrong = {rank: entry for rank, entry in entries.items() if _tied(votes) or _signature(entry) != right}
    rest = [rank for rank in entries if rank not in wrong]
    said = "; ".join(f"rank {rank} called {entry} in step {entry.step}" for rank, entry in sorted(wrong.items()))
    if rest:
        said += f" where {name_ranks(rest)} called {entries[rest[0]]}"
    return Verdict("mismatch", tuple(sorted(wrong)), said)


def _signature(entry: Entry) -> tuple[object, ...]:
    shape = () if entry.operation in UNEVEN else entry.shape
    return entry.operation, entry.group, entry.dtype, shape


def _tied(votes: Counter[tuple[object, ...]]) -> bool:
    (_, most), (_, second) = (*votes.most_common(2), (None, 0))[:2]
    return most == second


# ---- 3: an interface that is down ----


def _no_route(ranks: Sequence[RankEvidence]) -> Verdict | None:
    gone = [(rank, [said for said in rank.network if "no route" in said]) for rank in ranks]
    found = [(rank, sentences) for rank, sentences in gone if sentences]
    if not found:
        return None
    said = "; ".join(f"rank {rank.rank} {rank.place}: {'; '.join(sentences)}" for rank, sentences in found)
    return Verdict("network", _numbers(rank for rank, _ in found), said)


# ---- 4 and 5: fewer collectives ----


def _behind(ranks: Sequence[RankEvidence], among: Sequence[RankEvidence]) -> Verdict | None:
    """Ranks that others wait for and that wait for nobody; in a circle, those that most others wait for."""
    waiters = {rank.rank: {other.rank for other in ranks if is_ahead(other, rank)} for rank in among}
    most = max(len(of) for of in waiters.values())
    if not most:
        return None
    blocked = {rank.rank for rank in among if any(is_ahead(rank, other) for other in among)}
    roots = [rank for rank in among if waiters[rank.rank] and rank.rank not in blocked]
    found = roots or [rank for rank in among if len(waiters[rank.rank]) == most]
    # Of several, those in the earliest step; a pipeline's other stages may be behind on account of the first.
    earliest = min(rank.record.pulse.step for rank in found)
    found = [rank for rank in found if rank.record.pulse.step == earliest]
    said = "; ".join(f"rank {rank.rank} is the least advanced: {rank.place}, {_last_of(rank)}" for rank in found)
    return Verdict("behind", _numbers(found), f"{said}{_waiting_for(ranks, found)}")


def is_ahead(one: RankEvidence, other: RankEvidence) -> bool:
    """Whether ``one`` has started a collective that ``other`` is a member of and has not started."""
    theirs = other.record.counts
    return any(count > theirs[name] for name, count in one.record.counts.items() if name in theirs)


# ---- 4 and 6: stacks, network ----


def _busy(ranks: Sequence[RankEvidence], found: Sequence[RankEvidence]) -> Verdict | None:
    if not found:
        return None
    said = "; ".join(
        f"rank {rank.rank} is not in a communication: {rank.place}, {where(rank.stacks)}" for rank in found
    )
    return Verdict("stacks", _numbers(found), f"{said}{_waiting_for(ranks, found)}")


def waits(stacks: str, source_line: SourceLine) -> bool:
    """Whether the main thread waits for other ranks: it is in torch's or our communication, or waits for a handle."""
    for path, line, _ in _frames(stacks):
        if _LIBRARY_OF_PYTHON.search(path):
            continue
        ours = "/moefold/" in path or "/torch/" in path
        return bool(_WAITING_FILES.search(path)) or (ours and ".wait()" in source_line(path, int(line)))
    return False


def where(stacks: str) -> str:
    """The innermost frame of the main thread that is not in Python's own library of threads."""
    for path, line, name in _frames(stacks):
        if not _LIBRARY_OF_PYTHON.search(path):
            return f"{name} ({'/'.join(path.split('/')[-2:])}:{line})"
    return "no Python frame"


def _frames(stacks: str) -> list[tuple[str, str, str]]:
    """Of the main thread, which faulthandler writes last."""
    return _FRAME.findall(stacks.split("\n\n")[-1])


def _network(ranks: Sequence[RankEvidence]) -> Verdict:
    said = [f"rank {rank.rank}: {sentence}" for rank in ranks for sentence in rank.network]
    if said:
        return Verdict("network", (), f"all ranks wait and none is behind; {'; '.join(said)}")
    places = "; ".join(f"rank {rank.rank} {rank.place}, {_last_of(rank)}" for rank in ranks)
    return Verdict("unknown", (), f"no rank is behind the others: {places}")


# ---- words ----


def _last_of(rank: RankEvidence) -> str:
    doing = f" at {where(rank.stacks)}" if rank.stacks else ""
    return f"last started {rank.last}{doing}" if rank.last else f"no collective started{doing}"


def _waiting_for(ranks: Sequence[RankEvidence], found: Sequence[RankEvidence]) -> str:
    """What each of the others has started and these have not."""
    calls: dict[str, list[int]] = {}
    for rank in ranks:
        if rank not in found and rank.last is not None and any(is_ahead(rank, one) for one in found):
            calls.setdefault(str(rank.last), []).append(rank.rank)
    waiting = [f"{name_ranks(numbers)} in {call}" for call, numbers in calls.items()]
    return f"; {' and '.join(waiting)} wait for it" if waiting else ""


def _numbers(ranks: Iterable[RankEvidence]) -> tuple[int, ...]:
    return tuple(rank.rank for rank in ranks)
