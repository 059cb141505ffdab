"""The page: headline numbers, curves, where the time went, the experts, and what is not known."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from html import escape
from typing import Any

from moefold.html.chart_scale import short
from moefold.html.document import card, document
from moefold.train.report.curves import learning, speed
from moefold.train.report.experts import experts
from moefold.train.report.history import History
from moefold.train.report.style import CSS, SCRIPT
from moefold.train.report.summary import summary
from moefold.units import format_bytes, format_count


def page(history: History) -> str:
    facts = summary(history)
    sections = [_header(history, facts), _cards(facts)]
    if len(history.steps):
        sections += [learning(history), speed(history)]
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
