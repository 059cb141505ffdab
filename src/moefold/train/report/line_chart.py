"""Charts as inline SVG: lines with a band of extremes, and stacked areas. Colors are CSS classes, so both themes work.

Long curves are downsampled. A chart also carries its points as JSON in `data-hover`; the page's script shows them at
the pointer, and everything else works without it. Axis ranges ignore a single outlier.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from moefold.html.chart_scale import Scale, short
from moefold.html.document import figure

WIDTH, HEIGHT = 560, 262
LEFT, RIGHT, TOP, BOTTOM = 60, 14, 26, 42

MAX_POINTS = 320
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Downsampled:
    """A curve and the band around it; NaN where a bucket has no number. A bucket of one step has a band of height 0.

    Dropping points would hide spikes, so a bucket of neighbouring steps keeps its lowest and highest value.
    """

    x: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers
    per_bucket: int

    @property
    def empty(self) -> bool:
        return not np.isfinite(self.mean).any()


def downsample(steps: npt.NDArray[np.int64], values: Numbers, max_points: int = MAX_POINTS) -> Downsampled:
    count = len(values)
    width = max(1, -(-count // max_points))
    full = -(-count // width) * width
    padded = np.full(full, np.nan)
    padded[:count] = values
    table = padded.reshape(-1, width)
    known = np.isfinite(table)
    any_known = known.any(1)
    # The step in the middle of the bucket.
    x = np.array([steps[min(start + width // 2, count - 1)] for start in range(0, full, width)], dtype=np.float64)
    total, number = np.where(known, table, 0.0).sum(1), known.sum(1)
    mean = np.divide(total, number, out=np.full(len(total), np.nan), where=any_known)
    low = np.where(any_known, np.where(known, table, np.inf).min(1, initial=np.inf), np.nan)
    high = np.where(any_known, np.where(known, table, -np.inf).max(1, initial=-np.inf), np.nan)
    return Downsampled(x, mean, low, high, width)


@dataclass(frozen=True)
class Series:
    """One curve. `color` is 1 to 5; `dots` marks every point, for curves of few points. Without `line`, only dots."""

    name: str
    points: Downsampled
    color: int = 1
    dots: bool = False
    line: bool = True


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    log: bool = False,
    from_zero: bool = False,
    unit: str = "",
    marks: Sequence[int] = (),
    x_range: tuple[float, float] | None = None,
    ticks: bool = True,
) -> str:
    """`unit` labels the y axis, `marks` are steps to point out on the x axis. Without `ticks`, y has no numbers.

    Curves without a number are left out.
    """
    shown = [each for each in series if not each.points.empty]
    if not shown:
        return ""
    values = np.concatenate([part for each in shown for part in (each.points.low, each.points.high)])
    values = values[np.isfinite(values)]
    log = log and bool((values > 0).all())
    low, high = (values.min() / 1.2, values.max() * 1.2) if log else visible_range(values, from_zero=from_zero)
    x, y = (
        _x_scale([each.points.x for each in shown], x_range),
        Scale(float(low), float(high), HEIGHT - BOTTOM, TOP, log),
    )
    body = "".join(_band(each, x, y) for each in shown) + "".join(_curve(each, x, y) for each in shown)
    points_out = "".join(f'<path class="mark" d="M{x(mark):.1f} {HEIGHT - BOTTOM}v-7"/>' for mark in marks)
    hover = (
        ""
        if not ticks
        else _hover(x, shown[0].points.x, {each.name: _at(shown[0].points.x, each.points) for each in shown})
    )
    whole = not log and bool((values == np.rint(values)).all())
    cut = values.max() > high * (1 + 1e-9)
    more = [note, f"peaks up to {short(float(values.max()))} are cut off" if cut else ""]
    legend = [(each.name, each.color) for each in shown]
    return figure(
        title,
        legend,
        "; ".join(filter(None, more)),
        _svg(title, _axes(x, y, unit, whole, ticks) + body + points_out, hover),
    )


def stacked_chart(
    title: str,
    x_points: npt.NDArray[np.float64],
    parts: Sequence[tuple[str, int, npt.NDArray[np.float64]]],
    *,
    note: str,
    unit: str,
    x_range: tuple[float, float],
) -> str:
    """Areas on top of each other: (name, color, heights), the first at the bottom."""
    if len(x_points) == 0:
        return ""
    heights = np.nan_to_num(np.array([values for _, _, values in parts]))
    tops = heights.cumsum(0)
    _, high = visible_range(tops[-1], from_zero=True)
    x, y = _x_scale([x_points], x_range), Scale(0.0, high, HEIGHT - BOTTOM, TOP)
    if len(x_points) == 1:
        # A single step as a block.
        x_points, tops = np.array([x.low, x.high]), tops.repeat(2, axis=1)
    below = np.zeros(tops.shape[1])
    areas = []
    for (_, color, _), top in zip(parts, tops):
        edge = [f"{x(px):.1f} {y(py):.1f}" for px, py in zip(x_points, top)]
        edge += [f"{x(px):.1f} {y(py):.1f}" for px, py in zip(x_points[::-1], below[::-1])]
        areas.append(f'<path class="area c{color}" d="M{"L".join(edge)}Z"/>')
        below = top
    hover = _hover(x, x_points, {name: values for name, _, values in parts} if heights.shape[1] > 1 else {})
    legend = [(name, color) for name, color, _ in parts]
    return figure(title, legend, note, _svg(title, _axes(x, y, unit) + "".join(areas), hover))


def _svg(title: str, body: str, hover: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"{hover}>{body}</svg>'


def _x_scale(all_x: Sequence[npt.NDArray[np.float64]], x_range: tuple[float, float] | None) -> Scale:
    low = min(float(x.min()) for x in all_x) if x_range is None else x_range[0]
    high = max(float(x.max()) for x in all_x) if x_range is None else x_range[1]
    return Scale(low, high, LEFT, WIDTH - RIGHT) if high > low else Scale(low - 0.5, low + 0.5, LEFT, WIDTH - RIGHT)


def _axes(x: Scale, y: Scale, unit: str, whole: bool = False, ticks: bool = True) -> str:
    """The unit stands over the y axis; `whole` leaves out ticks between whole numbers, where nothing can be."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [
        f'<text class="tick" x="0" y="14">{escape(unit)}</text>',
        f'<text class="tick mid" x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 4}">step</text>',
    ]
    for tick in y.ticks() if ticks else ():
        if whole and tick != int(tick):
            continue
        place = y(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {place:.1f}H{right}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 7}" y="{place + 3.5:.1f}">{short(tick)}</text>')
    for tick in x.ticks(6):
        if tick == int(tick):
            parts.append(f'<text class="tick mid" x="{x(tick):.1f}" y="{bottom + 20}">{int(tick):,}</text>')
    return "".join(parts) + f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>'


