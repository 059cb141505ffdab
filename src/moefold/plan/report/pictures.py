"""Pictures of the page: bars of memory and time, and as inline SVG the order in time, the Pareto plot and goodput.

Bars compare what every pipeline rank holds with the GPU's memory, and show where the step's time goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from moefold.html.chart_scale import Scale, short
from moefold.html.document import figure
from moefold.plan.memory.peak import memory_at
from moefold.plan.prediction import MemoryLine, MemoryPrediction, Prediction, TimeLine
from moefold.plan.search.candidates import described
from moefold.plan.search.cheapest_savings import Candidate
from moefold.plan.search.explain import seconds
from moefold.plan.search.goodput import effective_share
from moefold.plan.search.proposal import Proposal
from moefold.plan.timing.step_timeline import StepTimeline
from moefold.schedule.actions import Action, Kind
from moefold.schedule.timeline_picture import cells_of, shown
from moefold.units import format_bytes, format_seconds

_WIDTH, _ROW, _GAP, _LEFT = 1180.0, 22.0, 4.0, 58.0
_MOST_RANKS, _MOST_POINTS = 16, 500
_CLASSES = {Kind.FORWARD: "f", Kind.BACKWARD: "b", Kind.BACKWARD_INPUT: "b", Kind.BACKWARD_WEIGHT: "w"}
_SMALLEST_NUMBER = 9.0
# Group or wall -> colour class.
MEMORY_COLORS = {"weights": 1, "gradients": 4, "optimizer": 3, "activations": 2, "buffers": 6, "overhead": 5}
TIME_COLORS = {"compute": 1, "memory": 3, "communication": 2, "host": 4, "bubble": 5, "optimizer": 6}
# Of the plot.
GIB = 2**30
_INSIDE, _ACROSS, _BOTTOM = 50.0, 548.0, 400.0


# ---- the order in time ----


def timeline_figure(step: StepTimeline, title: str = "The order in time", note: str = "") -> str:
    """``note`` says where the times come from, where they are no predictions of stages with their communication."""
    timeline = step.timeline
    ranks = shown(timeline.order.num_ranks, _MOST_RANKS)
    x = Scale(0.0, timeline.finish, _LEFT, _WIDTH - 4)
    rows = []
    for place, rank in enumerate(ranks):
        y = 4 + place * (_ROW + _GAP)
        if rank is None:
            rows.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y + 15}">...</text>')
            continue
        rows.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y + 15}">rank {rank}</text>')
        rows.append(f'<rect class="idle" x="{_LEFT}" y="{y}" width="{_WIDTH - 4 - _LEFT:.1f}" height="{_ROW}"/>')
        rows.extend(_boxes(step, rank, x, y))
    bottom = 4 + len(ranks) * (_ROW + _GAP)
    ticks = "".join(
        f'<text class="tick mid" x="{x(tick):.1f}" y="{bottom + 14}">{short(tick)} s</text>' for tick in x.ticks(9)
    )
    ticks += f'<text class="tick mid" x="{(_LEFT + _WIDTH) / 2:.0f}" y="{bottom + 32}">time in the step</text>'
    picture = (
        f'<div class="wide-picture"><svg viewBox="0 0 {_WIDTH:.0f} {bottom + 40:.0f}" role="img" '
        f'aria-label="the order in time">{"".join(rows)}{ticks}</svg></div>'
    )
    keys = _timeline_keys(step)
    part = f"the first {step.shown} of {step.microbatches:,}" if step.shown < step.microbatches else f"{step.shown}"
    note = note or (
        "The orange foot of a box is as high as the share of its time that is communication which nothing hides."
    )
    note = f"{timeline.order.name}, {part} microbatches. Grey is waiting for other stages. {note}"
    head = f"<figcaption><b>{escape(title)}</b>{keys}</figcaption>"
    return f'<figure class="wide">{head}{picture}<p class=note>{escape(note)}</p></figure>'


def _timeline_keys(step: StepTimeline) -> str:
    kinds = {part.kind for row in step.timeline.order.actions for action in row for part in action.parts}
    named = [("forward", "--forward", True), ("backward", "--backward", True)]
    named += [
        ("weight gradients", "--weight", Kind.BACKWARD_WEIGHT in kinds),
        ("exposed communication", "--wait", any(step.communication.values())),
    ]
    return "".join(
        f'<span class="key"><i style="background:var({color})"></i>{name}</span>' for name, color, here in named if here
    )


def _boxes(step: StepTimeline, rank: int, x: Scale, y: float) -> Iterator[str]:
    for action, (start, stop) in cells_of(step.timeline, rank):
        left, right = x(start), x(stop)
        height = _ROW / len(action.parts)
        for place, part in enumerate(action.parts):
            yield from _box(step, part, left, right, y + place * height, height)


def _box(step: StepTimeline, part: Action, left: float, right: float, y: float, height: float) -> Iterator[str]:
    width = max(right - left - 0.7, 0.4)
    yield (
        f'<rect class="{_CLASSES[part.kind]}" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
    )
    # As a band, not as an end: it stays visible however narrow the box is.
    waits = height * step.exposed(part)
    if waits > 0.2:
        yield (
            f'<rect class="wait" x="{left:.1f}" y="{y + height - waits:.1f}" width="{width:.1f}" height="{waits:.1f}"/>'
        )
    if width > _SMALLEST_NUMBER and height > 14:
        middle = left + width / 2
        yield f'<text class="num" x="{middle:.1f}" y="{y + height / 2 + 2:.1f}">{part.microbatch}</text>'


# ---- the Pareto plot ----


def pareto_figure(proposal: Proposal) -> str:
    result = proposal.result
    if result is None or len(result.ranked) < 2:
        return ""
    capacity = proposal.chosen.memory.capacity / GIB
    longest = min(result.ranked[-1].seconds, 2.5 * result.best.seconds)
    x = Scale(result.best.seconds * 0.98, max(longest * 1.02, result.best.seconds * 1.05), _INSIDE, _ACROSS)
    y = Scale(0.0, capacity * 1.25, _BOTTOM, 12.0)
    near = [each for each in result.ranked if each.seconds <= longest]
    marks, beyond = _marks(proposal, x, y)
    body = _axes(x, y) + "".join(_dots(near, result.pareto, x, y)) + marks
    body += f'<path class="limit" d="M{_INSIDE} {y(capacity):.1f}H{_ACROSS}"/>'
    body += f'<text class="tick end" x="{_ACROSS - 2}" y="{y(capacity) - 5:.1f}">what the GPU has</text>'
    note = (
        f"Every dot is a candidate that fits, of {len(result.ranked):,} that were timed; those beyond "
        f"{seconds(longest)} are not drawn. On the blue line nobody is both faster and leaner.{beyond}"
    )
    svg = f'<svg viewBox="0 0 560 {_BOTTOM + 38:.0f}" role="img" aria-label="time against memory">{body}</svg>'
    legend = [(name, color) for name, color, _, found in _named(proposal) if found is not None]
    return figure("Time against memory", legend, note, svg)


def _named(proposal: Proposal) -> list[tuple[str, int, str, Prediction | None]]:
    own = proposal.own if proposal.own and proposal.own.workload != proposal.chosen.workload else None
    # The chosen one is drawn last, on top.
    return [
        ("your own", 3, "mine", own),
        ("runner-up", 4, "second", proposal.runner_up),
        ("chosen", 2, "star", proposal.chosen),
    ]


def _marks(proposal: Proposal, x: Scale, y: Scale) -> tuple[str, str]:
    """Circles at the edge for what lies outside, and words about those."""
    parts, beyond = [], []
    for name, _, css, found in _named(proposal):
        if found is None:
            continue
        time, held = found.time.step_seconds, found.memory.total / GIB
        title = f"{name}: {seconds(time)}, {held:.1f} GiB"
        parts.append(
            f'<circle class="{css}" cx="{x(time):.1f}" cy="{y(held):.1f}" r="6.5"><title>{title}</title></circle>'
        )
        if time > x.high or held > y.high:
            beyond.append(f" Beyond the edge: {title}.")
    return "".join(parts), "".join(beyond)


def _axes(x: Scale, y: Scale) -> str:
    parts = []
    for tick in y.ticks(6):
        parts.append(f'<path class="grid" d="M{_INSIDE} {y(tick):.1f}H{_ACROSS}"/>')
        parts.append(f'<text class="tick end" x="{_INSIDE - 6}" y="{y(tick) + 3.5:.1f}">{short(tick)}</text>')
    for tick in x.ticks(6):
        parts.append(f'<text class="tick mid" x="{x(tick):.1f}" y="{_BOTTOM + 16}">{short(tick)}</text>')
    parts.append(f'<path class="axis" d="M{_INSIDE} {_BOTTOM}H{_ACROSS}"/>')
    middle = (_INSIDE + _ACROSS) / 2
    parts.append(f'<text class="tick mid" x="{middle}" y="{_BOTTOM + 33}">seconds per step</text>')
    parts.append(f'<text class="tick mid" transform="translate(12 {_BOTTOM / 2}) rotate(-90)">GiB per GPU</text>')
    return "".join(parts)


def _dots(near: Sequence[Candidate], front: Sequence[Candidate], x: Scale, y: Scale) -> Iterator[str]:
    every = max(1, len(near) // _MOST_POINTS)
    for each in near[::every]:
        yield f'<circle class="point" cx="{x(each.seconds):.1f}" cy="{y(each.bytes / GIB):.1f}" r="2.4"/>'
    kept = [each for each in front if each.seconds <= x.high]
    steps = "".join(
        f"{'L' if place else 'M'}{x(each.seconds):.1f} {y(each.bytes / GIB):.1f}" for place, each in enumerate(kept)
    )
    yield f'<path class="front" d="{steps}"/>'
    for each in kept:
        words = f"{seconds(each.seconds)}, {format_bytes(each.bytes)}: {described(each.choice)}"
        yield (
            f'<circle class="onfront" cx="{x(each.seconds):.1f}" cy="{y(each.bytes / GIB):.1f}" r="3.4">'
            f"<title>{escape(words)}</title></circle>"
        )


# ---- goodput ----


def goodput_figure(proposal: Proposal) -> str:
    """The share of time that trains, over the interval between saves."""
    found, faults = proposal.goodput, proposal.faults
    low, high = max(found.interval / 12, faults.write, 1.0), found.interval * 12
    count = 60
    points = [low * (high / low) ** (i / count) for i in range(count + 1)]
    shares = [effective_share(point, faults) for point in points]
    x, y = Scale(low, high, 52.0, 546.0, log=True), Scale(min(shares) * 0.995, 1.0, 204.0, 12.0)
    curve = "".join(f"{'L' if i else 'M'}{x(p):.1f} {y(s):.1f}" for i, (p, s) in enumerate(zip(points, shares)))
    body = [f'<path class="line c1" d="{curve}"/>']
    for tick in y.ticks(4):
        body.append(f'<path class="grid" d="M52 {y(tick):.1f}H546"/>')
        body.append(f'<text class="tick end" x="46" y="{y(tick) + 3.5:.1f}">{tick:.1%}</text>')
    for place in (low, found.interval, high):
        anchor = "mid" if place == found.interval else "end" if place == high else ""
        body.append(f'<text class="tick {anchor}" x="{x(place):.1f}" y="220">{format_seconds(place)}</text>')
    body.append(f'<circle class="star" cx="{x(found.interval):.1f}" cy="{y(found.effective):.1f}" r="6"/>')
    body.append('<text class="tick mid" x="299" y="236">training between two saves</text>')
    body.append('<text class="tick mid" transform="translate(4 108) rotate(-90)">time that trains</text>')
    svg = f'<svg viewBox="-10 0 570 240" role="img" aria-label="goodput">{"".join(body)}</svg>'
    note = f"Young's estimate of the best interval is {format_seconds(found.young)}."
    return figure("Share of the time that trains", [], note, svg)


# ---- bars of memory and time ----


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
    held = [memory_at(workload, rank) for rank in shown(workload.parallel.pp, most) if rank is not None]
    scale = max(max(each.total for each in held), prediction.memory.capacity) * 1.02
    by_rank = {each.pipeline_rank: each for each in held}
    for rank in shown(workload.parallel.pp, most):
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
