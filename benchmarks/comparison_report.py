"""A comparison as text and as JSON: one table per routing, failures with their reasons, and verdicts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.results import CLOCKS, CandidateResult, Comparison, Spread
from benchmarks.targets import BEST_PEER, Verdict
from moefold.tables import text_table
from moefold.units import format_bytes, format_seconds


def comparison_text(comparison: Comparison, bases: Sequence[str], found: Sequence[Verdict]) -> str:
    """``bases``: candidates that times are divided by, in addition to the best peer."""
    sections = [comparison.title, how_measured(comparison)]
    for routing in comparison.routings:
        heading = f"{routing} routing\n" if routing else ""
        sections.append(heading + _table(comparison, bases, routing))
    failed = [(each.name, each.failure) for each in comparison.results if each.failure]
    if failed:
        sections.append(text_table(("not measured", "why"), failed))
    remarks = [(each.name, each.remark) for each in comparison.results if each.remark]
    if remarks:
        sections.append(text_table(("candidate", "remark"), remarks))
    if found:
        sections.append("\n".join(verdict.text for verdict in found))
    return "\n\n".join(sections)


def how_measured(comparison: Comparison) -> str:
    text = f"{CLOCKS[comparison.clock]}, medians of {comparison.rounds} rounds; '-/+' is their interquartile range"
    if comparison.busy_cores_of_others is None:
        return text
    busy = f"{comparison.busy_cores_of_others:.1f} of {os.cpu_count()} cores"
    return f"{text}; other processes kept {busy} busy meanwhile"


def comparison_json(comparison: Comparison, bases: Sequence[str], found: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "title": comparison.title,
        "clock": comparison.clock,
        "rounds": comparison.rounds,
        "busy_cores_of_others": comparison.busy_cores_of_others,
        "candidates": [_result_json(comparison, bases, each) for each in comparison.results],
        "verdicts": [
            {"text": each.text, "routing": each.routing, "found": each.found, "reached": each.reached}
            | asdict(each.target)
            for each in found
        ],
    }


def compared_with(comparison: Comparison, bases: Sequence[str], routing: str) -> Iterator[tuple[str, str]]:
    """(heading, candidate) of every column of ratios that was measured."""
    yield from ((base, base) for base in bases if comparison.times(base, routing))
    best = comparison.best_peer(routing)
    if best is not None:
        yield BEST_PEER, best


def _table(comparison: Comparison, bases: Sequence[str], routing: str) -> str:
    columns = list(compared_with(comparison, bases, routing))
    memory = any(each.saved is not None or each.peak is not None for each in comparison.results)
    errors = any(each.error is not None for each in comparison.results)
    head = ["candidate", "time", "-/+", _other_clock(comparison), *(f"x {heading}" for heading, _ in columns)]
    head += ["saved", "peak", "held", "faults"] if memory else []
    head += ["rel. error"] if errors else []
    rows = []
    for each in comparison.results:
        if not each.finished(routing):
            continue
        row = _times(comparison, each.name, routing)
        row += [ratio_text(comparison.ratio(each.name, base, routing)) for _, base in columns]
        row += [*_memory(each), f"{comparison.faults(each.name, routing):,}"] if memory else []
        row += [_error(comparison, each)] if errors else []
        rows.append(row)
    return text_table(head, rows)


def _times(comparison: Comparison, name: str, routing: str) -> list[str]:
    time, other = comparison.time(name, routing), comparison.time(name, routing, _other_clock(comparison))
    assert time is not None and other is not None
    return [name, format_seconds(time.median), f"{100 * time.relative:.0f} %", format_seconds(other.median)]


def _other_clock(comparison: Comparison) -> str:
    """The clock that ratios are not taken from."""
    return "wall" if comparison.clock == "cpu" else "cpu"


def ratio_text(ratio: Spread | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _memory(result: CandidateResult) -> list[str]:
    """Saved for backward, the increase during a run, and what stays between runs: GEMM plans, caches, buffers."""
    held = None if result.held is None else max(0, result.held)
    return ["-" if count is None else format_bytes(count) for count in (result.saved, result.peak, held)]


def _error(comparison: Comparison, result: CandidateResult) -> str:
    if result.error is None:
        return "-"
    return f"{result.error:.1e}" + (" too large" if result.error > comparison.tolerance else "")


def _result_json(comparison: Comparison, bases: Sequence[str], result: CandidateResult) -> dict[str, Any]:
    routings = {}
    for routing in comparison.routings:
        time = comparison.time(result.name, routing)
        if time is None:
            continue
        ratios = {
            heading: comparison.ratio(result.name, base, routing)
            for heading, base in compared_with(comparison, bases, routing)
        }
        routings[routing] = {
            "seconds": asdict(time),
            "ratios": {heading: asdict(ratio) for heading, ratio in ratios.items() if ratio is not None},
            "faults": comparison.faults(result.name, routing),
            "runs": [asdict(run) for run in result.runs[routing]],
        }
    return {
        "name": result.name,
        "role": result.spec.role,
        "allocator": result.allocator,
        "saved_bytes": result.saved,
        "peak_bytes": result.peak,
        "held_bytes": result.held,
        "relative_error": result.error,
        "failure": result.failure,
        "remark": result.remark,
        "routings": routings,
    }
