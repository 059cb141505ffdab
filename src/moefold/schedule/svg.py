"""Draws a timeline as an SVG: one row per rank, one box per action, grey where the rank idles.

The colour says what is done, the shade for which of a rank's stages (the darkest is its first). The number is the
microbatch. An OVERLAP is a box in two halves, forward above, backward below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from moefold.schedule.actions import Action, Kind, Order
from moefold.schedule.simulate import Span, Timeline
from moefold.schedule.text_grid import cells_of

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
        _text(_LEFT, 24, _title(timeline), size=15, weight="bold"),
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
        yield _text(_LEFT - 8, y + _ROW / 2 + 4, f"rank {rank}", anchor="end")
        yield _box(scale.x(0), y, scale.x(timeline.finish) - scale.x(0), _ROW, _IDLE, line=False)
        for action, span in cells_of(timeline, rank):
            yield from _cell(order, action, span, scale, y)
        stats = f"bubble {timeline.bubbles[rank]:.1%}, holds {timeline.peak_live[rank] / order.num_virtual:g}"
        yield _text(scale.x(timeline.finish) + 8, y + _ROW / 2 + 4, stats)


def _cell(order: Order, action: Action, span: Span, scale: _Scale, y: float) -> Iterator[str]:
    start, stop = map(scale.x, span)
    height = _ROW / len(action.parts)
    for half, part in enumerate(action.parts):
        top = y + half * height
        colour = _shade(part.kind, part.stage // order.num_ranks, order.num_virtual)
        yield _box(start, top, stop - start, height, _hex(colour))
        number = str(part.microbatch)
        # A digit is a little more than half as wide as it is high.
        size = min(12.0, 0.8 * height, (stop - start - 1) / (0.6 * len(number)))
        if size >= _SMALLEST_NUMBER:
            ink = "white" if _brightness(colour) < 150 else "#1a1a1a"
            yield _text((start + stop) / 2, top + height / 2 + size * 0.36, number, "middle", ink, size)


def _legend(timeline: Timeline) -> Iterator[str]:
    """The kinds that occur, each in all its shades."""
    order = timeline.order
    kinds = {part.kind for actions in order.actions for action in actions for part in action.parts}
    x = _LEFT
    for kind, (name, _) in _COLOURS.items():
        if kind in kinds:
            for virtual_stage in range(order.num_virtual):
                yield _box(x, 40, 16, 16, _hex(_shade(kind, virtual_stage, order.num_virtual)))
                x += 16
            yield _text(x + 6, 52, name)
            x += 24 + 7 * len(name)
    if order.num_virtual > 1:
        yield _text(x, 52, f"(darkest: a rank's first stage, lightest: its stage {order.num_virtual})", ink="#666666")


def _axis(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    """About ten round times below the rows."""
    step = _round_step(timeline.finish / 10)
    y = scale.y(timeline.order.num_ranks)
    for tick in range(int(timeline.finish / step) + 1):
        x = scale.x(tick * step)
        yield f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{y + 5:.1f}" stroke="#888888"/>'
        yield _text(x, y + 18, f"{tick * step:g}", "middle", "#666666", 11)


def _round_step(at_least: float) -> float:
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


def _hex(colour: tuple[int, int, int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)


def _brightness(colour: tuple[int, int, int]) -> float:
    red, green, blue = colour
    return 0.3 * red + 0.59 * green + 0.11 * blue


def _box(x: float, y: float, width: float, height: float, fill: str, line: bool = True) -> str:
    # The white line keeps boxes of one colour apart; a narrow box would be nothing but line.
    stroke = f' stroke="white" stroke-width="{1 if width >= 6 else 0.3}"' if line else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"{stroke}/>'


def _text(
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
