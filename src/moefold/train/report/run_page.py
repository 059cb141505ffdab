"""The page of a run: headline numbers, curves, where the time went, the experts, and what is not known.

To the common style it adds heat maps of experts, and a script that shows values at the pointer.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from moefold.html.chart_scale import short
from moefold.html.document import CSS as COMMON
from moefold.html.document import card, document
from moefold.train.report.component_bars import component_bars
from moefold.train.report.expert_charts import experts
from moefold.train.report.history import HANG, RESTART, History
from moefold.train.report.layout_charts import layout
from moefold.train.report.line_chart import Downsampled, Series, downsample, line_chart, stacked_chart
from moefold.train.report.summary import summary, time_parts
from moefold.units import format_bytes, format_count, format_seconds

# Of one; several have an "s" more.
_FAULT_NAMES = {
    RESTART: "restart",
    HANG: "hang",
    "save_failed": "failed save",
    "roll_back": "roll-back",
    "straggler": "slow rank",
}
_TIME_COLORS = {"compute": 1, "waiting for data": 4, "saving": 3, "other": 5}


def page(history: History) -> str:
    facts = summary(history)
    sections = [_header(history, facts), _cards(facts)]
    if len(history.steps):
        sections += [_learning(history), _callback_metrics(history), _speed(history)]
        sections += [component_bars(history.profile), layout(history)]
    if history.bins and history.last_bin:
        sections.append(experts(history))
    sections += [_faults(history), _skips(history), _missing(facts), _config(history)]
    return document(str(facts["run"] or "a run"), sections, CSS, SCRIPT, {"run.json": _data(history, facts)})


def _data(history: History, facts: dict[str, object]) -> dict[str, object]:
    """The numbers behind the page: the summary, and every column as its chart shows it."""
    named = history.columns | history.balance | history.metrics
    curves = {name: downsample(history.steps, column) for name, column in named.items()}
    columns = {
        name: [None if math.isnan(value) else float(f"{value:.6g}") for value in curve.mean]
        for name, curve in curves.items()
        if not curve.empty
    }
    steps = [int(step) for step in next(iter(curves.values())).x] if curves else []
    return {"summary": facts, "steps": steps, "columns": columns, "validation": history.validation}


def _header(history: History, facts: dict[str, Any]) -> str:
    status = str(facts["status"])
    tone = {"finished": "good", "failed": "bad"}.get(status, "open")
    size = f"{format_count(facts['parameters'])} parameters" if facts["parameters"] else ""
    active = f"{format_count(facts['active_parameters'])} active" if facts["active_parameters"] else ""
    where = (
        f"{facts['world']} {'rank' if facts['world'] == 1 else 'ranks'} of {facts['device']}" if facts["world"] else ""
    )
    again = f"started {facts['starts']} times" if facts["starts"] > 1 else ""
    words = [word for word in (size, active, where, _when(history), again) if word]
    return (
        f'<h1>{escape(str(facts["run"] or "a run"))}<span class="badge {tone}">{escape(status)}</span></h1>'
        f'<p class="sub">{escape(" · ".join(words))}</p>'
    )


def _when(history: History) -> str:
    if history.times is None or not 0 <= history.times[0] <= history.times[1] < 1e11:
        return ""
    began, ended = (datetime.fromtimestamp(time, UTC) for time in history.times)
    last = f"{ended:%H:%M}" if began.date() == ended.date() else f"{ended:%Y-%m-%d %H:%M}"
    return f"{began:%Y-%m-%d %H:%M} to {last} UTC"


def _cards(facts: dict[str, Any]) -> str:
    def loss(value: float | None) -> str:
        return "none" if value is None else f"{value:.4f}"

    steps, speed, flops, mfu = facts["steps"], facts["tokens_per_s"], facts["tflops_per_rank"], facts["mfu"]
    unit, flop_name = (1.0, "TFLOP") if flops and flops >= 0.1 else (1e-3, "GFLOP")
    router = facts["router"]
    cards = [
        card(f"{facts['step']:,}", "step", f"of {steps:,}" if steps else ""),
        card(loss(facts["last_loss"]), "loss", f"first {loss(facts['first_loss'])}"),
        card(loss(facts["last_validation"]), "validation loss", f"best {loss(facts['best_validation'])}"),
        card(format_count(facts["tokens"]), "tokens seen"),
        card(format_count(speed) if speed else "none", "tokens/s", "median of the last half"),
        card(
            f"{short(flops / unit)}" if flops else "none",
            f"{flop_name}/s per rank",
            f"MFU {mfu:.1%}" if mfu else "MFU not known",
        ),
        card(format_bytes(facts["memory_bytes"]) if facts["memory_bytes"] else "none", "peak memory", "of rank 0"),
        card(f"{router['max_load']:.2f}" if router else "none", "busiest expert", "times the mean, worst layer"),
        card(str(router["dead"]) if router else "none", "dead experts", "in the last interval"),
        card(f"{facts['skipped']:,}", "skipped steps"),
        card(f"{sum(facts['faults'].values()):,}", "faults", _counted(facts["faults"])),
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


def _learning(history: History) -> str:
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
        line_chart(
            "Loss",
            [Series("training", loss), validation],
            unit="nats per token",
            note=note,
            marks=marks,
            x_range=span,
        ),
        line_chart(
            "Gradient norm before clipping",
            [Series("grad_norm", grad_norm)],
            unit="L2 norm, logarithmic",
            log=True,
            marks=marks,
            x_range=span,
        ),
        line_chart("Learning rate", [Series("lr", lr)], unit="lr", from_zero=True, x_range=span),
        line_chart(_balance_title(balance), balance, unit="added to the loss", from_zero=True, x_range=span),
    ]
    return f'<h2>Learning</h2><div class="charts">{"".join(charts)}</div>'


def _balance_title(balance: list[Series]) -> str:
    """A chart of one curve has no legend, so its title names it."""
    return "Balance losses" if len(balance) != 1 else f"Balance loss: {balance[0].name}"


def _callback_metrics(history: History) -> str:
    """A chart for every metric that callbacks added."""
    span = (float(history.steps[0]), float(history.steps[-1]))
    charts = [
        line_chart(name, [Series(name, downsample(history.steps, column))], unit=name, x_range=span)
        for name, column in history.metrics.items()
    ]
    return f'<h2>Metrics of callbacks</h2><div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def _speed(history: History) -> str:
    steps = history.steps
    span = (float(steps[0]), float(steps[-1]))
    throughput, memory = (
        downsample(steps, history.column("tokens_per_s")),
        downsample(steps, history.column("memory") / 2**30),
    )
    charts = [
        line_chart(
            "Tokens per second", [Series("tokens/s", throughput)], unit="tokens/s", from_zero=True, x_range=span
        ),
        _time_over_steps(history),
        line_chart("Peak memory of rank 0", [Series("GiB", memory)], unit="GiB", from_zero=True, x_range=span),
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
    return stacked_chart("A step's time", total.x, parts, note=note, unit=unit, x_range=span)


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


def _counted(faults: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {_FAULT_NAMES[kind]}{'s' * (count != 1)}" for kind, count in faults.items())


def _faults(history: History) -> str:
    """When each kind of fault happened, a row of dots per kind, and every one of them in words."""
    if not history.faults:
        return ""
    kinds = [kind for kind in _FAULT_NAMES if history.num_faults[kind]]
    dots = [
        Series(f"{_FAULT_NAMES[kind]}s", _dots(history, kind, len(kinds) - row), 1 + row % 5, dots=True, line=False)
        for row, kind in enumerate(kinds)
    ]
    span = (0.0, float(history.steps[-1])) if len(history.steps) else None
    chart = line_chart(
        "Faults over the run",
        dots,
        note="" if len(dots) > 1 else f"{_FAULT_NAMES[kinds[0]]}s",
        from_zero=True,
        ticks=False,
        x_range=span,
    )
    rows = "".join(
        f"<tr><td>{'' if fault.step is None else f'{fault.step:,}'}</td>"
        f'<td class="text">{_FAULT_NAMES[fault.kind]}</td><td class="text">{escape(fault.what[:400])}</td></tr>'
        for fault in history.faults
    )
    more = sum(history.num_faults.values()) - len(history.faults)
    note = f'<p class="note">{more:,} more are counted, not shown</p>' if more else ""
    head = '<tr><th>step</th><th style="text-align:left">kind</th><th style="text-align:left">what</th></tr>'
    table = f'<div class="panel scroll" style="margin-top:16px"><table>{head}{rows}</table>{note}</div>'
    return f'<h2>Faults and restarts</h2><div class="charts">{chart}</div>{table}'


def _dots(history: History, kind: str, height: int) -> Downsampled:
    at = np.array([fault.step for fault in history.faults if fault.kind == kind and fault.step is not None], float)
    row = np.full(len(at), float(height))
    return Downsampled(at, row, row, row, 1)


def _skips(history: History) -> str:
    if not history.skipped:
        return ""
    rows = "".join(
        f'<tr><td>{step:,}</td><td class="text">{escape(why[:200])}</td></tr>' for step, why in history.skipped
    )
    head = '<tr><th>step</th><th style="text-align:left">why</th></tr>'
    return f'<h2>Skipped steps</h2><div class="panel scroll"><table>{head}{rows}</table></div>'


def _missing(facts: dict[str, Any]) -> str:
    if not facts["missing"]:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in facts["missing"])
    return f'<h2>Not on this page</h2><div class="panel"><ul>{items}</ul></div>'


def _config(history: History) -> str:
    config = history.start.get("config")
    if not isinstance(config, dict):
        return ""
    about = f"FLOPs per token: {history.start.get('flops_per_token')} ({history.start.get('flops_convention')})"
    text = json.dumps(config, indent=2)
    return f"<details><summary>Configuration</summary><pre>{escape(about)}\n{escape(text)}</pre></details>"


CSS = (
    COMMON
    + """
