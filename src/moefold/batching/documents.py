"""Packing: documents of any length next to each other in microbatches, so that no rank waits long for another.

A microbatch holds at most so many tokens, and a wave has one for every data-parallel rank. Several ways to fill them
are tried, and the one that should be done first is kept: waves filled to the pace of their longest document; all
microbatches alike; and the fewest microbatches, which wins when they are nearly full.
"""

from __future__ import annotations

from collections.abc import Sequence

from moefold.batching.bin_packing import evenly, first_fit, serpentine
from moefold.batching.step_plan import Cost, StepPlan, Wave, estimate, ramped
from moefold.batching.wave_packing import Filler, Room
from moefold.errors import DataError


def pack(lengths: Sequence[int], max_tokens: int, ways: int, context: int = 1, cost: Cost | None = None) -> StepPlan:
    """Microbatches of at most `max_tokens`, `ways` of them in a wave, each shared by `context` ranks."""
    refuse_unplaceable(lengths, max_tokens)
    cost = cost or Cost()
    work = [cost.of_document(length, context) for length in lengths]
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    fewest = first_fit(longest_first, lengths, max_tokens)
    num_waves = max(-(-len(fewest) // ways), 1)
    alike = evenly(longest_first, lengths, work, max_tokens, num_waves * ways)
    plans = [
        StepPlan(tuple(Wave(context, wave) for wave in serpentine(bins, ways, work)))
        for bins in (alike, fewest)
        if bins is not None
    ]
    filler = Filler(lengths, ways * context, (context,), Room(max_tokens), cost)
    # One more wave may let the work be even where the fewest have no room to spare.
    plans += [filler.plan(number, hurry=False) for number in (num_waves, num_waves + 1)]
    best = min(plans, key=lambda plan: estimate(plan, lengths, cost))
    return ramped(best, lengths, cost)


def refuse_unplaceable(lengths: Sequence[int], max_tokens: int) -> None:
    """A document longer than a microbatch, or empty, is an error that names it."""
    for i, length in enumerate(lengths):
        if length > max_tokens:
            raise DataError(
                f"document {i} of the step has {length:,} tokens, but a microbatch holds at most {max_tokens:,}; "
                f"raise data.seq_len or data.micro_batch, or cut the document"
            )
        if length < 1:
            raise DataError(f"document {i} of the step has {length} tokens; leave empty documents out")
