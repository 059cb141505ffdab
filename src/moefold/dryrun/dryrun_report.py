"""A dry run as text and as JSON: peak memory, when it occurs, its categories, and all collectives.

Dry runs of several ranks are one table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moefold.dryrun.dry_run import DryRun
from moefold.dryrun.storage_tracker import CATEGORIES
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


# One column per category, one row per rank.
STAGE_COLUMNS = ("rank", "GiB", *CATEGORIES)


def stage_row(rank: int, total: int, peak: Mapping[str, int]) -> tuple[str, ...]:
    """In GiB at the rank's peak."""
    return (f"{rank}", *(f"{size / 2**30:.1f}" for size in (total, *(peak[name] for name in CATEGORIES))))


def stages_report(found: Sequence[DryRun]) -> str:
    rows = [stage_row(each.rank, each.peak_total, each.peak) for each in found]
    title = f"one rank of every pipeline rank, of {found[0].world:,}: GiB at its peak, in all and by category"
    return "\n".join([title, "", text_table(STAGE_COLUMNS, rows), "", *_notes(found[0])[:1]])


def _memory(found: DryRun) -> str:
    rows = [
        (name, format_bytes(size), f"{size / found.peak_total:.1%}", format_bytes(found.category_peaks[name]))
        for name, size in found.peak.items()
    ]
    return text_table(("memory", "at the peak", "fraction", "own peak"), rows)


def _microbatches(found: DryRun) -> str:
    """By stage: what one microbatch saves for backward, and how many microbatches were in flight at the peak."""
    rows = []
    for stage, saved in found.saved_per_microbatch.items():
        # A microbatch that holds less than half has had its backward, or has only received its input.
        held = [microbatch for (of, microbatch), size in found.held_at_peak.items() if of == stage and 2 * size > saved]
        rows.append((stage, format_bytes(saved), len(held), ", ".join(map(str, held)) or "none"))
    return text_table(("stage", "one microbatch saves", "in flight at the peak", "which"), rows)


def _collectives(found: DryRun) -> str:
    rows = [(each.name, each.group, f"{each.count:,}", format_bytes(each.bytes)) for each in found.collectives]
    return text_table(("collective", "group", "calls", "bytes in"), rows)


def _notes(found: DryRun) -> list[str]:
    if found.executed < found.microbatches:
        executed = (
            f"{found.executed} of {found.microbatches} microbatches were executed: they reach every state "
            "of the whole step; collectives are counted for the whole step"
        )
    else:
        executed = f"all {found.microbatches} microbatches were executed"
    even = "every expert gets the same number of rows"
    load = (
        even
        if found.imbalance == 1
        else f"this rank's experts get {found.imbalance:g} times the average number of rows"
    )
    host = [f"optimizer states in the host's memory: {format_bytes(found.host_states)}"] if found.host_states else []
    host += [f"offloaded activations in the host's memory: {format_bytes(found.host_peak)}"] if found.host_peak else []
    return [f"{executed}; {load}", *host, f"took {format_seconds(found.seconds)}"]


def dry_run_json(found: DryRun) -> dict[str, Any]:
    return {
        "world": found.world,
        "rank": found.rank,
        "microbatches": found.microbatches,
        "executed": found.executed,
        "imbalance": found.imbalance,
        "peak": found.peak,
        "peak_total": found.peak_total,
        "peak_when": found.peak_when,
        "category_peaks": found.category_peaks,
        "host_peak": found.host_peak,
        "saved_per_microbatch": [{"stage": stage, "bytes": size} for stage, size in found.saved_per_microbatch.items()],
        "held_at_peak": [
            {"stage": stage, "microbatch": microbatch, "bytes": size}
            for (stage, microbatch), size in found.held_at_peak.items()
        ],
        "host_states": found.host_states,
        "collectives": [each._asdict() for each in found.collectives],
        "seconds": found.seconds,
    }
