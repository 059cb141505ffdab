"""Draws a timeline: as text for a terminal, as an SVG, and as a trace for chrome://tracing or Perfetto.

    rank 0 | F0 F1 F2 F3             B0--- F4 B1--- ...
    rank 1 |    F0 F1 F2       B0--- F3 B1--- F4 ...

A cell is as wide as its action is long, blanks are the bubble. After the letter comes the microbatch and, where a rank
has several stages, a letter for which of them: a for its first. Both parts of an OVERLAP share a cell, joined by +.

The SVG has one row per rank and one box per action, grey where the rank idles. The colour says what is done, the shade
for which of a rank's stages (the darkest is its first). An OVERLAP is a box in two halves, forward above, backward
below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

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


_COLOURS = {
    Kind.FORWARD: ("forward", (47, 108, 184)),
    Kind.BACKWARD: ("backward", (32, 133, 78)),
    Kind.BACKWARD_INPUT: ("input gradient", (20, 140, 150)),
    Kind.BACKWARD_WEIGHT: ("weight gradient", (214, 137, 16)),
}
_IDLE = "#ececec"
# In pixels. A step is drawn this wide if its boxes then stay visible, else wider.
_WIDTH, _SMALLEST_BOX = 1400.0, 3.0
_LARGEST_BOX, _SMALLEST_NUMBER = 34.0, 6.5
_ROW, _GAP, _LEFT, _TOP, _RIGHT = 26.0, 4.0, 70.0, 74.0, 170.0


@dataclass(frozen=True)
class _Scale:
    """From time and rank to pixels."""

    per_unit: float

    def x(self, time: float) -> float:
        return _LEFT + time * self.per_unit

    def y(self, rank: int) -> float:
        return _TOP + rank * (_ROW + _GAP)


def svg(timeline: Timeline) -> str:
    """The picture as the text of an SVG file."""
    order = timeline.order
    shortest = min(
        (
            stop - start
            for rank in range(order.num_ranks)
            for _, (start, stop) in cells_of(timeline, rank)
            if stop > start
        ),
        default=1.0,
    )
    per_unit = min(max(_WIDTH / max(timeline.finish, shortest), _SMALLEST_BOX / shortest), _LARGEST_BOX / shortest)
    scale = _Scale(per_unit)
    width = max(scale.x(timeline.finish) + _RIGHT, _LEFT + 760)
    height = scale.y(order.num_ranks) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        svg_text(_LEFT, 24, _title(timeline), size=15, weight="bold"),
        *_legend(timeline),
        *_rows(timeline, scale),
        *_axis(timeline, scale),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _title(timeline: Timeline) -> str:
    order = timeline.order
    stages = f" x {order.num_virtual} stages" if order.num_virtual > 1 else ""
    sizes = f"{order.num_ranks} ranks{stages}, {order.num_microbatches} microbatches"
    return f"{order.name}: {sizes}, finish {timeline.finish:g}, bubble {timeline.bubble:.1%}"


def _rows(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    order = timeline.order
    for rank in range(order.num_ranks):
        y = scale.y(rank)
        yield svg_text(_LEFT - 8, y + _ROW / 2 + 4, f"rank {rank}", anchor="end")
        yield svg_box(scale.x(0), y, scale.x(timeline.finish) - scale.x(0), _ROW, _IDLE, line=False)
        for action, span in cells_of(timeline, rank):
            yield from _cell(order, action, span, scale, y)
        stats = f"bubble {timeline.bubbles[rank]:.1%}, holds {timeline.peak_live[rank] / order.num_virtual:g}"
        yield svg_text(scale.x(timeline.finish) + 8, y + _ROW / 2 + 4, stats)


def _cell(order: Order, action: Action, span: Span, scale: _Scale, y: float) -> Iterator[str]:
    start, stop = map(scale.x, span)
    height = _ROW / len(action.parts)
    for half, part in enumerate(action.parts):
        top = y + half * height
        colour = _shade(part.kind, part.stage // order.num_ranks, order.num_virtual)
        yield svg_box(start, top, stop - start, height, hex_colour(colour))
        number = str(part.microbatch)
        # A digit is a little more than half as wide as it is high.
        size = min(12.0, 0.8 * height, (stop - start - 1) / (0.6 * len(number)))
        if size >= _SMALLEST_NUMBER:
            ink = "white" if _brightness(colour) < 150 else "#1a1a1a"
            yield svg_text((start + stop) / 2, top + height / 2 + size * 0.36, number, "middle", ink, size)


def _legend(timeline: Timeline) -> Iterator[str]:
    """The kinds that occur, each in all its shades."""
    order = timeline.order
    kinds = {part.kind for actions in order.actions for action in actions for part in action.parts}
    x = _LEFT
    for kind, (name, _) in _COLOURS.items():
        if kind in kinds:
            for virtual_stage in range(order.num_virtual):
                yield svg_box(x, 40, 16, 16, hex_colour(_shade(kind, virtual_stage, order.num_virtual)))
                x += 16
            yield svg_text(x + 6, 52, name)
            x += 24 + 7 * len(name)
    if order.num_virtual > 1:
        yield svg_text(
            x, 52, f"(darkest: a rank's first stage, lightest: its stage {order.num_virtual})", ink="#666666"
        )


def _axis(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    """About ten round times below the rows."""
    step = round_step(timeline.finish / 10)
    y = scale.y(timeline.order.num_ranks)
    for tick in range(int(timeline.finish / step) + 1):
        x = scale.x(tick * step)
        yield f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{y + 5:.1f}" stroke="#888888"/>'
        yield svg_text(x, y + 18, f"{tick * step:g}", "middle", "#666666", 11)


def round_step(at_least: float) -> float:
    step = 1e-9
    while True:
        for factor in (1, 2, 5):
            if step * factor >= at_least:
                return step * factor
        step *= 10


def _shade(kind: Kind, virtual_stage: int, num_virtual: int) -> tuple[int, int, int]:
    """Lighter with every stage of a rank, about half white for the last."""
    lighter = 0.55 * virtual_stage / (num_virtual - 1) if num_virtual > 1 else 0.0
    red, green, blue = _COLOURS[kind][1]
    return tuple(round(part + (255 - part) * lighter) for part in (red, green, blue))  # type: ignore[return-value]


def hex_colour(colour: tuple[int, int, int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)


def _brightness(colour: tuple[int, int, int]) -> float:
    red, green, blue = colour
    return 0.3 * red + 0.59 * green + 0.11 * blue


def svg_box(x: float, y: float, width: float, height: float, fill: str, line: bool = True) -> str:
    # The white line keeps boxes of one colour apart; a narrow box would be nothing but line.
    stroke = f' stroke="white" stroke-width="{1 if width >= 6 else 0.3}"' if line else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"{stroke}/>'


def svg_text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    ink: str = "#1a1a1a",
    size: float = 12.0,
    weight: str = "normal",
) -> str:
    style = f'text-anchor="{anchor}" fill="{ink}" font-size="{size:g}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
