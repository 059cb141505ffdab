"""Where a profiled step's time goes on every rank, as stacked bars, and what is named as the cause.

A bar is one rank's mean step: its components side by side, in seconds, so that bars of ranks which step together are
equally long and what differs is how they are filled. Communication and waiting of all axes have one color each; the
table below has them by axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from moefold.train.profile.causes import causes_of, measured_wall
from moefold.train.profile.profile_table import meaning
from moefold.train.profile.step_account import (
    TOGETHER,
    StepAccount,
    mean_of_ranks,
    together,
    typical,
    wall_seconds,
)
from moefold.units import format_seconds

# Of the components, on light and dark pages alike.
COLORS = dict(
    zip(
        TOGETHER,
        ("#2468c9", "#d9541e", "#e8a33d", "#9a958b", "#7d55b8", "#b3261e", "#12836a", "#4a9fb5", "#6f8f2f", "#c9c4b8"),
        strict=True,
    )
)
_MAX_BARS = 32
_WIDTH, _LEFT, _ROW, _BAR = 900, 70, 26, 18


def component_bars(accounts: Sequence[StepAccount]) -> str:
    """The section, or nothing without a profile."""
    if not accounts:
        return ""
    steps = len(accounts)
    causes = causes_of(accounts)
    named = "".join(f"<li>{escape(cause.what)} ({cause.share:.0%} of the step)</li>" for cause in causes)
    said = f"<ul>{named}</ul>" if causes else "<p>No rank, link, batch or collection of garbage stands out.</p>"
    title = f"{steps} profiled step{'s' * (steps != 1)}: {format_seconds(wall_seconds(accounts))} each"
    return (
        f"<h2>Profiled steps</h2><figure><figcaption><b>{title}</b> by rank</figcaption>"
        f"{_bars(typical(accounts))}{_keys(typical(accounts))}</figure>"
        f'<div class="panel" style="margin-top:16px"><b>The wall is {measured_wall(accounts)}.</b>{said}'
        f"{_table(typical(accounts))}</div>"
    )


def _bars(ranks: Sequence[dict[str, float]]) -> str:
    shown = ranks[:_MAX_BARS]
    longest = max(sum(parts.values()) for parts in shown)
    rows = []
    for rank, parts in enumerate(shown):
        at, top = float(_LEFT), rank * _ROW + 4
        rows.append(f'<text x="0" y="{top + 13}">rank {rank}</text>')
        for name, seconds in together(parts).items():
            width = seconds / longest * (_WIDTH - _LEFT)
            if width >= 0.1:
                hint = f"<title>rank {rank}: {name} {format_seconds(seconds)}</title>"
                box = f'x="{at:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}"'
                rows.append(f'<rect {box} fill="{COLORS[name]}">{hint}</rect>')
            at += width
    height = len(shown) * _ROW + 6
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(rows)}</svg>'


def _keys(ranks: Sequence[dict[str, float]]) -> str:
    present = {name for parts in ranks for name, seconds in together(parts).items() if seconds > 0}
    keys = (
        f'<span class="key"><i style="background:{COLORS[name]}"></i>{name}</span>'
        for name in TOGETHER
        if name in present
    )
    more = f"; the first {_MAX_BARS} of {len(ranks)} ranks" if len(ranks) > _MAX_BARS else ""
    return f'<div class="keys">{" ".join(keys)}{more}</div>'


def _table(ranks: Sequence[dict[str, float]]) -> str:
    mean = mean_of_ranks(ranks)
    total = sum(mean.values())
    rows = "".join(
        f'<tr><td class="text">{name}</td><td class="text">{escape(meaning(name))}</td>'
        f"<td>{format_seconds(seconds)}</td><td>{seconds / total:.1%}</td>"
        f"<td>{format_seconds(max(parts.get(name, 0.0) for parts in ranks))}</td></tr>"
        for name, seconds in mean.items()
    )
    head = "<tr><th></th><th></th><th>mean</th><th>share</th><th>most</th></tr>"
    return f'<div class="scroll"><table>{head}{rows}</table></div>'
