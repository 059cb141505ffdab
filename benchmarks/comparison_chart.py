"""Comparisons as an HTML page: a horizontal bar of each candidate's time relative to the first base.

The full bar is changing routing, the pale one above it fixed routing; the line through a bar's end goes from the first
quartile of the rounds to the third.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.comparison_report import compared_with, ratio_text
from benchmarks.results import CHANGING, CLOCKS, FIXED, Comparison, Spread
from benchmarks.targets import Verdict
from moefold.html.chart_scale import Scale, short
from moefold.html.document import CSS, document, figure
from moefold.units import format_bytes, format_seconds

Judged = tuple[Comparison, tuple[str, ...], list[Verdict]]
_COLORS = {"moefold": 1, "baseline": 5, "peer": 2}
_LEGEND = (("moefold", 1), ("lower bound", 5), ("other libraries", 2))
_MORE_CSS = """
.pale{opacity:.38}.full{fill:var(--c)}.span{stroke:var(--ink);stroke-width:1.3;opacity:.75}
.name{fill:var(--ink);font-size:13px}.value{fill:var(--soft);font-size:12px}.target{margin:14px 0 0}
.target li.reached::marker{color:var(--good)}.target li.missed{color:var(--bad)}figure{margin-bottom:14px}
"""
# In pixels.
_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 210.0, 190.0, 8.0
_ROW, _BAR, _GAP = 44.0, 13.0, 2.0


def chart_page(judged: Sequence[Judged]) -> str:
    title = "moefold benchmarks"
    sections = [f"<h1>{title}</h1>"]
    for comparison, bases, found in judged:
        sections += [f"<h2>{escape(comparison.title)}</h2>", _figure(comparison, bases), _table(comparison, bases)]
        sections += [_verdicts(found), _failures(comparison)]
    return document(title, sections, CSS + _MORE_CSS)


def _figure(comparison: Comparison, bases: Sequence[str]) -> str:
    base = next(
        (name for name in bases if any(comparison.times(name, routing) for routing in comparison.routings)), None
    )
    shown = [each for each in comparison.results if any(each.finished(routing) for routing in comparison.routings)]
    if not shown:
        return ""
    values = {
        (each.name, routing): _value(comparison, each.name, base, routing)
        for each in shown
        for routing in comparison.routings
    }
    known = [value for value in values.values() if value is not None]
    scale = Scale(0.0, 1.04 * max(value.high for value in known), _LEFT, _WIDTH - _RIGHT)
    height = _TOP + _ROW * len(shown) + 26
    body = [f'<svg viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img">', *_axis(scale, height)]
    for row, each in enumerate(shown):
        body.append(f'<g class="c{_COLORS[each.spec.role]}">')
        body += _bars(comparison, each.name, values, scale, _TOP + row * _ROW)
        body.append("</g>")
    body.append("</svg>")
    what = f"times as long as: {base}" if base else "seconds"
    note = f"Shorter is better. Medians of {comparison.rounds} rounds, {CLOCKS[comparison.clock]}. "
    note += "Lines: from the first quartile to the third."
    if comparison.busy_cores_of_others is not None:
        note += f" Other processes kept {comparison.busy_cores_of_others:.1f} cores busy meanwhile."
    if len(comparison.routings) > 1:
        note += " Pale: fixed routing. Full: changing routing, as in training."
    roles = {each.spec.role for each in shown}
    legend = [(name, color) for name, color in _LEGEND if any(_COLORS[role] == color for role in roles)]
    return figure(what, legend, note, "".join(body))


def _value(comparison: Comparison, name: str, base: str | None, routing: str) -> Spread | None:
    return comparison.time(name, routing) if base is None else comparison.ratio(name, base, routing)


def _axis(scale: Scale, height: float) -> list[str]:
    bottom = height - 22
    lines = []
    for tick in scale.ticks(8):
        x = scale(tick)
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        lines.append(f'<text class="tick mid" x="{x:.1f}" y="{bottom + 15}">{short(tick)}</text>')
    return lines


def _bars(
    comparison: Comparison, name: str, values: dict[tuple[str, str], Spread | None], scale: Scale, top: float
) -> list[str]:
    lines = [f'<text class="name end" x="{_LEFT - 12}" y="{top + _ROW / 2 + 1:.1f}">{escape(name)}</text>']
    two = len(comparison.routings) > 1
    y = top + (_ROW - (2 * _BAR + _GAP if two else _BAR)) / 2 - 3
    for routing in comparison.routings:
        value = values.get((name, routing))
        if value is None:
            continue
        pale = " pale" if routing == FIXED and two else ""
        width, middle = scale(value.median) - _LEFT, y + _BAR / 2
        time = comparison.time(name, routing)
        taken = "" if time is None else format_seconds(time.median)
        lines += [
            f'<rect class="full{pale}" x="{_LEFT}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}" rx="2"/>',
            f'<line class="span" x1="{scale(value.low):.1f}" x2="{scale(value.high):.1f}" '
            f'y1="{middle:.1f}" y2="{middle:.1f}"/>',
            f'<text class="value" x="{scale(value.high) + 8:.1f}" y="{middle + 4:.1f}">{value.median:.2f}x '
            f"&#160;{taken}</text>",
        ]
        y += _BAR + _GAP
    return lines


def _table(comparison: Comparison, bases: Sequence[str]) -> str:
    routing = comparison.routings[-1] if comparison.routings else CHANGING
    columns = list(compared_with(comparison, bases, routing))
    head = "".join(f"<th>x {escape(heading)}</th>" for heading, _ in columns)
    rows = []
    for each in comparison.results:
        time = comparison.time(each.name, routing)
        if time is None:
            continue
        ratios = "".join(f"<td>{ratio_text(comparison.ratio(each.name, base, routing))}</td>" for _, base in columns)
        sizes = "".join(f"<td>{'-' if size is None else format_bytes(size)}</td>" for size in (each.saved, each.peak))
        error = "-" if each.error is None else f"{each.error:.1e}"
        rows.append(
            f"<tr><td>{escape(each.name)}</td><td>{format_seconds(time.median)}</td>{ratios}{sizes}"
            f"<td>{comparison.faults(each.name, routing):,}</td><td>{error}</td></tr>"
        )
    last = "".join(f"<th>{name}</th>" for name in ("saved", "peak", "page faults", "error"))
    heading = f"<tr><th>{f'{routing} routing' if routing else ''}</th><th>time</th>{head}{last}</tr>"
    return f'<div class="panel scroll"><table>{heading}{"".join(rows)}</table></div>'


def _verdicts(found: Sequence[Verdict]) -> str:
    tones = {True: "reached", False: "missed", None: "open"}
    items = "".join(f'<li class="{tones[each.reached]}">{escape(each.text)}</li>' for each in found)
    return f'<ul class="target">{items}</ul>' if items else ""


def _failures(comparison: Comparison) -> str:
    failed = [f"<li>{escape(each.name)}: {escape(each.failure)}</li>" for each in comparison.results if each.failure]
    failed += [f"<li>{escape(each.name)}: {escape(each.remark)}</li>" for each in comparison.results if each.remark]
    return f'<p class="sub">Missing:</p><ul>{"".join(failed)}</ul>' if failed else ""
