"""Training that begins with a smaller batch: how long each phase takes in the layout that was planned for the whole.

A ramp is written BATCH:TOKENS, comma after comma, as in `3072:120B,6144:150B`; after it the run's own batch. The layout
stays, so a phase has fewer microbatches: its share of bubbles, of the optimizer and of gradients is larger, which makes
the same tokens take longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from moefold.checks.run_all import problems
from moefold.errors import ConfigError, Problem
from moefold.plan.search.candidates import choice_of_workload, why_illegal
from moefold.plan.search.goodput import days_for
from moefold.plan.search.space import limits_of, usual_space
from moefold.plan.timing.step_time import step_time
from moefold.plan.workload import Workload, changed
from moefold.units import UnitError, format_count, parse_count

Ramp = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RampPhase:
    batch: int
    tokens: float
    steps: int
    step_seconds: float
    tokens_per_second_per_gpu: float
    days: float


def parse_ramp(text: str) -> Ramp:
    """`parse_ramp("512:1B,1024:2B")` is ((512, 1_000_000_000), (1024, 2_000_000_000))."""
    found = []
    for word in filter(None, text.split(",")):
        batch, colon, tokens = word.partition(":")
        if not colon or not batch.strip().isdigit():
            raise ConfigError(Problem("batch-ramp", f"{word!r} is no BATCH:TOKENS", "write 512:100B,1024:200B"))
        try:
            found.append((int(batch), parse_count(tokens.strip())))
        except UnitError as error:
            raise ConfigError(Problem("batch-ramp", f"{word!r}: {error}")) from error
    return tuple(found)


def ramp_phases(workload: Workload, ramp: Ramp, tokens: float, effective: float = 1.0) -> tuple[RampPhase, ...]:
    """Those of the ramp and what is left for the run's own batch. ``effective``: share of the time that trains."""
    whole = workload.run.data.global_batch
    left = tokens - sum(each for _, each in ramp)
    refused = [found for batch, _ in ramp if (found := _problem(workload, batch))]
    if ramp and left <= 0:
        words = f"takes {format_count(tokens - left)} tokens of {format_count(tokens)}"
        refused.append(Problem("batch-ramp", words, "leave some for the run's own batch, or train on more (--tokens)"))
    if refused:
        raise ConfigError(*refused)
    return tuple(_phase(workload, batch, each, effective) for batch, each in (*ramp, (whole, left)))


def days_of(phases: Sequence[RampPhase]) -> float:
    return sum(phase.days for phase in phases)


def ramp_words(phases: Sequence[RampPhase]) -> str:
    """One sentence; nothing of a run without a ramp."""
    if len(phases) < 2:
        return ""
    *before, last = phases
    constant = sum(phase.tokens for phase in phases) / last.tokens * last.days
    each = "; ".join(
        f"{format_count(phase.tokens)} tokens at {phase.batch:,} sequences take {phase.days:,.1f} days "
        f"({phase.tokens_per_second_per_gpu:,.0f} tokens/s per GPU)"
        for phase in before
    )
    rest = f"the rest at {last.batch:,} takes {last.days:,.1f}"
    return f"Batch ramp: {each}; {rest}. Without it all take {constant:,.1f} days."


def _phase(workload: Workload, batch: int, tokens: float, effective: float) -> RampPhase:
    seconds = step_time(changed(workload, data={"global_batch": batch})).total
    in_step = batch * workload.run.data.seq_len
    rate = in_step / seconds
    days = days_for(tokens, rate, effective)
    return RampPhase(batch, tokens, ceil(tokens / in_step), seconds, rate / workload.cluster.num_gpus, days)


def _problem(workload: Workload, batch: int) -> Problem | None:
    """What refuses this batch of those that refuse layouts, and not the run's own."""
    own = _refusals(workload)

    def refusal(batch: int) -> str:
        return next(
            (each for each in _refusals(changed(workload, data={"global_batch": batch})) if each not in own), ""
        )

    reason = refusal(batch)
    if not reason:
        return None
    one = workload.dp * workload.run.data.micro_batch
    others = range(one, workload.run.data.global_batch, one)
    nearest = next(
        (other for other in sorted(others, key=lambda other: abs(other - batch)) if not refusal(other)), None
    )
    instead = f"use {nearest:,}, or" if nearest else "no smaller batch is possible:"
    return Problem("batch-ramp", f"phase of {batch:,} sequences: {reason}", f"{instead} pin another layout (--fix)")


def _refusals(workload: Workload) -> list[str]:
    """Of `moefold check`; of another framework, the first rule that candidates have to obey."""
    if workload.is_own:
        return [each.message for each in problems(workload.run, workload.cluster.num_gpus)]
    reason = why_illegal(choice_of_workload(workload), limits_of(workload), usual_space(workload))
    return [] if reason is None else [reason]
