"""A proposal on a terminal, about one screen, and as plain data for `--json`.

The screen has the best layout, its memory and time by cause, the others, and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moefold.checks.kernels import kernels_in_use
from moefold.plan.framework_commands import framework_command
from moefold.plan.launch_command import folded
from moefold.plan.link_bytes import LinkBytes, link_bytes
from moefold.plan.memory.saving_steps import savings_of
from moefold.plan.prediction import Prediction
from moefold.plan.search.batch_ramp import ramp_words
from moefold.plan.search.candidates import choice_of_workload, described
from moefold.plan.search.cheapest_savings import Candidate
from moefold.plan.search.explain import seconds, sweep_spread
from moefold.plan.search.proposal import Proposal
from moefold.plan.search.what_if import Answer
from moefold.plan.timing.anchoring import NEARNESS, Anchored
from moefold.plan.workload import Workload
from moefold.units import format_bytes, format_count, format_seconds

_BAR, _COMMAND = 28, 96
_COLOURS = {"compute": "blue", "communication": "dark_orange", "host": "yellow", "bubble": "bright_black"}
_MOST_PARETO, _MOST_ANSWERS = 6, 8
RECEIVED, LINKS = "a GPU receives in one step", ("over fast links", "over the network")


def terminal_report(proposal: Proposal) -> RenderableType:
    return Group(*_parts(proposal))


def _parts(proposal: Proposal) -> Iterator[RenderableType]:
    yield _headline(proposal)
    yield _choice_table(proposal)
    yield _bars(proposal.chosen)
    if links := link_bytes(proposal.chosen.workload):
        yield _links(links)
    if proposal.result and len(proposal.result.pareto) > 1:
        yield _pareto(proposal)
    yield _what_if(proposal)
    for reason in proposal.reasons:
        yield Padding(Text(reason), (0, 0, 0, 1))
    yield Text()
    yield Padding(Text(_goodput_words(proposal)), (0, 0, 0, 1))
    if words := ramp_words(proposal.phases):
        yield Padding(Text(words), (0, 0, 0, 1))
    yield from _command(proposal)


def _headline(proposal: Proposal) -> Text:
    question, chosen = proposal.question, proposal.chosen
    cluster = question.cluster
    text = Text()
    text.append(f"{question.name} on {cluster.num_gpus:,} {cluster.gpu.name}", style="bold")
    text.append(f"  domain {cluster.domain}, {cluster.nic_gb_s:g} GB/s network, {question.framework}\n")
    text.append(
        described(choice_of_workload(chosen.workload)) + "\n", style="bold green" if chosen.memory.fits else "bold red"
    )
    time = chosen.time
    text.append(
        f"{seconds(time.step_seconds)} per step (80 % interval {seconds(time.low)} to "
        f"{seconds(time.high)}), {chosen.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
    )
    if chosen.mfu:
        text.append(f", {chosen.tflops_per_gpu:,.0f} TFLOP/s, {chosen.mfu_words}")
    if chosen.workload.is_own:
        used = kernels_in_use(chosen.workload.run, "cuda")
        text.append("\nkernels: " + ", ".join(f"{key} {name}" for key, name in used.items()))
    return text


def _table(*columns: str, **options: Any) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, **options)
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "layout", "if", "note") else "right", overflow="fold")
    return table


def _choice_table(proposal: Proposal) -> Table:
    table = _table("", "step", "tokens/s/GPU", "memory", "of GPU", "wall", "layout")
    rows = [("chosen", proposal.chosen), ("runner-up", proposal.runner_up), ("your own", proposal.own)]
    rows[1:1] = [("fastest", proposal.fastest), ("no headroom", proposal.tighter)]
    for name, found in rows:
        if found is None or (name == "your own" and found.workload == proposal.chosen.workload):
            continue
        table.add_row(
            name,
            seconds(found.time.step_seconds),
            f"{found.tokens_per_second_per_gpu:,.0f}",
            format_bytes(found.memory.total),
            _share(found),
            found.wall,
            described(choice_of_workload(found.workload)),
        )
    if proposal.own_problem:
        table.add_row("your own", "", "", "", "", "", Text(proposal.own_problem, style="red"))
    return table


def _share(found: Prediction) -> Text:
    share = found.memory.total / found.memory.capacity
    return Text(f"{share:.0%}", style="" if share <= 1 else "red")


def _bars(chosen: Prediction) -> Table:
    """Memory and exposed time side by side, the largest first."""
    both = Table.grid(padding=(0, 4))
    memory, time = chosen.memory, chosen.time
    left = _table("", "memory", "")
    for line in sorted(memory.lines, key=lambda line: -line.bytes)[:10]:
        bar = Text("█" * round(_BAR * line.bytes / memory.capacity), style="cyan")
        left.add_row(f"{line.group}: {line.name}", format_bytes(line.bytes), bar)
    left.add_row(f"total, pipeline rank {memory.pipeline_rank}", format_bytes(memory.total), "")
    right = _table("", "exposed", "hidden", "")
    for cause in sorted(time.lines, key=lambda cause: -(cause.seconds - cause.hidden))[:10]:
        bar = Text(
            "█" * round(_BAR * (cause.seconds - cause.hidden) / time.step_seconds),
            style=_COLOURS.get(cause.wall, "white"),
        )
        hidden = seconds(cause.hidden) if cause.hidden > 1e-4 else ""
        right.add_row(cause.name, seconds(cause.seconds - cause.hidden), hidden, bar)
    both.add_row(left, right)
    return both


def _links(links: tuple[LinkBytes, ...]) -> Table:
    table = _table("", *LINKS, title=RECEIVED, title_justify="left")
    for each in links:
        table.add_row(each.name, format_bytes(each.inside), format_bytes(each.outside))
    return table


def _pareto(proposal: Proposal) -> Table:
    result = proposal.result
    assert result is not None
    table = _table(
        *("step", "slower", "memory", "note", "layout"), title="nobody is both faster and leaner", title_justify="left"
    )
    alike = alike_of(proposal)
    shown = result.pareto if len(result.pareto) <= _MOST_PARETO else _spread(result.pareto, _MOST_PARETO)
    for each in shown:
        slower = each.seconds / result.best.seconds - 1
        note = alike_note(proposal, each, alike)
        table.add_row(seconds(each.seconds), f"{slower:.1%}", format_bytes(each.bytes), note, described(each.choice))
    return table


def alike_of(proposal: Proposal) -> tuple[Candidate, ...]:
    """Layouts that cannot be told from the fastest."""
    result = proposal.result
    return result.alike(sweep_spread(proposal.chosen.workload)) if result else ()


def alike_note(proposal: Proposal, each: Candidate, alike: tuple[Candidate, ...]) -> str:
    if each.workload == proposal.chosen.workload:
        return "chosen"
    return "within the error" if each in alike else ""


def _spread(items: tuple[Any, ...], count: int) -> list[Any]:
    """The first, the last, and evenly between."""
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _what_if(proposal: Proposal) -> Table:
    table = _table("if", "step", "faster", "memory", "note", title="what if", title_justify="left")
    ordered = [each for each in proposal.answers if each.prediction]
    ordered.sort(key=lambda each: -each.faster(proposal.chosen))
    for each in ordered[:_MOST_ANSWERS]:
        found = each.prediction
        assert found is not None
        note = "" if found.memory.fits else "does not fit"
        table.add_row(
            each.question,
            seconds(found.time.step_seconds),
            f"{each.faster(proposal.chosen):+.1%}",
            format_bytes(found.memory.total),
            note,
        )
    return table


def _goodput_words(proposal: Proposal) -> str:
    found, question = proposal.goodput, proposal.question
    return (
        f"Goodput: at one failure per {question.mtbf_hours:,.0f} GPU hours the run fails {found.failures_per_day:.2g} "
        f"times a day. Saving every {format_seconds(found.interval)} is best: {found.effective:.1%} of the time trains "
        f"(saves {found.lost_to_saves:.1%}, restarts {found.lost_to_restarts:.1%}, repeated work "
        f"{found.lost_to_repeats:.1%}). {format_count(question.tokens)} tokens take {proposal.days:,.1f} days."
        f"{cost_words(proposal)}"
    )


def cost_words(proposal: Proposal) -> str:
    """What the days cost, where the cluster says what an hour of a GPU does."""
    cluster, cost = proposal.question.cluster, proposal.cost
    if cost is None:
        return ""
    return (
        f" On {cluster.num_gpus:,} GPUs at {cluster.cost_per_gpu_hour:g} per hour that costs {cost:,.0f}; at "
        f"{cluster.gpu.watts:g} W each the GPUs take at most {proposal.megawatt_hours:,.0f} MWh."
    )


def _command(proposal: Proposal) -> Iterator[RenderableType]:
    yield Text()
    theirs = framework_command(proposal.chosen.workload)
    if theirs:
        yield Padding(Text(theirs.introduction), (0, 0, 0, 1))
        yield Padding(Text(folded(theirs.words, _COMMAND), style="bold"), (0, 0, 1, 1))
    if proposal.beyond:
        words = f"moefold does not have yet: {'; '.join(proposal.beyond)}."
        words += " The nearest run that it can start:" if proposal.command else ""
        yield Padding(Text(words, style="yellow"), (0, 0, 0, 1))
    yield Padding(Text(folded(proposal.command, _COMMAND), style="bold"), (0, 0, 0, 1))


def proposal_data(proposal: Proposal) -> dict[str, Any]:
    question, result = proposal.question, proposal.result
    return {
        "run": question.name,
        "gpu": question.cluster.gpu.name,
        "gpus": question.cluster.num_gpus,
        "domain": question.cluster.domain,
        "nic_gb_s": question.cluster.nic_gb_s,
        "framework": question.framework,
        "chosen": prediction_data(proposal.chosen),
        "runner_up": prediction_data(proposal.runner_up) if proposal.runner_up else None,
        "own": prediction_data(proposal.own) if proposal.own else None,
        "own_problem": proposal.own_problem,
        "anchor": anchor_data(proposal.anchored) if proposal.anchored else None,
        "fastest": prediction_data(proposal.fastest) if proposal.fastest else None,
        "without_headroom": prediction_data(proposal.tighter) if proposal.tighter else None,
        "headroom": result.headroom if result else None,
        "batch_advice": asdict(proposal.batch) | {"gain": proposal.batch.gain} if proposal.batch else None,
        "why": list(proposal.reasons),
        "what_if": [_answer_data(answer, proposal.chosen) for answer in proposal.answers],
        "switched_on": [asdict(each) | {"entries": sorted(each.entries)} for each in proposal.switched_on],
        "would_free": [asdict(each) for each in proposal.freed],
        "pareto": [_candidate_data(each) for each in result.pareto] if result else [],
        "alike": [_candidate_data(each) for each in alike_of(proposal)],
        "searched": {
            "layouts": result.num_layouts,
            "memory_predictions": result.num_memory,
            "time_predictions": result.num_time,
            "seconds": result.wall_seconds,
        }
        if result
        else None,
        "goodput": asdict(proposal.goodput) | {"tokens": question.tokens, "days": proposal.days},
        "batch_ramp": [asdict(phase) for phase in proposal.phases],
        "cost": proposal.cost,
        "megawatt_hours": proposal.megawatt_hours,
        "command": " ".join(proposal.command),
        "framework_command": _framework_command_data(proposal),
        "beyond_moefold": list(proposal.beyond),
    }


def _framework_command_data(proposal: Proposal) -> dict[str, Any] | None:
    theirs = framework_command(proposal.chosen.workload)
    return {"command": " ".join(theirs.words), "left_out": list(theirs.left_out)} if theirs else None


def anchor_data(found: Anchored) -> dict[str, Any]:
    """The measured run, how near it is, and what it makes of predictions; intervals are factors of predicted steps."""
    return {
        "name": found.anchor.name,
        "owner": found.anchor.owner,
        "measured_seconds": found.anchor.seconds,
        "predicted_seconds": found.predicted,
        "layout": layout_data(found.anchor.workload),
        "in_common": NEARNESS[found.nearness],
        "weight": found.weight,
        "factor": found.rescaling.factor,
        "interval_before": list(found.before),
        "interval": [found.rescaling.low, found.rescaling.high],
    }


def prediction_data(prediction: Prediction) -> dict[str, Any]:
    memory, time = prediction.memory, prediction.time
    return {
        "layout": layout_data(prediction.workload),
        "step_seconds": time.step_seconds,
        "interval": [time.low, time.high],
        "tokens_per_second_per_gpu": prediction.tokens_per_second_per_gpu,
        "tflops_per_gpu": prediction.tflops_per_gpu,
        "mfu": prediction.mfu,
        "mfu_peak": {"bits": prediction.units[0], "tflops": prediction.units[1]},
        "wall": prediction.wall,
        "time": [
            {"wall": line.wall, "name": line.name, "seconds": line.seconds, "hidden": line.hidden, "why": line.why}
            for line in time.lines
        ],
        "links": [
            {"name": each.name, "fast_links_bytes": each.inside, "network_bytes": each.outside}
            for each in link_bytes(prediction.workload)
        ],
        "memory_bytes": memory.total,
        "capacity_bytes": memory.capacity,
        "fits": memory.fits,
        "fullest_pipeline_rank": memory.pipeline_rank,
        "memory_by_rank": list(memory.by_rank),
        "memory": [
            {"group": line.group, "name": line.name, "bytes": line.bytes, "why": line.why} for line in memory.lines
        ],
        "notes": list(prediction.notes),
    }


def layout_data(workload: Workload) -> dict[str, Any]:
    parallel = workload.parallel
    return {axis: getattr(parallel, axis) for axis in ("tp", "cp", "pp", "vpp", "ep", "etp")} | {
        "dp": workload.dp,
        "schedule": parallel.schedule,
        "stages": parallel.stages,
        "sharding": parallel.sharding,
        "replicate": parallel.dp_replicate,
        "edp": workload.edp,
        "rank_order": asdict(parallel.rank_order),
        "micro_batch": workload.run.data.micro_batch,
        "microbatches": workload.microbatches,
        "global_batch": workload.run.data.micro_batch * workload.microbatches * workload.dp,
        "seq_len": workload.run.data.seq_len,
        "format": workload.format,
        "framework": workload.framework.name,
        "dispatcher": workload.dispatcher,
        "ep_overlap": workload.ep_overlap,
        "delay_wgrad": workload.delay_wgrad,
        "recompute": sorted(workload.recompute),
        "savings": sorted(savings_of(workload.run, workload.is_own)),
        "graphs": workload.run.kernels.graphs,
        "kernels": kernels_in_use(workload.run, "cuda") if workload.is_own else None,
    }


def _candidate_data(candidate: Candidate) -> dict[str, Any]:
    return {
        "choice": described(candidate.choice),
        "layout": layout_data(candidate.workload),
        "step_seconds": candidate.seconds,
        "memory_bytes": candidate.bytes,
    }


def _answer_data(answer: Answer, chosen: Prediction) -> dict[str, Any]:
    found = answer.prediction
    return {
        "if": answer.question,
        "about": answer.about,
        "step_seconds": found.time.step_seconds if found else None,
        "faster_by": answer.faster(chosen) if found else None,
        "memory_bytes": found.memory.total if found else None,
        "fits": found.memory.fits if found else None,
        "wall": found.wall if found else None,
        "not_legal": answer.reason,
    }