.heat{display:block;width:100%;image-rendering:pixelated;border:1px solid var(--line);border-radius:4px}
.heat.tall{height:150px}.many .heat.tall{height:110px}
.maps{display:grid;grid-template-columns:repeat(var(--columns),minmax(0,1fr));gap:12px}
@media (max-width:700px){.maps{grid-template-columns:repeat(2,minmax(0,1fr))}}
.maps p{margin:0 0 3px;font-size:12.5px;color:var(--soft)}
.now{display:flex;gap:8px}.rows{display:flex;flex-direction:column;justify-content:space-around;min-width:18px;color:var(--soft);
font-size:11.5px;line-height:1.2;text-align:right}.rows.ends{justify-content:space-between}
.now .heat{flex:1;min-width:0}
.strip{width:120px;height:12px;image-rendering:auto;border:1px solid var(--line);border-radius:3px;margin:0 -8px}
"""
)

SCRIPT = """
const place = (tip, figure, x, y) => {
  const half = tip.offsetWidth / 2;
  tip.style.left = `${Math.min(Math.max(x, half + 4), figure.offsetWidth - half - 4)}px`;
  tip.style.top = `${y}px`;
};
for (const svg of document.querySelectorAll('svg[data-hover]')) {
  const data = JSON.parse(svg.dataset.hover), figure = svg.closest('figure');
  const line = document.createElementNS(svg.namespaceURI, 'path'), tip = document.createElement('div');
  line.setAttribute('class', 'cursor'); tip.className = 'tip';
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    let i = 0;
    data.x.forEach((x, k) => { if (Math.abs(x - at) < Math.abs(data.x[i] - at)) i = k; });
    line.setAttribute('d', `M${data.x[i]} 26V${svg.viewBox.baseVal.height - 42}`);
    const shown = Object.entries(data.curves).filter(([, v]) => v[i] !== null).map(([n, v]) => `${n} ${v[i]}`);
    tip.textContent = [`step ${data.steps[i].toLocaleString('en')}`, ...shown].join(' · ');
    const frame = figure.getBoundingClientRect();
    svg.append(line); figure.append(tip);
    const across = data.x[i] * box.width / svg.viewBox.baseVal.width;
    place(tip, figure, box.left - frame.left + across, box.top - frame.top + 8);
  });
  svg.addEventListener('pointerleave', () => { line.remove(); tip.remove(); });
}
for (const map of document.querySelectorAll('figure[data-cells] img.heat')) {
  const figure = map.closest('figure'), cells = JSON.parse(figure.dataset.cells);
  const tip = document.createElement('div'), canvas = document.createElement('canvas');
  let pen = null;
  tip.className = 'tip';
  map.addEventListener('pointermove', event => {
    if (!pen) {
      canvas.width = map.naturalWidth; canvas.height = map.naturalHeight;
      pen = canvas.getContext('2d', {willReadFrequently: true}); pen.drawImage(map, 0, 0);
    }
    const box = map.getBoundingClientRect(), frame = figure.getBoundingClientRect();
    const inside = (part, size) => Math.min(Math.max(Math.floor(part * size), 0), size - 1);
    const x = inside((event.clientX - box.left) / box.width, canvas.width);
    const y = inside((event.clientY - box.top) / box.height, canvas.height);
    const [red, , blue, seen] = pen.getImageData(x, y, 1, 1).data;
    const load = (2 ** (Math.sign(red - blue) * seen / cells.perDoubling)).toFixed(2);
    const beyond = seen === cells.most ? (red > blue ? ' or more' : ' or less') : '';
    const told = red === 128 ? 'not known' : seen === 255 ? 'no token' : `${load} ${cells.unit}${beyond}`;
    tip.textContent = [map.alt, cells.columns[x], cells.rows[y], told].filter(Boolean).join(' · ');
    figure.append(tip);
    place(tip, figure, event.clientX - frame.left, event.clientY - frame.top - 6);
  });
  map.addEventListener('pointerleave', () => tip.remove());
}
"""
