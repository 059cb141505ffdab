"""The HTML page: the best layout and why, memory, time, the order, the others, what if, goodput, and the command."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from moefold.checks.kernels import kernels_in_use
from moefold.html.document import CSS as COMMON
from moefold.html.document import card, document
from moefold.plan.framework_commands import framework_command
from moefold.plan.launch_command import folded
from moefold.plan.link_bytes import link_bytes
from moefold.plan.prediction import Prediction
from moefold.plan.report.pictures import goodput_figure, memory_section, pareto_figure, time_section, timeline_figure
from moefold.plan.report.proposal_report import LINKS, RECEIVED, alike_note, alike_of, cost_words, proposal_data
from moefold.plan.search.batch_ramp import ramp_words
from moefold.plan.search.candidates import choice_of_workload, described
from moefold.plan.search.explain import layout_words, seconds
from moefold.plan.search.proposal import Proposal
from moefold.plan.search.what_if import Answer
from moefold.plan.timing.step_timeline import step_timeline
from moefold.units import format_bytes, format_count, format_seconds

_MOST_PARETO = 12


def page(proposal: Proposal, form: str = "", script: str = "") -> str:
    """One self-contained document. ``form`` is what the served page puts on top to ask again."""
    question = proposal.question
    sections = [
        _header(proposal),
        form,
        _cards(proposal),
        _why(proposal),
        memory_section(proposal.chosen),
        _freed(proposal),
        time_section(proposal.chosen),
        f'<div class="charts" style="margin-top:14px">{timeline_figure(step_timeline(proposal.chosen.workload))}</div>',
        _links(proposal),
        _others(proposal),
        _what_if(proposal),
        _goodput(proposal),
        _small_print(proposal),
    ]
    title = f"{question.name} on {question.cluster.num_gpus:,} {question.cluster.gpu.name}"
    return document(title, sections, CSS, script, {"plan.json": proposal_data(proposal)})


def _header(proposal: Proposal) -> str:
    question, chosen = proposal.question, proposal.chosen
    cluster = question.cluster
    tone, fits = ("good", "fits") if chosen.memory.fits else ("bad", "does not fit")
    words = (
        f"domain of {cluster.domain}, {cluster.nic_gb_s:g} GB/s network per GPU, {question.framework}; "
        f"global batch {question.run.data.global_batch:,} of {question.run.data.seq_len:,} tokens"
    )
    return (
        f"<h1>{escape(question.name)} on {cluster.num_gpus:,} {escape(cluster.gpu.name)}"
        f'<span class="badge {tone}">{fits}</span><span class="badge open">{chosen.wall} binds</span></h1>'
        f'<p class="sub">{escape(words)}</p>'
    )


def _cards(proposal: Proposal) -> str:
    chosen, time, memory = proposal.chosen, proposal.chosen.time, proposal.chosen.memory
    question = proposal.question
    mfu = chosen.mfu_words if chosen.mfu else ""
    rate = chosen.tokens_per_second_per_gpu
    cards = [
        card(seconds(time.step_seconds), "per step", f"80 %: {seconds(time.low)} to {seconds(time.high)}"),
        card(f"{rate:,.0f}", "tokens/s per GPU", f"{format_count(rate * question.cluster.num_gpus)} in all"),
        card(f"{chosen.tflops_per_gpu:,.0f}", "TFLOP/s per GPU", mfu) if chosen.tflops_per_gpu else "",
        card(format_bytes(memory.total), "memory", f"{memory.total / memory.capacity:.0%} of the GPU"),
        card(
            f"{proposal.days:,.1f} days",
            f"for {format_count(question.tokens)} tokens",
            f"{proposal.goodput.effective:.1%} of the time trains",
        ),
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


def _why(proposal: Proposal) -> str:
    chosen = described(choice_of_workload(proposal.chosen.workload))
    paragraphs = [f"<p><b>{escape(chosen)}</b></p>"]
    paragraphs += [f"<p>{escape(words)}</p>" for words in (layout_words(proposal.chosen.workload), *proposal.reasons)]
    if proposal.own_problem:
        paragraphs.append(f'<p class="warn">Your own layout cannot be: {escape(proposal.own_problem)}</p>')
    if proposal.beyond:
        words = f"moefold does not have yet: {'; '.join(proposal.beyond)}."
        words += " The nearest run that it can start:" if proposal.command else ""
    else:
        words = "To start it, on every node:"
    theirs = framework_command(proposal.chosen.workload)
    if theirs:
        paragraphs.append(f"<p>{escape(theirs.introduction)}</p>")
        paragraphs.append(f'<pre class="command">{escape(folded(theirs.words, 110))}</pre>')
    command = f'<p>{escape(words)}</p><pre class="command">{escape(folded(proposal.command, 110))}</pre>'
    return f'<h2>Why this layout</h2><div class="panel why">{"".join(paragraphs)}{command}</div>'


def _freed(proposal: Proposal) -> str:
    rows = [
        f"<tr><td class=text>{escape(each.name)}</td><td>{format_bytes(each.bytes)}</td>"
        f"<td>{each.slower:+.1%}</td></tr>"
        for each in proposal.freed
    ]
    if not rows:
        return ""
    table = _table(("what would free memory ", "frees", "step"), rows)
    return f'<details class="below"><summary>what would free memory, and what it costs</summary>{table}</details>'


def _table(head: Iterable[str], rows: Iterable[str], kind: str = "") -> str:
    """Headings that end in a blank stand over text."""
    cells = "".join(f"<th{' class=text' if name.endswith(' ') else ''}>{name.strip()}</th>" for name in head)
    of_kind = f' class="{kind}"' if kind else ""
    return f'<div class="panel scroll"><table{of_kind}><tr>{cells}</tr>{"".join(rows)}</table></div>'


def _links(proposal: Proposal) -> str:
    rows = [
        f"<tr><td class=text>{name}</td><td>{format_bytes(inside)}</td><td>{format_bytes(outside)}</td></tr>"
        for name, inside, outside in link_bytes(proposal.chosen.workload)
    ]
    return f"<h2>Links</h2>{_table((RECEIVED + ' ', *LINKS), rows)}" if rows else ""


def _others(proposal: Proposal) -> str:
    result = proposal.result
    if result is None:
        return ""
    front = result.pareto
    if len(front) > _MOST_PARETO:
        front = tuple(front[round(i * (len(front) - 1) / (_MOST_PARETO - 1))] for i in range(_MOST_PARETO))
    alike = alike_of(proposal)
    rows = [
        f"<tr><td>{seconds(each.seconds)}</td><td>{each.seconds / result.best.seconds - 1:+.1%}</td>"
        f"<td>{format_bytes(each.bytes)}</td><td class=text>{escape(alike_note(proposal, each, alike))}</td>"
        f'<td class="text">{escape(described(each.choice))}</td></tr>'
        for each in front
    ]
    table = _table(("step", "slower by", "memory", "note ", "layout "), rows)
    searched = (
        f"Searched {result.num_layouts:,} grids with {result.num_memory:,} predictions of memory and "
        f"{result.num_time:,} of time in {result.wall_seconds:.1f} s."
    )
    return (
        "<h2>The others</h2>"
        f'<div class="charts others">{pareto_figure(proposal)}<div>{_compared(proposal)}'
        f'<p class="note">{escape(searched)}</p></div></div>'
        f"<h2>Nobody is both faster and leaner</h2>{table}"
    )


def _compared(proposal: Proposal) -> str:
    named = [("chosen", proposal.chosen), ("fastest", proposal.fastest), ("runner-up", proposal.runner_up)]
    if proposal.own is not None and proposal.own.workload != proposal.chosen.workload:
        named.append(("your own", proposal.own))
    found = [(name, each) for name, each in named if each is not None]
    head = ("", *(name for name, _ in found))
    lines = [(label, [cell(each) for _, each in found]) for label, cell in _LINES]
    return _table(head, [_row(label, cells) for label, cells in lines if any(cells)], "sides")


def _row(label: str, cells: list[str]) -> str:
    return f"<tr><td class=text>{escape(label)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


_LINES: tuple[tuple[str, Callable[[Prediction], str]], ...] = (
    ("step", lambda p: seconds(p.time.step_seconds)),
    ("80 % interval", lambda p: f"{seconds(p.time.low)} to {seconds(p.time.high)}"),
    ("tokens/s per GPU", lambda p: f"{p.tokens_per_second_per_gpu:,.0f}"),
    ("memory", lambda p: format_bytes(p.memory.total)),
    ("of the GPU", lambda p: f"{p.memory.total / p.memory.capacity:.0%}"),
    ("wall", lambda p: p.wall),
    (
        "tp x cp x pp x vpp",
        lambda p: " x ".join(str(getattr(p.workload.parallel, axis)) for axis in ("tp", "cp", "pp", "vpp")),
    ),
    ("ep x etp, dp", lambda p: f"{p.workload.parallel.ep} x {p.workload.parallel.etp}, {p.workload.dp}"),
    ("microbatches", lambda p: f"{p.workload.microbatches} of {p.workload.run.data.micro_batch}"),
    ("order", lambda p: p.workload.parallel.schedule),
    ("dispatcher", lambda p: p.workload.dispatcher),
    ("format", lambda p: p.workload.format),
    ("recomputed", lambda p: ", ".join(sorted(p.workload.recompute)) or "nothing"),
    ("graphs", lambda p: p.workload.run.kernels.graphs),
    ("kernels", lambda p: ", ".join(kernels_in_use(p.workload.run, "cuda").values()) if p.workload.is_own else ""),
)


def _what_if(proposal: Proposal) -> str:
    ordered = sorted(proposal.answers, key=lambda each: -each.faster(proposal.chosen))
    rows = [_answer(each, proposal.chosen) for each in ordered if each.prediction]
    forbidden = [f"{each.question} ({each.reason})" for each in ordered if not each.prediction]
    note = f'<p class="note">Not legal: {escape("; ".join(forbidden))}.</p>' if forbidden else ""
    head = ("what if ", "step", "faster", "memory", "wall", " ")
    return f"<h2>What if</h2>{_table(head, rows)}{note}"


def _answer(each: Answer, chosen: Prediction) -> str:
    found = each.prediction
    assert found is not None
    faster = each.faster(chosen)
    tone = "better" if faster > 0.005 else "worse" if faster < -0.005 else ""
    note = "" if found.memory.fits else "does not fit"
    return (
        f"<tr><td class=text>{escape(each.question)}</td><td>{seconds(found.time.step_seconds)}</td>"
        f'<td class="{tone}">{faster:+.1%}</td><td>{format_bytes(found.memory.total)}</td><td>{found.wall}</td>'
        f'<td class="warn">{note}</td></tr>'
    )


def _goodput(proposal: Proposal) -> str:
    found, faults, question = proposal.goodput, proposal.faults, proposal.question
    parts = (
        ("training", found.effective, 3),
        ("saving", found.lost_to_saves, 1),
        ("restarting", found.lost_to_restarts, 4),
        ("repeating lost work", found.lost_to_repeats, 2),
    )
    bar = "".join(f'<i class="c{color}" style="flex:{share:.5f} 1 0"></i>' for _, share, color in parts)
    keys = "".join(
        f'<span class="key"><i class="c{color}"></i>{name} {share:.2%}</span>' for name, share, color in parts
    )
    save, write, restart = (format_seconds(each) for each in (faults.save, faults.write, faults.restart))
    words = (
        f"At one failure per {question.mtbf_hours:,.0f} GPU hours this run fails {found.failures_per_day:.2g} times a "
        f"day. A save stops training for {save} and is whole on disk {write} later; a restart takes {restart}. Saving "
        f"every {format_seconds(found.interval)} of training is best. {format_count(question.tokens)} tokens take "
        f"{proposal.days:,.1f} days.{cost_words(proposal)} {ramp_words(proposal.phases)}"
    )
    return (
        f'<h2>Goodput under failures</h2><div class="charts"><div class="panel"><div class="bar">{bar}</div>'
        f'<div class="keys">{keys}</div><p>{escape(words)}</p></div>{goodput_figure(proposal)}</div>'
    )


def _small_print(proposal: Proposal) -> str:
    notes = [
        "Step times are predictions by a model of the framework, the GPU and the links; the interval holds about 80 % "
        "of published runs of this kind. The order in time is drawn from the same stage times.",
        f"Rows of the busiest rank over the mean: {proposal.question.imbalance:g}.",
        "Memory counts what the allocator and the runtime take on top of tensors.",
        *proposal.chosen.notes,
    ]
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<h2>Small print</h2><div class="panel"><ul>{items}</ul></div>'


CSS = (
    COMMON
    + """
