"""From the stamps of all ranks to a step's components, which add up to each rank's wall time.

What the stream that trains does at a moment is said by the innermost span there, or, between spans, by the mark before:

    compute       forward, backward, weight gradients, the update
    comm.AXIS     transfers over an axis that this rank waited for: exposed communication
    wait.AXIS     before it, waiting for the last rank of the same stage to arrive: imbalance
    bubble        waiting for a rank of another pipeline stage
    host          bookkeeping between the operations, and callbacks
    gc            collections of garbage
    data, save    waiting for a batch; checkpoints, with all that happens inside
    validation    where it is due
    other         the rest of the step's own code: what is not explained

A wait for an operation is cut in two, or three, by the starts of its members on one clock. Until the last member of the
same stage has started it this rank waits for a slower rank; until the last of all for another stage; then for the
transfer. A wait for the communication stream has the time of what ran there: its transfers, and what it computed.

Nothing here is a difference of two other components: each is a sum of intervals, and the intervals of a rank do not
overlap. That the sum is the wall time says that no interval is missing and none counts twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from moefold.comm.spans import Operation, RankStep, Span
from moefold.train.profile.step_account import AXES, Link, StepAccount

# By the name of a group; those of context sizes begin with "context".
_AXIS_OF_GROUP = {
    **{axis: axis for axis in AXES},
    **dict.fromkeys(("ep_across", "ep_inside", "expert_block"), "ep"),
    **dict.fromkeys(("dense_shard", "dense_shard_across", "dense_shard_inside", "dense_replicate"), "dp"),
    **dict.fromkeys(("expert_shard", "expert_shard_across", "expert_shard_inside", "expert_replicate"), "edp"),
    "stage": "world",
}
# What a mark says about time that no span covers.
_KIND_OF_MARK = {
    **dict.fromkeys(("before step", "after backward", "after step", "agreement"), "host"),
    "data": "data",
    **dict.fromkeys(("checkpoint", "commit", "on save", "checkpoint at the end"), "save"),
    **dict.fromkeys(("validation", "on evaluate"), "validation"),
}
# What happens inside belongs to them, communication too.
_WHOLE = ("save", "validation")
# Rates are taken from messages of at least so many bytes: smaller ones measure latency.
_LARGE = 1 << 14


def axis_of(group: str, splits_experts: bool = False) -> str:
    """``splits_experts``: the experts' group has no ep axis, so that it is etp's."""
    if group.startswith("context"):
        return "cp"
    if splits_experts and group == "expert_block":
        return "etp"
    return _AXIS_OF_GROUP[group]


class Piece(NamedTuple):
    """A part of a rank's time that has one cause."""

    start: float
    end: float
    component: str
    name: str


class _Ready(NamedTuple):
    """When an operation's members had all started it: those of the same stage, and all; and who was last."""

    stage: float
    all: float
    last: int


class Starts:
    """The starts of every operation on all ranks, by communicator and number."""

    def __init__(self, steps: Sequence[RankStep], stages: Sequence[int]) -> None:
        self.stages = stages
        self._starts: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        for step in steps:
            for op in step.operations:
                self._starts[op.communicator, op.number][step.rank] = op.start

    def ready(self, op: Operation, rank: int) -> _Ready:
        starts = self._starts[op.communicator, op.number]
        known = {peer: starts[peer] for peer in (*op.peers, rank) if peer in starts}
        last = max(known, key=lambda peer: known[peer])
        own_stage = max(at for peer, at in known.items() if self.stages[peer] == self.stages[rank])
        return _Ready(own_stage, known[last], last)


def account(
    steps: Sequence[RankStep], stages: Sequence[int] | None = None, splits_experts: bool = False
) -> StepAccount:
    """``steps``: the same step of every rank, rank 0 first, on one clock. ``stages``: each rank's pipeline stage."""
    starts = Starts(steps, [0] * len(steps) if stages is None else stages)
    late, links = [0.0] * len(steps), dict[tuple[str, tuple[int, ...], str], Link]()
    components = []
    for step in steps:
        total: dict[str, float] = defaultdict(float)
        for piece in pieces_of(step, starts, splits_experts):
            total[piece.component] += piece.end - piece.start
        components.append(dict(total))
        _add_late(late, step, starts)
        _add_links(links, step, starts, splits_experts)
    walls = [step.ended - step.began for step in steps]
    return StepAccount(steps[0].step, walls, components, late, list(links.values()))


