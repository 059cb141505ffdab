"""Verdicts as tables for people and as plain data for programs."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from moefold.prove.coverage import coverage
from moefold.prove.diagnosis import meaning_of
from moefold.prove.kept_cases import case_line
from moefold.prove.mutants import Mutant, caught
from moefold.prove.verdict import Verdict
from moefold.tables import text_table


def case_report(verdict: Verdict, most_rows: int = 12) -> str:
    """Worst first; what holds needs no explanation, what does not says where to look."""
    if verdict.failure is not None:
        return f"{verdict.case.title}\nDOES NOT RUN: {verdict.failure}"
    rows = [
        (
            row.quantity,
            f"{row.error:.1e}",
            f"{row.tolerance:.1e}",
            "holds" if row.holds else "FAILS",
            "" if row.holds else _explain(row.quantity, row.uncovered),
        )
        for row in verdict.rows[:most_rows]
    ]
    table = text_table(("quantity", "relative error", "allowed", "", "usually means"), rows)
    left = len(verdict.rows) - len(rows)
    more = f"\n... and {left} quantities with smaller errors" if left > 0 else ""
    failed = sum(not row.holds for row in verdict.rows)
    summary = f"{len(verdict.rows)} quantities compared, largest relative error {verdict.worst:.1e}: " + (
        "the layout computes what one process computes" if verdict.holds else f"{failed} FAIL"
    )
    return f"{verdict.case.title}\n\n{table}{more}\n\n{summary}"


def drawn_case_report(verdict: Verdict, max_world: int) -> str:
    """Of a drawn case that fails, also the command that repeats it, and the line that keeps it."""
    run = verdict.case.run
    dtype = "" if run.precision.compute == "float64" else f" --dtype {run.precision.compute}"
    repeat = f"moefold prove --case {run.seed} --max-world {max_world}{dtype}"
    line = case_line(verdict.case, verdict.culprit)
    return (
        f"{case_report(verdict)}\n\nRepeat it:  {repeat}\n"
        f"Keep it:    one more line of tests/ranks/failed_cases.jsonl, with what it found\n{line}"
    )


def _explain(quantity: str, uncovered: int) -> str:
    if uncovered:
        return f"{abs(uncovered)} elements held by {'no rank' if uncovered > 0 else 'several ranks at once'}"
    return meaning_of(quantity)


def coverage_report(verdicts: Sequence[Verdict]) -> str:
    rows: list[tuple[str, str]] = []
    for group, counts in coverage(verdicts).items():
        cells = ", ".join(f"{feature}: {count}" for feature, count in sorted(counts.items()))
        first, *others = wrap(cells, 96)
        rows += [(group, first), *(("", line) for line in others)]
    return text_table(("covered", "cases"), rows)


def cases_summary(verdicts: Sequence[Verdict], seconds: float) -> str:
    held = sum(verdict.holds for verdict in verdicts)
    worst = max((verdict.worst for verdict in verdicts if verdict.failure is None), default=float("nan"))
    return f"{held} of {len(verdicts)} cases hold; largest relative error {worst:.1e}; {seconds:.0f} s"


def mutants_report(results: Sequence[tuple[Mutant, Verdict]]) -> str:
    rows = [(mutant.name, mutant.case, _outcome(verdict), verdict.culprit, mutant.story) for mutant, verdict in results]
    found = sum(caught(verdict) for _, verdict in results)
    table = text_table(("seeded fault", "case", "", "first seen at", "how it comes about"), rows)
    return f"{table}\n\n{found} of {len(results)} seeded faults caught"


def _outcome(verdict: Verdict) -> str:
    if verdict.failure is not None:
        return "DOES NOT RUN"
    return "caught" if caught(verdict) else "NOT CAUGHT"


def as_data(verdict: Verdict) -> dict[str, Any]:
    return {
        "case": verdict.case.title,
        "world": verdict.case.world,
        "holds": verdict.holds,
        "worst": verdict.worst if verdict.failure is None else None,
        "failure": verdict.failure,
        "rows": [
            {"quantity": row.quantity, "error": row.error, "allowed": row.tolerance, "holds": row.holds}
            for row in verdict.rows
        ],
    }
