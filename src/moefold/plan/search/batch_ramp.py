"""Training that begins with a smaller batch: how long each phase takes in the layout that was planned for the whole.

A ramp is written BATCH:TOKENS, comma after comma, as in `3072:120B,6144:150B`; after it the run's own batch. The layout
stays, so a phase has fewer microbatches: its share of bubbles, of the optimizer and of gradients is larger, which makes
the same tokens take longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from moefold.errors import ConfigError, Problem
from moefold.plan.search.goodput import days_for
from moefold.plan.timing.step_time import step_time
from moefold.plan.workload import Workload, changed
from moefold.units import format_count, parse_count

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
        found.append((int(batch), parse_count(tokens)))
    return tuple(found)


def ramp_phases(workload: Workload, ramp: Ramp, tokens: float, effective: float = 1.0) -> tuple[RampPhase, ...]:
    """Those of the ramp and what is left for the run's own batch. ``effective``: share of the time that trains."""
    whole = workload.run.data.global_batch
    left = tokens - sum(each for _, each in ramp)
    problems = [found for batch, _ in ramp if (found := _problem(workload, batch))]
    if ramp and left <= 0:
        words = f"takes {format_count(tokens - left)} tokens of {format_count(tokens)}"
        problems.append(Problem("batch-ramp", words, "leave some for the run's own batch, or train on more (--tokens)"))
    if problems:
        raise ConfigError(*problems)
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
    """A batch that the layout cannot cut into microbatches, or with too few of them for its order."""
    parallel, one = workload.parallel, workload.dp * workload.run.data.micro_batch
    # Interleaved stages go round in turns of as many microbatches as there are ranks.
    least = one * (parallel.pp if parallel.vpp > 1 else 1)
    if batch >= least and batch % one == 0:
        return None
    nearest = max(least, round(batch / one) * one)
    words = f"a batch of {batch:,} does not cut into microbatches of {one:,} sequences, at least {least // one}"
    return Problem("batch-ramp", words, f"use {nearest:,}, or pin a layout with fewer replicas (--fix)")
