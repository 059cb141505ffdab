"""Which samples of a step form which microbatch: ``plan_for``, a function of the configuration and of lengths alone.

Documents of any length are packed so that ranks wait little for each other; other samples are taken in order.

**pack**, for a fixed cp: a microbatch holds at most so many tokens, and a wave has one for every data-parallel rank. Of
several plans the fastest by estimate is kept: waves filled up to the time of their longest document; all microbatches
alike; and the fewest microbatches, which wins when they are nearly full.

**plan_step**, dynamic context parallelism: every wave chooses over how many ranks its documents are sharded. With one
size for all, the longest document decides it, and a thousand short ones are cut into small chunks that are sent around
without need. Here a wave has its own size c, a power of two: the ranks / c groups of neighbours each take documents of
up to c times a rank's tokens. Long documents go first, over as many ranks as hold them or as finish them in time, and
the other groups of their wave are filled up to the same time; short documents follow unsharded.

    64K 2K 2K 1K ... on 8 ranks of 8K         c = 8      64K
                                              c = 1      2K 2K 1K ... on each

The exact problem is bin packing, so a dozen plans are made, for several numbers of waves and with one size for all, and
the fastest by estimate is kept. The same lengths give the same plan everywhere: ranks need to agree on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from moefold.batching.doc_cost import cost_of
from moefold.batching.wave_packing import (
    Cost,
    Room,
    StepPlan,
    Wave,
    WavePacker,
    estimate,
    evenly,
    first_fit,
    max_group_tokens,
    ramped,
    serpentine,
)
from moefold.config.run import RunConfig
from moefold.errors import DataError
from moefold.schedule.names import schedule_named
from moefold.topology.folded_layout import FoldedLayout

# Numbers of waves to try, as multiples of the fewest that the tokens need.
_STRETCH = (1.3, 1.6)


def pack(
    lengths: Sequence[int], max_tokens: int, num_groups: int, context: int = 1, cost: Cost | None = None
) -> StepPlan:
    """Microbatches of at most `max_tokens`, `num_groups` of them in a wave, each sharded over `context` ranks."""
    refuse_unplaceable(lengths, max_tokens)
    cost = cost or Cost()
    work = [cost.of_document(length, context) for length in lengths]
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    fewest = first_fit(longest_first, lengths, max_tokens)
    num_waves = max(-(-len(fewest) // num_groups), 1)
    even = evenly(longest_first, lengths, work, max_tokens, num_waves * num_groups)
    plans = [
        StepPlan(tuple(Wave(context, wave) for wave in serpentine(bins, num_groups, work)))
        for bins in (even, fewest)
        if bins is not None
    ]
    packer = WavePacker(lengths, num_groups * context, (context,), Room(max_tokens), cost)
    # One more wave may balance the work where the fewest waves are too full to.
    plans += [packer.plan(number, use_more_ranks=False) for number in (num_waves, num_waves + 1)]
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


def plan_step(lengths: Sequence[int], ranks: int, tokens_per_rank: int, cost: Cost | None = None) -> StepPlan:
    """Waves for `ranks` = dp * cp, a power of two, none of which ever holds more than `tokens_per_rank` tokens."""
    if ranks < 1 or ranks & (ranks - 1):
        raise ValueError(f"{ranks} ranks are not a power of two")
    refuse_unplaceable(lengths, ranks * tokens_per_rank)
    cost = cost or Cost()
    contexts = [2**power for power in range(ranks.bit_length())]
    packer = WavePacker(lengths, ranks, contexts, Room(tokens_per_rank, per_rank=True), cost)
    plans = [
        packer.plan(num_waves, use_more_ranks)
        for num_waves in _numbers_of_waves(lengths, ranks * tokens_per_rank)
        for use_more_ranks in (False, True)
    ]
    plans += static_plans(lengths, ranks, tokens_per_rank, cost)
    return ramped(min(plans, key=lambda plan: estimate(plan, lengths, cost)), lengths, cost)


def static_plans(lengths: Sequence[int], ranks: int, tokens_per_rank: int, cost: Cost) -> list[StepPlan]:
    """One size for all: the one that the longest document needs, twice and four times that.

    Many short documents may leave the first ranks more tokens than the last, so a static plan may exceed the bound.
    """
    needed = context_needed(max(lengths, default=1), tokens_per_rank)
    sizes = [size for size in (needed, 2 * needed, 4 * needed) if size <= ranks]
    plans = [pack(lengths, size * tokens_per_rank, ranks // size, size, cost) for size in sizes]
    return [plan for plan in plans if max_rank_tokens(plan, lengths) <= tokens_per_rank]


def context_needed(length: int, tokens_per_rank: int) -> int:
    """The fewest ranks, a power of two, that hold a document."""
    return 1 << (-(-length // tokens_per_rank) - 1).bit_length()


def max_rank_tokens(plan: StepPlan, lengths: Sequence[int]) -> int:
    """The most tokens that any rank holds at a time."""
    return max(
        (max_group_tokens(group, lengths, wave.context) for wave in plan.waves for group in wave.documents), default=0
    )


def _numbers_of_waves(lengths: Sequence[int], tokens_per_wave: int) -> list[int]:
    fewest = max(-(-sum(lengths) // tokens_per_wave), 1)
    near = {fewest, fewest + 1, fewest + 2}
    return sorted(near | {round(fewest * stretch) for stretch in _STRETCH})


def plan_for(run: RunConfig, sizes: Sequence[int], layout: FoldedLayout) -> StepPlan:
    """Which samples of the step form which microbatch, from their lengths alone."""
    data, dp, cp = run.data, layout.size("dp"), layout.size("cp")
    if data.packing != "bin_packed":
        return in_order(len(sizes), data.micro_batch, dp, cp)
    room, cost = data.micro_batch * data.seq_len, cost_of(run)
    if run.parallel.dynamic_cp:
        # A rank's tokens under a static cp, but at least so many that all ranks together hold a whole microbatch.
        plan = plan_step(sizes, dp * cp, max(room // cp, -(-room // (dp * cp))), cost)
    else:
        plan = pack(sizes, room, dp, cp, cost)
    schedule, stages = schedule_named(run.parallel.schedule), run.parallel.pp * run.parallel.vpp
    return plan.with_at_least(schedule.microbatches_per_stage * stages)


def in_order(num_samples: int, micro_batch: int, dp: int, cp: int) -> StepPlan:
    """``micro_batch`` consecutive samples form a microbatch, ``dp`` consecutive microbatches a wave."""
    bins = [tuple(range(first, first + micro_batch)) for first in range(0, num_samples, micro_batch)]
    return StepPlan(tuple(Wave(cp, tuple(bins[first : first + dp])) for first in range(0, len(bins), dp)))
