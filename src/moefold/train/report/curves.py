"""The curves of a run: losses, gradient norm, lr, throughput, memory, and where a step's time goes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moefold.train.report.history import History
from moefold.train.report.line_chart import Downsampled, Series, downsample, line_chart, stacked_chart
from moefold.train.report.summary import time_parts
from moefold.units import format_seconds

_TIME_COLORS = {"compute": 1, "waiting for data": 4, "saving": 3, "other": 5}


def learning(history: History) -> str:
    steps, marks = history.steps, [step for step, _ in history.skipped]
    span = (float(steps[0]), float(steps[-1]))
    loss, grad_norm, lr = (downsample(steps, history.column(name)) for name in ("loss", "grad_norm", "lr"))
    band = f"each point is {loss.per_bucket:,} steps, the band their lowest and highest" if loss.per_bucket > 1 else ""
    note = "; ".join(filter(None, (band, "red ticks are skipped steps" if marks else "")))
    at, values = (np.array([row[i] for row in history.validation], float) for i in (0, 1))
    validation = Series("validation", Downsampled(at, values, values, values, 1), 2, dots=len(at) <= 60)
    balance = [
        Series(name, downsample(steps, column), 1 + i % 5) for i, (name, column) in enumerate(history.balance.items())
    ]
    charts = [
        line_chart("Loss", [Series("training", loss), validation], note=note, marks=marks, x_range=span),
        line_chart(
            "Gradient norm before clipping", [Series("grad_norm", grad_norm)], log=True, marks=marks, x_range=span
        ),
        line_chart("Learning rate", [Series("lr", lr)], from_zero=True, x_range=span),
        line_chart(_balance_title(balance), balance, from_zero=True, x_range=span),
    ]
    return f'<h2>Learning</h2><div class="charts">{"".join(charts)}</div>'


def _balance_title(balance: list[Series]) -> str:
    """A chart of one curve has no legend, so its title names it."""
    return "Balance losses" if len(balance) != 1 else f"Balance loss: {balance[0].name}"


def metrics_of_callbacks(history: History) -> str:
    """A chart for every metric that callbacks added."""
    span = (float(history.steps[0]), float(history.steps[-1]))
    charts = [
        line_chart(name, [Series(name, downsample(history.steps, column))], x_range=span)
        for name, column in history.metrics.items()
    ]
    return f'<h2>Metrics of callbacks</h2><div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def speed(history: History) -> str:
    steps = history.steps
    span = (float(steps[0]), float(steps[-1]))
    throughput, memory = (
        downsample(steps, history.column("tokens_per_s")),
        downsample(steps, history.column("memory") / 2**30),
    )
    charts = [
        line_chart("Tokens per second", [Series("tokens/s", throughput)], from_zero=True, x_range=span),
        _time_over_steps(history),
        line_chart("Peak memory of rank 0, GiB", [Series("GiB", memory)], from_zero=True, x_range=span),
        _time_together(history),
    ]
    return f'<h2>Speed</h2><div class="charts">{"".join(charts)}</div>'


def _time_over_steps(history: History) -> str:
    total = downsample(history.steps, history.column("total"), 120)
    if total.empty:
        return ""
    unit, factor = ("seconds", 1.0) if np.nanmedian(total.mean) >= 1 else ("milliseconds", 1e3)
    columns = {"compute": "step_seconds", "waiting for data": "data", "saving": "save"}
    heights: dict[str, npt.NDArray[np.float64]] = {
        name: np.nan_to_num(downsample(history.steps, history.column(column), 120).mean)
        for name, column in columns.items()
    }
    heights["other"] = np.maximum(np.nan_to_num(total.mean) - sum(heights.values()), 0.0)
    parts = [(name, _TIME_COLORS[name], height * factor) for name, height in heights.items()]
    span = (float(history.steps[0]), float(history.steps[-1]))
    note = "validation is not part of a step"
    return stacked_chart(f"A step's time, in {unit}", total.x, parts, note=note, x_range=span)


def _time_together(history: History) -> str:
    parts = time_parts(history)
    total = sum(parts.values())
    if total <= 0:
        return ""
    pieces, rows = [], []
    for name, spent in parts.items():
        color = _TIME_COLORS[name]
        if spent:
            pieces.append(f'<i class="c{color}" style="flex:{spent / total:.5f}"></i>')
        rows.append(
            f'<tr><td><span class="key"><i class="c{color}"></i>{name}</span></td>'
            f"<td>{format_seconds(spent)}</td><td>{spent / total:.1%}</td></tr>"
        )
    return (
        f"<figure><figcaption><b>All steps together: {format_seconds(total)}</b></figcaption>"
        f'<div class="bar">{"".join(pieces)}</div><table style="margin-top:10px">{"".join(rows)}</table></figure>'
    )