.badge{white-space:nowrap}.cards{grid-template-columns:repeat(auto-fit,minmax(150px,1fr))}
h1 .badge{margin-left:8px}
.why p{margin:0 0 10px;overflow-wrap:anywhere}.why p:last-child{margin:0}.why{max-width:none;line-height:1.6}
.bar i.hidden{background:repeating-linear-gradient(45deg,var(--c) 0 3px,transparent 3px 7px);opacity:.75}
.point{fill:var(--c5);opacity:.45}.front{fill:none;stroke:var(--c1);stroke-width:1.6}
.star{fill:var(--c2);stroke:var(--card);stroke-width:1.5}
.second{fill:var(--c4);stroke:var(--card);stroke-width:1.5}.mine{fill:var(--c3);stroke:var(--card);stroke-width:1.5}
.onfront{fill:var(--c1);stroke:var(--card);stroke-width:1}
.limit{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:5 4}.label{fill:var(--ink);font-size:11.5px}
pre.command{white-space:pre;overflow-x:auto;background:var(--page);border:1px solid var(--line);
border-radius:8px;padding:12px 14px;margin:10px 0 0}
td.better{color:var(--good)}td.worse{color:var(--bad)}
td{white-space:nowrap}td.text,th.text{text-align:left}td.text{white-space:normal;min-width:120px}
.panel.scroll,.panel .scroll{max-height:none;overflow-x:auto}
details.below .panel{margin-top:10px}
form.ask{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px 14px;margin:0 0 22px}
form.ask label{font-size:12.5px;color:var(--soft);display:flex;flex-direction:column;gap:3px}
form.ask input,form.ask select,form.ask button{font:inherit;color:var(--ink);background:var(--card);padding:6px 8px;
border:1px solid var(--line);border-radius:7px;width:100%;min-width:0}
form.ask button{background:var(--c1);color:#fff;border:0;font-weight:600;cursor:pointer;align-self:end}
form.ask output{color:var(--ink);font-weight:600}form.ask input[type=range]{padding:0;accent-color:var(--c1)}
.asking{opacity:.45;transition:opacity .2s}
@media (max-width:1150px){.charts.others{grid-template-columns:minmax(0,1fr)}.others svg{max-width:640px;margin:0 auto}}
"""
)
