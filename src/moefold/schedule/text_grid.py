"""Draws a timeline as text for a terminal, and as a trace for chrome://tracing or Perfetto. (As an SVG: svg.py.)

    rank 0 | F0 F1 F2 F3             B0--- F4 B1--- ...
    rank 1 |    F0 F1 F2       B0--- F3 B1--- F4 ...

A cell is as wide as its action is long, blanks are the bubble. After the letter comes the microbatch and, where a rank
has several stages, a letter for which of them: a for its first. Both parts of an OVERLAP share a cell, joined by +.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from moefold.schedule.actions import SENDS, TRANSFERS, Action, Kind, Order
from moefold.schedule.simulate import Span, Timeline

_SKIPPED = " ... "
# A trace counts in microseconds; one unit of time becomes this many.
_TRACE_UNIT = 1000.0


def text_grid(timeline: Timeline, width: int = 160, max_ranks: int = 32) -> str:
    """One line per rank. What is too wide or too many is left out in the middle."""
    order = timeline.order
    cells = {rank: list(cells_of(timeline, rank)) for rank in shown(order.num_ranks, max_ranks) if rank is not None}
    per_unit = _columns_per_unit(order, [cell for row in cells.values() for cell in row])
    lines = {}
    for rank, row in cells.items():
        head = f"rank {rank}".ljust(len(f"rank {order.num_ranks - 1}")) + " | "
        drawn = _row(order, row, per_unit).ljust(_column(timeline.finish, per_unit))
        lines[rank] = (head + _shortened(drawn, width - len(head))).rstrip()
    return "\n".join("..." if rank is None else lines[rank] for rank in shown(order.num_ranks, max_ranks))


def cells_of(timeline: Timeline, rank: int) -> Iterator[tuple[Action, Span]]:
    """What a rank computes, and when."""
    for action, span in zip(timeline.order.actions[rank], timeline.spans[rank]):
        if action.kind not in TRANSFERS and not math.isnan(span[0]):
            yield action, span


def label(order: Order, action: Action) -> str:
    """F12, or F12b for the second of a rank's stages."""
    return "+".join(f"{part.kind.value}{part.microbatch}{_stage_letter(order, part.stage)}" for part in action.parts)


def shown(total: int, max_shown: int) -> Sequence[int | None]:
    """The numbers below ``total``; if they are too many, the first and the last, with None between."""
    if total <= max_shown:
        return range(total)
    return [*range(max_shown - max_shown // 2), None, *range(total - max_shown // 2, total)]


def _stage_letter(order: Order, stage: int) -> str:
    if order.num_virtual == 1:
        return ""
    virtual_stage = stage // order.num_ranks
    return chr(ord("a") + virtual_stage) if virtual_stage < 26 else f".{virtual_stage}"


def _columns_per_unit(order: Order, cells: Sequence[tuple[Action, Span]]) -> float:
    """Characters per unit of time, such that every label and a blank fit, however its place is rounded."""
    needed = [(len(label(order, action)) + 1, start, stop - start) for action, (start, stop) in cells if stop > start]
    per_unit = max((length / duration for length, _, duration in needed), default=1.0)
    if all((start * per_unit).is_integer() for _, start, _ in needed):
        return per_unit
    return max((length + 1) / duration for length, _, duration in needed)


def _column(time: float, per_unit: float) -> int:
    return math.floor(time * per_unit + 0.5) if math.isfinite(time) else 0


def _row(order: Order, cells: Sequence[tuple[Action, Span]], per_unit: float) -> str:
    row = ""
    for action, (start, stop) in cells:
        first, after = _column(start, per_unit), _column(stop, per_unit)
        row = row.ljust(first) + label(order, action).ljust(after - first - 1, "-") + " "
    return row


def _shortened(row: str, width: int) -> str:
    if len(row) <= width:
        return row
    half = (width - len(_SKIPPED)) // 2
    return row[:half] + _SKIPPED + row[-half:]


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """To be written as JSON. Computations are slices, one row per rank; messages, if the order has any, are arrows."""
    order = timeline.order
    events: list[dict[str, Any]] = []
    for rank in range(order.num_ranks):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for action, (start, stop) in zip(order.actions[rank], timeline.spans[rank]):
            if math.isnan(start):
                continue
            event = {"pid": 0, "tid": rank, "ts": start * _TRACE_UNIT, "cat": action.kind.value}
            if action.kind in TRANSFERS:
                events.append(event | _arrow(order, action))
            else:
                parts = [{"stage": part.stage, "microbatch": part.microbatch} for part in action.parts]
                args = parts[0] if len(parts) == 1 else {"forward": parts[0], "backward": parts[1]}
                duration = (stop - start) * _TRACE_UNIT
                events.append(event | {"ph": "X", "name": label(order, action), "dur": duration, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _arrow(order: Order, action: Action) -> dict[str, Any]:
    """Both ends of an arrow have the same id: the value that travels."""
    forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
    # A receive names the stage that it is for, a send the one that it comes from.
    stage = action.stage + {Kind.RECV_F: -1, Kind.RECV_B: 1}.get(action.kind, 0)
    arrow = {"name": "output" if forward else "gradient", "id": f"{stage}.{action.microbatch}.{int(forward)}"}
    return arrow | ({"ph": "s"} if action.kind in SENDS else {"ph": "f", "bp": "e"})
