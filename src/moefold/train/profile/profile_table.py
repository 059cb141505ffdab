"""A profile as text and as plain data: where the time of every rank goes, which wall binds, and what is the cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from moefold.train.profile.causes import causes_of, measured_shares, measured_wall
from moefold.train.profile.step_account import StepAccount, mean_of_ranks, typical, wall_seconds
from moefold.units import format_seconds

# So many ranks have columns of their own; of more the table has the mean and the largest.
_MAX_COLUMNS = 8
MEANING = {
    "compute": "forward, backward, update",
    "comm": "exposed transfers over",
    "wait": "waiting for a slower rank, over",
    "bubble": "waiting for another stage",
    "host": "bookkeeping, callbacks",
    "gc": "garbage collection",
    "data": "waiting for a batch",
    "save": "checkpoints",
    "validation": "validation",
    "other": "not explained",
}


def meaning(component: str) -> str:
    kind, _, axis = component.partition(".")
    return f"{MEANING[kind]} {axis}".strip()


def profile_data(accounts: Sequence[StepAccount], predicted_wall: str | None = None) -> dict[str, object]:
    """Everything as plain data, for `--json`."""
    return {
        "steps": [each.step for each in accounts],
        "world": len(accounts[-1].wall),
        "step_seconds": wall_seconds(accounts),
        "ranks": typical(accounts),
        "shares": measured_shares(accounts),
        "added_up": 1 - max(each.residue() for each in accounts),
        "other": max(each.other() for each in accounts),
        "wall": {"measured": measured_wall(accounts), "predicted": predicted_wall},
        "causes": [asdict(cause) for cause in causes_of(accounts)],
    }


def profile_lines(accounts: Sequence[StepAccount], predicted_wall: str | None = None) -> Iterator[str]:
    ranks = typical(accounts)
    mean = mean_of_ranks(ranks)
    total = sum(mean.values())
    columns = len(ranks) if len(ranks) <= _MAX_COLUMNS else 0
    heads = [f"rank {rank}" for rank in range(columns)] if columns > 1 else ["most"] * (len(ranks) > 1)
    yield f"{'':<50}{'mean':>10}{'share':>8}" + "".join(f"{head:>10}" for head in heads)
    for name, seconds in mean.items():
        each = [parts.get(name, 0.0) for parts in ranks]
        shown = each if columns > 1 else [max(each)] * (len(ranks) > 1)
        cells = "".join(f"{format_seconds(value):>10}" for value in shown)
        yield f"{name:<12}{meaning(name):<38}{format_seconds(seconds):>10}{seconds / total:>8.1%}{cells}"
    off, other = max(each.residue() for each in accounts), max(each.other() for each in accounts)
    yield (
        f"a step takes {format_seconds(wall_seconds(accounts))}; the parts of every rank add up to it within {off:.1%}"
        f", {other:.1%} at most is not explained"
    )
    said = "not predicted: give --machine or --gpu" if predicted_wall is None else f"predicted: {predicted_wall}"
    yield f"wall: {measured_wall(accounts)} measured, {said}"
    causes = causes_of(accounts)
    for cause in causes:
        yield f"  {cause.what} ({cause.share:.0%} of the step)"
    if not causes:
        yield "  no rank, link, batch or collection of garbage stands out"
