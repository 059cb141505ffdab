"""A profiled step of all ranks in the trace event format, which chrome://tracing and ui.perfetto.dev open.

Every rank is a process. Its first row says what each moment of the step counts as, without gaps; below it are the spans
as they were stamped, a row per stream. Times are microseconds on rank 0's clock, from the first rank's beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moefold.comm.spans import RankStep
from moefold.train.profile.account import Starts, pieces_of

Event = dict[str, object]
# Perfetto's names of colors.
_COLORS = {
    "compute": "thread_state_running",
    "comm": "rail_load",
    "wait": "thread_state_uninterruptible",
    "bubble": "grey",
    "host": "rail_animation",
    "gc": "terrible",
    "data": "thread_state_iowait",
    "save": "thread_state_unknown",
}


def chrome_trace(steps: Sequence[RankStep], stages: Sequence[int], splits_experts: bool = False) -> Event:
    origin = min(step.began for step in steps)
    starts = Starts(steps, stages)
    events = [event for step in steps for event in _events(step, starts, origin, splits_experts)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": steps[0].step}}


def _events(step: RankStep, starts: Starts, origin: float, splits_experts: bool) -> Iterator[Event]:
    rank, streams = step.rank, max((span.stream for span in step.spans), default=0) + 1
    yield _named("process_name", rank, 0, f"rank {rank}, stage {starts.stages[rank]}")
    yield _named("thread_name", rank, 0, "components")
    for stream in range(streams):
        yield _named("thread_name", rank, stream + 1, "training" if stream == 0 else f"stream {stream}")
    for piece in pieces_of(step, starts, splits_experts):
        kind = piece.component.split(".")[0]
        color = {"cname": _COLORS[kind]} if kind in _COLORS else {}
        yield (
            _complete(rank, 0, piece.component, piece.component, piece.start, piece.end, origin)
            | color
            | {"args": {"what": piece.name}}
        )
    for span in sorted(step.spans, key=lambda span: (span.start, -span.end)):
        operations = [step.operations[index] for index in span.operations]
        args = {
            "args": {
                "bytes": sum(op.bytes for op in operations),
                "operations": [f"{op.operation} #{op.number} of {op.communicator}" for op in operations],
            }
        }
        event = _complete(rank, span.stream + 1, span.name, span.kind, span.start, span.end, origin)
        yield event | args if operations else event


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(pid: int, tid: int, name: str, kind: str, start: float, end: float, origin: float) -> Event:
    at, lasts = round((start - origin) * 1e6, 3), round((end - start) * 1e6, 3)
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind, "ts": at, "dur": lasts}
