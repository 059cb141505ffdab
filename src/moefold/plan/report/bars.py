"""Bars of the page: what every pipeline rank holds compared with the GPU's memory, and where the step's time goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from moefold.plan.memory.peak import memory_at
from moefold.plan.prediction import MemoryLine, MemoryPrediction, Prediction, TimeLine
from moefold.plan.search.explain import seconds
from moefold.schedule.text_grid import shown
from moefold.units import format_bytes

# Group or wall -> colour class.
MEMORY_COLORS = {"weights": 1, "gradients": 4, "optimizer": 3, "activations": 2, "buffers": 6, "overhead": 5}
TIME_COLORS = {"compute": 1, "memory": 3, "communication": 2, "host": 4, "bubble": 5, "optimizer": 6}
_MOST_RANKS = 16


def memory_section(prediction: Prediction) -> str:
    memory = prediction.memory
    room = 1 - memory.total / memory.capacity
    left = f"{room:.1%} of the GPU is left" if room >= 0 else f"{-room:.1%} more than the GPU has"
    keys = "".join(
        f'<span class="key"><i class="c{color}"></i>{group} {format_bytes(memory.of(group))}</span>'
        for group, color in MEMORY_COLORS.items()
        if memory.of(group)
    )
    note = (
        f"Pipeline rank {memory.pipeline_rank} is the fullest: {format_bytes(memory.total)} of "
        f"{format_bytes(memory.capacity)}; {left}. The red line is what the GPU has. Amounts beside the colours are "
        "the fullest rank's."
    )
    return (
        f'<h2>Memory of every pipeline rank</h2><div class="panel"><div class="held">{"".join(_ranks(prediction))}'
        f'</div><div class="keys">{keys}</div><p class="note">{escape(note)}</p>{_memory_table(memory)}</div>'
    )


def _ranks(prediction: Prediction) -> Iterator[str]:
    workload, most = prediction.workload, _MOST_RANKS
    held = [memory_at(workload, rank) for rank in shown(workload.degrees.pp, most) if rank is not None]
    scale = max(max(each.total for each in held), prediction.memory.capacity) * 1.02
    by_rank = {each.pipeline_rank: each for each in held}
    for rank in shown(workload.degrees.pp, most):
        if rank is None:
            yield "<span></span><span class=soft>...</span><span class=amount></span>"
        else:
            yield _track(by_rank[rank], scale, rank == prediction.memory.pipeline_rank)


def _track(memory: MemoryPrediction, scale: float, fullest: bool) -> str:
    parts = "".join(
        f'<i class="c{color}" style="flex:0 0 {100 * memory.of(group) / scale:.2f}%" '
        f'title="{group} {format_bytes(memory.of(group))}"></i>'
        for group, color in MEMORY_COLORS.items()
        if memory.of(group)
    )
    name, amount = f"rank {memory.pipeline_rank}", format_bytes(memory.total)
    line = f'<span class="full" style="left:{100 * memory.capacity / scale:.2f}%"></span>'
    strong = ("<b>", "</b>") if fullest else ("", "")
    return (
        f'<span>{strong[0]}{name}{strong[1]}</span><span class="track"><span class="bar">{parts}</span>{line}</span>'
        f'<span class="amount">{strong[0]}{amount}{strong[1]}</span>'
    )


def _memory_table(memory: MemoryPrediction) -> str:
    def row(line: MemoryLine) -> str:
        return (
            f'<tr><td>{escape(line.group)}</td><td class="text">{escape(line.name)}</td>'
            f"<td>{format_bytes(line.bytes)}</td><td>{line.bytes / memory.total:.1%}</td>"
            f'<td class="text soft">{escape(line.why)}</td></tr>'
        )

    head = "<tr><th>group</th><th class=text>what</th><th>bytes</th><th>share</th><th class=text>how</th></tr>"
    rows = "".join(row(line) for line in sorted(memory.lines, key=lambda line: -line.bytes) if line.bytes)
    return f'<details><summary>line by line</summary><div class="scroll"><table>{head}{rows}</table></div></details>'


def time_section(prediction: Prediction) -> str:
    time = prediction.time
    exposed = sorted(time.lines, key=lambda line: (list(TIME_COLORS).index(_wall(line)), -line.seconds))
    return (
        '<h2>Where the time goes</h2><div class="panel">'
        + _time_bar(exposed, time.step_seconds)
        + f'<div class="keys">{_time_keys(prediction)}</div>{_time_table(exposed, time.step_seconds)}</div>'
    )


def _wall(line: TimeLine) -> str:
    return line.wall if line.wall in TIME_COLORS else "compute"


def _time_bar(lines: Sequence[TimeLine], step: float) -> str:
    parts = "".join(
        f'<i class="c{TIME_COLORS[_wall(line)]}" style="flex:{max(0.0, line.seconds - line.hidden) / step:.5f} 1 0" '
        f'title="{escape(line.name)} {seconds(line.seconds - line.hidden)}"></i>'
        for line in lines
        if line.seconds - line.hidden > 0
    )
    return f'<div class="bar">{parts}</div>'


def _time_keys(prediction: Prediction) -> str:
    time = prediction.time
    return "".join(
        f'<span class="key"><i class="c{color}"></i>{wall} {time.of(wall) / time.step_seconds:.1%}</span>'
        for wall, color in TIME_COLORS.items()
        if time.of(wall) > 0
    )


def _time_table(lines: Sequence[TimeLine], step: float) -> str:
    def row(line: TimeLine) -> str:
        shown_seconds = line.seconds - line.hidden
        return (
            f'<tr><td class="text"><span class="key"><i class="c{TIME_COLORS[_wall(line)]}"></i></span> '
            f"{escape(line.name)}</td>"
            f"<td>{seconds(shown_seconds)}</td><td>{shown_seconds / step:.1%}</td>"
            f"<td>{seconds(line.hidden) if line.hidden > 1e-4 else ''}</td></tr>"
        )

    head = "<tr><th>cause</th><th>exposed</th><th>share</th><th>hidden behind other work</th></tr>"
    rows = "".join(row(line) for line in sorted(lines, key=lambda line: line.hidden - line.seconds))
    return f'<div class="scroll"><table>{head}{rows}</table></div>'