def _curve(series: Series, x: Scale, y: Scale) -> str:
    points = [(x(px), y(py)) for px, py in zip(series.points.x, series.points.mean) if np.isfinite(py)]
    pieces = _pieces(series.points, x, y) if series.line else ()
    path = "".join(f'<path class="line c{series.color}" d="{piece}"/>' for piece in pieces)
    if series.dots or len(points) == 1:
        size = 3 if series.line else 5
        path += "".join(
            f'<circle class="dot c{series.color}" cx="{px:.1f}" cy="{py:.1f}" r="{size}"/>' for px, py in points
        )
    return path


def _pieces(points: Downsampled, x: Scale, y: Scale) -> list[str]:
    """Unbroken runs of numbers: a gap in the data is a gap in the line."""
    pieces: list[list[str]] = [[]]
    for px, py in zip(points.x, points.mean):
        if np.isfinite(py):
            pieces[-1].append(f"{x(px):.1f} {y(py):.1f}")
        elif pieces[-1]:
            pieces.append([])
    return ["M" + "L".join(piece) for piece in pieces if len(piece) > 1]


def _band(series: Series, x: Scale, y: Scale) -> str:
    points = series.points
    known = np.isfinite(points.mean)
    if not (points.high[known] > points.low[known]).any():
        return ""
    edge = [f"{x(px):.1f} {y(py):.1f}" for px, py in zip(points.x[known], points.high[known])]
    edge += [f"{x(px):.1f} {y(py):.1f}" for px, py in zip(points.x[known][::-1], points.low[known][::-1])]
    return f'<path class="band c{series.color}" d="M{"L".join(edge)}Z"/>'


def _at(x: npt.NDArray[np.float64], points: Downsampled) -> npt.NDArray[np.float64]:
    """The curve's value at each x that is one of its own, NaN elsewhere."""
    if len(points.x) == len(x) and bool((points.x == x).all()):
        return points.mean
    nearest = np.full(len(x), np.nan)
    for px, py in zip(points.x, points.mean):
        nearest[int(np.abs(x - px).argmin())] = py
    return nearest


def _hover(x: Scale, steps: npt.NDArray[np.float64], curves: dict[str, npt.NDArray[np.float64]]) -> str:
    data = {
        "x": [round(x(step), 1) for step in steps],
        "steps": [int(step) for step in steps],
        "curves": {name: [short(v) if np.isfinite(v) else None for v in values] for name, values in curves.items()},
    }
    return f' data-hover="{escape(json.dumps(data, separators=(",", ":")))}"' if curves else ""


def visible_range(values: npt.NDArray[np.float64], *, from_zero: bool) -> tuple[float, float]:
    """The range to draw. A value far above nearly all others would flatten the rest: it is cut off instead."""
    known = values[np.isfinite(values)]
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    usual_low, usual_high = (float(quantile) for quantile in np.quantile(known, (0.02, 0.98)))
    spread = max(usual_high - usual_low, abs(usual_high) * 0.05)
    if len(known) >= 20 and spread > 0:
        high = min(high, usual_high + 3 * spread)
    if from_zero:
        return min(0.0, low), high * 1.05 if high > 0 else 1.0
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - room, high + room
