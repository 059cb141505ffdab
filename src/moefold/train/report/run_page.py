"""The page of a run: headline numbers, curves, where the time went, the experts, and what is not known.

To the common style it adds heat maps of experts, and a script that shows values at the pointer.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from html import escape
from typing import Any

from moefold.html.chart_scale import short
from moefold.html.document import CSS as COMMON
from moefold.html.document import card, document
from moefold.train.report.curves import learning, metrics_of_callbacks, speed
from moefold.train.report.expert_charts import experts
from moefold.train.report.history import History
from moefold.train.report.summary import summary
from moefold.units import format_bytes, format_count


def page(history: History) -> str:
    facts = summary(history)
    sections = [_header(history, facts), _cards(facts)]
    if len(history.steps):
        sections += [learning(history), metrics_of_callbacks(history), speed(history)]
    if history.bins and history.last_bin:
        sections.append(experts(history))
    sections += [_skips(history), _missing(facts), _config(history)]
    return document(str(facts["run"] or "a run"), sections, CSS, SCRIPT)


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
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


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
    line.setAttribute('d', `M${data.x[i]} 10V${svg.viewBox.baseVal.height - 26}`);
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
    const told = seen === 255 ? 'no token' : `${load} times the mean${beyond}`;
    tip.textContent = [map.alt, cells.columns[x], cells.rows[y], told].filter(Boolean).join(' · ');
    figure.append(tip);
    place(tip, figure, event.clientX - frame.left, event.clientY - frame.top - 6);
  });
  map.addEventListener('pointerleave', () => tip.remove());
}
"""
