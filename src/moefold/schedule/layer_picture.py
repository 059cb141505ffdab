"""Draws an order of a layer's operations: as text for a terminal, as an SVG, and as a trace for Perfetto.

    compute |   F1:attention--       B0:expe  B0:experts_up--  F1:experts_up---- F1:expe  ...
    comm    |   B0:combine_exchange   F1:dispatch_exch        B0:dispatch_exch     F1:combine_exch ...

One row per stream. A cell is as wide as its operation is long and begins with direction and microbatch, then the name,
as far as there is room; blanks are time in which the stream idles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.schedule.layer_operations import STREAMS, Direction, LayerTimeline, Operation, StreamName
from moefold.schedule.timeline_picture import hex_colour, round_step, svg_box, svg_text

_COLOURS: dict[Direction, tuple[str, tuple[int, int, int]]] = {
    "F": ("forward", (47, 108, 184)),
    "B": ("backward", (32, 133, 78)),
    "W": ("weight gradient", (214, 137, 16)),
    "R": ("made again", (130, 90, 170)),
}
# A trace counts in microseconds; one unit of time becomes this many.
_TRACE_UNIT = 1000.0
# In pixels.
_WIDTH, _ROW, _GAP, _LEFT, _TOP, _PER_LETTER = 1400.0, 34.0, 6.0, 80.0, 74.0, 5.2


def label(operation: Operation) -> str:
    return f"{operation.direction}{operation.microbatch}:{operation.name}"


def layer_grid(timeline: LayerTimeline, width: int = 160) -> str:
    """One line per stream."""
    columns = max(width - 10, 40)
    per_unit = columns / max(timeline.finish, 1e-9)
    lines = []
    for stream in STREAMS:
        row = [" "] * columns
        for operation, start, stop in _cells(timeline, stream):
            first, after = round(start * per_unit), round(stop * per_unit)
            # The last column of a cell stays blank.
            cell = label(operation)[: max(after - first - 1, 0)].ljust(after - first - 1, "-")
            row[first : first + len(cell)] = cell
        lines.append(f"{stream:<7} | {''.join(row)}".rstrip())
    return "\n".join(lines)


def _cells(timeline: LayerTimeline, stream: StreamName) -> Iterator[tuple[Operation, float, float]]:
    for operation, (start, stop) in zip(timeline.order, timeline.spans, strict=True):
        if operation.stream == stream and stop > start:
            yield operation, start, stop


def layer_trace(timeline: LayerTimeline) -> dict[str, Any]:
    """To be written as JSON for chrome://tracing or Perfetto."""
    events: list[dict[str, Any]] = []
    for row, stream in enumerate(STREAMS):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": stream}})
        for operation, start, stop in _cells(timeline, stream):
            place = {"pid": 0, "tid": row, "ts": start * _TRACE_UNIT, "dur": (stop - start) * _TRACE_UNIT}
            args = {"layer": operation.layer, "microbatch": operation.microbatch}
            events.append({"ph": "X", "name": label(operation), "cat": operation.direction, "args": args} | place)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def layer_svg(timeline: LayerTimeline) -> str:
    per_unit = _WIDTH / max(timeline.finish, 1e-9)
    width, height = _LEFT + _WIDTH + 20, _TOP + 2 * (_ROW + _GAP) + 34
    title = f"{timeline.name}: finish {timeline.finish:g}, exposed {timeline.exposed / max(timeline.finish, 1e-9):.1%}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        svg_text(_LEFT, 24, title, size=15, weight="bold"),
        *_legend(timeline),
    ]
    for row, stream in enumerate(STREAMS):
        y = _TOP + row * (_ROW + _GAP)
        lines.append(svg_text(_LEFT - 8, y + _ROW / 2 + 4, stream, anchor="end"))
        lines.append(svg_box(_LEFT, y, _WIDTH, _ROW, "#ececec", line=False))
        for operation, start, stop in _cells(timeline, stream):
            x, wide = _LEFT + start * per_unit, (stop - start) * per_unit
            lines.append(svg_box(x, y, wide, _ROW, hex_colour(_COLOURS[operation.direction][1])))
            name = f"{operation.microbatch} {operation.name}"[: int((wide - 4) / _PER_LETTER)]
            if len(name) > 2:
                lines.append(svg_text(x + wide / 2, y + _ROW / 2 + 3.5, name, "middle", "white", 9.5))
    lines += [*_axis(timeline, per_unit), "</svg>"]
    return "\n".join(lines) + "\n"


def _legend(timeline: LayerTimeline) -> Iterator[str]:
    x = _LEFT
    for direction, (name, colour) in _COLOURS.items():
        if any(operation.direction == direction for operation in timeline.order):
            yield svg_box(x, 40, 16, 16, hex_colour(colour))
            yield svg_text(x + 22, 52, name)
            x += 40 + 7 * len(name)


def _axis(timeline: LayerTimeline, per_unit: float) -> Iterator[str]:
    step, y = round_step(max(timeline.finish, 1e-9) / 10), _TOP + 2 * (_ROW + _GAP)
    for tick in range(int(timeline.finish / step) + 1):
        yield svg_text(_LEFT + tick * step * per_unit, y + 14, f"{tick * step:g}", "middle", "#666666", 11)
