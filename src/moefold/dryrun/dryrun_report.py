"""A dry run in words: what a rank holds at most, when, for whom, and everything it sends."""

from __future__ import annotations

from typing import Any

from moefold.dryrun.dry_run import DryRun
from moefold.tables import text_table
from moefold.units import format_bytes, format_seconds


def report(found: DryRun) -> str:
    return "\n".join(
        [
            f"rank {found.rank} of {found.world:,}: {format_bytes(found.peak_total)} at most, during the "
            f"{found.peak_when}",
            "",
            _memory(found),
            "",
            _microbatches(found),
            "",
            _collectives(found),
            "",
            *_notes(found),
        ]
    )


def _memory(found: DryRun) -> str:
    rows = [
        (name, format_bytes(size), f"{size / found.peak_total:.1%}", format_bytes(found.most[name]))
        for name, size in found.peak.items()
    ]
    return text_table(("memory", "at the peak", "share", "its own most"), rows)


def _microbatches(found: DryRun) -> str:
    """By stage: what one microbatch leaves between forward and backward, and how many were under way at the peak."""
    rows = []
    for stage, saved in found.saved_per_microbatch.items():
        # Whoever holds less than half has had its backward, or waits with its input for its forward.
        held = [microbatch for (of, microbatch), size in found.held_at_peak.items() if of == stage and 2 * size > saved]
        rows.append((stage, format_bytes(saved), len(held), ", ".join(map(str, held)) or "none"))
    return text_table(("stage", "one microbatch saves", "under way at the peak", "which"), rows)


def _collectives(found: DryRun) -> str:
    rows = [(each.name, each.group, f"{each.count:,}", format_bytes(each.bytes)) for each in found.collectives]
    return text_table(("collective", "group", "calls", "bytes handed in"), rows)


def _notes(found: DryRun) -> list[str]:
    if found.executed < found.microbatches:
        carried_out = (
            f"{found.executed} of {found.microbatches} microbatches were carried out: their actions meet every state "
            "that the whole step's meet; collectives are counted for the whole step"
        )
    else:
        carried_out = f"all {found.microbatches} microbatches were carried out"
    even = "every expert gets the same number of rows"
    load = even if found.imbalance == 1 else f"this rank's experts get {found.imbalance:g} times the average of rows"
    return [f"{carried_out}; {load}", f"took {format_seconds(found.seconds)}"]


def as_data(found: DryRun) -> dict[str, Any]:
    return {
        "world": found.world,
        "rank": found.rank,
        "microbatches": found.microbatches,
        "executed": found.executed,
        "imbalance": found.imbalance,
        "peak": found.peak,
        "peak_total": found.peak_total,
        "peak_when": found.peak_when,
        "most": found.most,
        "saved_per_microbatch": [{"stage": stage, "bytes": size} for stage, size in found.saved_per_microbatch.items()],
        "held_at_peak": [
            {"stage": stage, "microbatch": microbatch, "bytes": size}
            for (stage, microbatch), size in found.held_at_peak.items()
        ],
        "collectives": [each._asdict() for each in found.collectives],
        "seconds": found.seconds,
    }
