"""Dynamic context parallelism: every wave chooses by how many ranks a document is shared.

With one size for all, the longest document decides it, and a thousand short ones are cut into slivers that travel for
nothing. Here a wave has its own size c, a power of two: the ranks / c groups of neighbours each take documents of up to
c times a rank's tokens. Long documents go first, on as many ranks as hold them or as finish them in time, and the
other groups of their wave work alongside for as long; short documents follow unshared.

    64K 2K 2K 1K ... on 8 ranks of 8K         c = 8      64K
                                              c = 1      2K 2K 1K ... on each

Choosing exactly is bin packing, so a dozen plans are made, for several numbers of waves and with one size for all,
and the one that should be done first is kept. The same lengths give the same plan everywhere: ranks need to agree on
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from moefold.batching.documents import pack, refuse_unplaceable
from moefold.batching.step_plan import Cost, StepPlan, estimate, held_by_a_rank, ramped
from moefold.batching.wave_packing import Filler, Room

# Numbers of waves to try, as multiples of the fewest that the tokens need.
_STRETCH = (1.3, 1.6)


def plan_step(lengths: Sequence[int], ranks: int, tokens_per_rank: int, cost: Cost | None = None) -> StepPlan:
    """Waves for `ranks` = dp * cp, a power of two, none of which ever holds more than `tokens_per_rank` tokens."""
    if ranks < 1 or ranks & (ranks - 1):
        raise ValueError(f"{ranks} ranks do not halve evenly")
    refuse_unplaceable(lengths, ranks * tokens_per_rank)
    cost = cost or Cost()
    contexts = [2**power for power in range(ranks.bit_length())]
    filler = Filler(lengths, ranks, contexts, Room(tokens_per_rank, per_rank=True), cost)
    plans = [
        filler.plan(num_waves, hurry)
        for num_waves in _numbers_of_waves(lengths, ranks * tokens_per_rank)
        for hurry in (False, True)
    ]
    plans += static_plans(lengths, ranks, tokens_per_rank, cost)
    return ramped(min(plans, key=lambda plan: estimate(plan, lengths, cost)), lengths, cost)


def static_plans(lengths: Sequence[int], ranks: int, tokens_per_rank: int, cost: Cost) -> list[StepPlan]:
    """One size for all: the one that the longest document needs, twice and four times that.

    Short documents leave the first ranks of many a token more than the last, so a static plan may ask too much of one.
    """
    needed = context_needed(max(lengths, default=1), tokens_per_rank)
    sizes = [size for size in (needed, 2 * needed, 4 * needed) if size <= ranks]
    plans = [pack(lengths, size * tokens_per_rank, ranks // size, size, cost) for size in sizes]
    return [plan for plan in plans if most_on_a_rank(plan, lengths) <= tokens_per_rank]


def context_needed(length: int, tokens_per_rank: int) -> int:
    """The fewest ranks, a power of two, that hold a document."""
    return 1 << (-(-length // tokens_per_rank) - 1).bit_length()


def most_on_a_rank(plan: StepPlan, lengths: Sequence[int]) -> int:
    """The most tokens that any rank holds at a time."""
    return max(
        (held_by_a_rank(group, lengths, wave.context) for wave in plan.waves for group in wave.documents), default=0
    )


def _numbers_of_waves(lengths: Sequence[int], tokens_per_wave: int) -> list[int]:
    fewest = max(-(-sum(lengths) // tokens_per_wave), 1)
    near = {fewest, fewest + 1, fewest + 2}
    return sorted(near | {round(fewest * stretch) for stretch in _STRETCH})
