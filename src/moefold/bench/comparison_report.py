"""A contest, for the reader and for programs: one table per routing, who failed and why, and the verdicts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from moefold.bench.results import CLOCKS, Contest, Spread, Standing
from moefold.bench.targets import BEST_PEER, Verdict
from moefold.tables import text_table
from moefold.units import format_bytes, format_seconds


def contest_text(contest: Contest, bases: Sequence[str], found: Sequence[Verdict]) -> str:
    """``bases``: what times are compared with, beside the best peer."""
    pieces = [contest.title, how_measured(contest)]
    for routing in contest.routings:
        heading = f"{routing} routing\n" if routing else ""
        pieces.append(heading + _table(contest, bases, routing))
    failed = [(each.name, each.failure) for each in contest.standings if each.failure]
    if failed:
        pieces.append(text_table(("did not take part", "why"), failed))
    remarks = [(each.name, each.remark) for each in contest.standings if each.remark]
    if remarks:
        pieces.append(text_table(("contestant", "remark"), remarks))
    if found:
        pieces.append("\n".join(verdict.words for verdict in found))
    return "\n\n".join(pieces)


def how_measured(contest: Contest) -> str:
    words = f"times are {CLOCKS[contest.clock]}, medians of {contest.rounds} rounds; '-/+' is the middle half of them"
    if contest.others is None:
        return words
    return f"{words}; other programs kept {contest.others:.1f} of {os.cpu_count()} cores busy meanwhile"


def contest_json(contest: Contest, bases: Sequence[str], found: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "title": contest.title,
        "clock": contest.clock,
        "rounds": contest.rounds,
        "cores_of_others": contest.others,
        "contestants": [_standing_json(contest, bases, each) for each in contest.standings],
        "verdicts": [
            {"words": each.words, "routing": each.routing, "found": each.found, "reached": each.reached}
            | asdict(each.goal)
            for each in found
        ],
    }


def compared_with(contest: Contest, bases: Sequence[str], routing: str) -> Iterator[tuple[str, str]]:
    """(heading, contestant) of every column of ratios that can be filled."""
    yield from ((base, base) for base in bases if contest.times(base, routing))
    best = contest.best_peer(routing)
    if best is not None:
        yield BEST_PEER, best


def _table(contest: Contest, bases: Sequence[str], routing: str) -> str:
    columns = list(compared_with(contest, bases, routing))
    memory = any(each.saved is not None or each.peak is not None for each in contest.standings)
    errors = any(each.error is not None for each in contest.standings)
    head = ["contestant", "time", "-/+", _other(contest), *(f"x {heading}" for heading, _ in columns)]
    head += ["saved", "peak", "held", "faults"] if memory else []
    head += ["rel. error"] if errors else []
    rows = []
    for each in contest.standings:
        if not each.finished(routing):
            continue
        row = _times(contest, each.name, routing)
        row += [ratio_text(contest.ratio(each.name, base, routing)) for _, base in columns]
        row += [*_memory(each), f"{contest.faults(each.name, routing):,}"] if memory else []
        row += [_error(contest, each)] if errors else []
        rows.append(row)
    return text_table(head, rows)


def _times(contest: Contest, name: str, routing: str) -> list[str]:
    time, other = contest.time(name, routing), contest.time(name, routing, _other(contest))
    assert time is not None and other is not None
    return [name, format_seconds(time.median), f"{100 * time.relative:.0f} %", format_seconds(other.median)]


def _other(contest: Contest) -> str:
    """The clock that does not count here."""
    return "wall" if contest.clock == "cpu" else "cpu"


def ratio_text(ratio: Spread | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _memory(standing: Standing) -> list[str]:
    """Saved for backward, the rise during a run, and what stays between runs: plans, caches, buffers."""
    held = None if standing.held is None else max(0, standing.held)
    return ["-" if count is None else format_bytes(count) for count in (standing.saved, standing.peak, held)]


def _error(contest: Contest, standing: Standing) -> str:
    if standing.error is None:
        return "-"
    return f"{standing.error:.1e}" + (" too large" if standing.error > contest.tolerance else "")


def _standing_json(contest: Contest, bases: Sequence[str], standing: Standing) -> dict[str, Any]:
    routings = {}
    for routing in contest.routings:
        time = contest.time(standing.name, routing)
        if time is None:
            continue
        ratios = {
            heading: contest.ratio(standing.name, base, routing)
            for heading, base in compared_with(contest, bases, routing)
        }
        routings[routing] = {
            "seconds": asdict(time),
            "ratios": {heading: asdict(ratio) for heading, ratio in ratios.items() if ratio is not None},
            "faults": contest.faults(standing.name, routing),
            "runs": [asdict(run) for run in standing.runs[routing]],
        }
    return {
        "name": standing.name,
        "role": standing.entrant.role,
        "allocator": standing.allocator,
        "saved_bytes": standing.saved,
        "peak_bytes": standing.peak,
        "held_bytes": standing.held,
        "relative_error": standing.error,
        "failure": standing.failure,
        "remark": standing.remark,
        "routings": routings,
    }
