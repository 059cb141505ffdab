"""Two or more runs on one page: their numbers side by side, their curves in one chart, and the keys that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

import numpy as np

from moefold.errors import MoefoldError
from moefold.html.chart_scale import short
from moefold.html.document import document
from moefold.train.report.history import History
from moefold.train.report.line_chart import Downsampled, Series, downsample, line_chart
from moefold.train.report.run_page import CSS, SCRIPT
from moefold.train.report.summary import summary
from moefold.units import format_bytes, format_count

# As many as the page has colours.
MAX_RUNS = 5
# Title, column, unit; logarithmic, from zero.
_CURVES = (
    ("Training loss", "loss", "nats per token", False, False),
    ("Gradient norm before clipping", "grad_norm", "L2 norm", True, False),
    ("Learning rate", "lr", "lr", False, True),
    ("Tokens per second", "tokens_per_s", "tokens/s", False, True),
    ("Busiest expert", "load", "times the mean", False, False),
    ("Peak memory of rank 0", "memory", "GiB", False, True),
)


def compare_page(runs: Mapping[str, History]) -> str:
    """``runs`` by the names that the reader gave them, usually their directories."""
    if not 2 <= len(runs) <= MAX_RUNS:
        raise MoefoldError(f"{len(runs)} runs on one page: compare 2 to {MAX_RUNS}")
    names, histories = list(runs), list(runs.values())
    facts = {name: summary(history) for name, history in runs.items()}
    sections = [
        f"<h1>{escape(' and '.join(names))}</h1>",
        '<p class="sub">runs side by side</p>',
        _numbers(facts),
        f'<h2>Curves</h2><div class="charts">{"".join(_curves(names, histories))}</div>',
        _differences(names, histories),
    ]
    kept = {name: {key: value for key, value in each.items() if key != "router"} for name, each in facts.items()}
    return document(" and ".join(names), sections, CSS, SCRIPT, {"runs.json": kept})


def _numbers(facts: Mapping[str, Mapping[str, object]]) -> str:
    def row(label: str, cells: Iterator[str]) -> str:
        return f"<tr><td class=text>{escape(label)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"

    def shown(key: str, form: Callable[..., str]) -> Iterator[str]:
        return (form(each[key]) if each[key] is not None else "none" for each in facts.values())

    rows = [
        row("status", shown("status", str)),
        row("step", shown("step", lambda value: f"{value:,}")),
        row("tokens seen", shown("tokens", format_count)),
        row("last loss", shown("last_loss", lambda value: f"{value:.4f}")),
        row("best validation loss", shown("best_validation", lambda value: f"{value:.4f}")),
        row("tokens/s, median of the last half", shown("tokens_per_s", format_count)),
        row("seconds per step, median", shown("step_seconds", short)),
        row("peak memory of rank 0", shown("memory_bytes", format_bytes)),
        row("skipped steps", shown("skipped", str)),
        row("ranks", shown("world", str)),
        row("parameters", shown("parameters", format_count)),
    ]
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *facts))
    return f'<div class="panel scroll"><table class="sides"><tr>{head}</tr>{"".join(rows)}</table></div>'


def _curves(names: Sequence[str], histories: Sequence[History]) -> Iterator[str]:
    for title, column, unit, log, from_zero in _CURVES:
        factor = 2**-30 if column == "memory" else 1.0
        curves = [
            Series(name, downsample(history.steps, history.column(column) * factor), color)
            for color, (name, history) in enumerate(zip(names, histories), 1)
            if len(history.steps)
        ]
        yield line_chart(title, curves, unit=unit, log=log, from_zero=from_zero)
        if column == "loss":
            yield line_chart("Validation loss", list(_validation(names, histories)), unit=unit)


def _validation(names: Sequence[str], histories: Sequence[History]) -> Iterator[Series]:
    for color, (name, history) in enumerate(zip(names, histories), 1):
        if history.validation:
            at, values = (np.array([row[i] for row in history.validation], float) for i in (0, 1))
            yield Series(name, Downsampled(at, values, values, values, 1), color, dots=len(at) <= 60)


def _differences(names: Sequence[str], histories: Sequence[History]) -> str:
    """Keys of the configurations in which not all runs agree."""
    configs = [dict(_leaves(history.start.get("config"))) for history in histories]
    keys = sorted({key for config in configs for key in config})
    rows = [
        f"<tr><td class=text>{escape(key)}</td>"
        + "".join(f"<td>{escape(config.get(key, 'not there'))}</td>" for config in configs)
        + "</tr>"
        for key in keys
        if len({config.get(key) for config in configs}) > 1
    ]
    if not rows:
        return "<h2>Configuration</h2><p>No key differs.</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *names))
    table = f'<table class="sides"><tr>{head}</tr>{"".join(rows)}</table>'
    return f'<h2>Keys that differ</h2><div class="panel scroll">{table}</div>'


def _leaves(tree: object, above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", str(value)