def pieces_of(step: RankStep, starts: Starts, splits_experts: bool = False) -> Iterator[Piece]:
    """The time of the stream that trains, in order and without gaps."""
    streams: dict[int, list[Span]] = defaultdict(list)
    for span in step.spans:
        streams[span.stream].append(span)
    others = [list(_innermost(spans, step.began, step.ended)) for stream, spans in streams.items() if stream != 0]
    for begin, end, stack in _innermost(streams[0], step.began, step.ended):
        for at, until, mark in _by_mark(step, begin, end):
            kind = _KIND_OF_MARK.get(mark, "other")
            if kind in _WHOLE or not stack:
                yield Piece(at, until, kind, mark)
            elif stack[-1].kind == "comm":
                yield from _cut(at, until, stack[-1], step, starts, splits_experts)
            elif stack[-1].kind == "wait":
                yield from _waited(at, until, stack[-1], others, step, starts, splits_experts)
            else:
                yield Piece(at, until, stack[-1].kind, stack[-1].name)


def _innermost(spans: Iterable[Span], began: float, ended: float) -> Iterator[tuple[float, float, tuple[Span, ...]]]:
    """Intervals from ``began`` to ``ended``, each with the spans that are open in it, outermost first."""
    edges = [(max(span.start, began), 1, -span.end, span) for span in spans if span.end > began]
    edges += [(min(span.end, ended), 0, -span.start, span) for span in spans if span.end > began]
    at, stack = began, list[Span]()
    for time, opens, _, span in sorted(edges, key=lambda edge: edge[:3]):
        if time > at:
            yield at, min(time, ended), tuple(stack)
            at = time
        if opens:
            stack.append(span)
        elif span in stack:
            stack.remove(span)
    if ended > at:
        yield at, ended, tuple(stack)


def _by_mark(step: RankStep, begin: float, end: float) -> Iterator[tuple[float, float, str]]:
    times = [mark.at for mark in step.marks]
    index = bisect_right(times, begin) - 1
    while begin < end:
        name = step.marks[index].name if index >= 0 else "before step"
        until = min(end, times[index + 1]) if index + 1 < len(times) else end
        if until > begin:
            yield begin, until, name
        begin, index = until, index + 1


def _cut(begin: float, end: float, span: Span, step: RankStep, starts: Starts, splits_experts: bool) -> Iterator[Piece]:
    """A wait for operations, cut where their members had started."""
    operations = [step.operations[index] for index in span.operations]
    axis = axis_of(operations[0].group, splits_experts)
    ready = [starts.ready(op, step.rank) for op in operations]
    of_stage, of_all = max(each.stage for each in ready), max(each.all for each in ready)
    for until, component in ((of_stage, f"wait.{axis}"), (of_all, "bubble"), (end, f"comm.{axis}")):
        if (until := min(until, end)) > begin:
            yield Piece(begin, until, component, span.name)
            begin = until


def _waited(
    begin: float,
    end: float,
    wait: Span,
    others: Sequence[Sequence[tuple[float, float, tuple[Span, ...]]]],
    step: RankStep,
    starts: Starts,
    splits_experts: bool,
) -> Iterator[Piece]:
    """What ran on other streams while this one waited; handing over from one stream to the other is the host's."""
    for at, until, stack in sorted(each for stream in others for each in stream if each[2]):
        at, until = max(at, begin), min(until, end)
        if until <= at:
            continue
        if at > begin:
            yield Piece(begin, at, "host", wait.name)
        span = stack[-1]
        if span.kind == "comm":
            yield from _cut(at, until, span, step, starts, splits_experts)
        else:
            yield Piece(at, until, span.kind, span.name)
        begin = until
    if end > begin:
        yield Piece(begin, end, "host", wait.name)


def _add_late(late: list[float], step: RankStep, starts: Starts) -> None:
    for span in step.spans:
        for op in (step.operations[index] for index in span.operations):
            ready = starts.ready(op, step.rank)
            if ready.last != step.rank:
                late[ready.last] += max(min(ready.all, span.end) - span.start, 0.0)


def _add_links(
    links: dict[tuple[str, tuple[int, ...], str], Link], step: RankStep, starts: Starts, splits_experts: bool
) -> None:
    for span in step.spans:
        for op in (step.operations[index] for index in span.operations):
            ready = starts.ready(op, step.rank).all
            # Waited for after its end: how long it took is not known.
            if op.bytes < _LARGE or span.start - ready > 0.5 * (span.end - ready):
                continue
            ranks = tuple(sorted({*op.peers, step.rank}))
            axis = axis_of(op.group, splits_experts)
            operation = {"receive": "send"}.get(op.operation, op.operation)
            link = links.setdefault((axis, ranks, operation), Link(axis, ranks, operation))
            link.calls += 1
            link.bytes += op.bytes
            link.seconds += span.end - ready
