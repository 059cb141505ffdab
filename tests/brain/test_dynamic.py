"""Dynamic context sizes: within memory always, close to the best plan there is, and quicker than one size for all.

Estimated time of one static size (that of the longest document) over that of the dynamic plan, for 1,000 documents and
8,192 tokens per rank, with `Cost()`; the size is in brackets:

    lengths                                   8 ranks      16 ranks     64 ranks
    lognormal, median 1,100, up to 64K        1.32 (8)     1.30 (8)     1.27 (8)
    Zipf, exponent 1.1, from 256              1.37 (8)     1.74 (16)    1.52 (16)
    Zipf, exponent 1.2, from 64               1.07 (2)     1.05 (2)     1.53 (2)
    2 % of 64K, the others 100 to 2,000       1.11 (8)     1.11 (8)     1.09 (8)
    uniform, up to 8K                         1.00 (1)     1.00 (1)     1.00 (1)

What is left to win is the messages of short documents, so the gain grows with the longest document and vanishes where
one rank holds it. Where documents of 64K are most of the work, both plans share those over eight ranks, and must.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.batching.document_packing import context_needed, max_rank_tokens, pack, plan_step, static_plans
from moefold.batching.wave_packing import Cost, StepPlan, Wave, estimate, imbalance, max_shard_length
from moefold.batching.zigzag import num_held
from moefold.errors import DataError

COSTS = st.sampled_from(
    [
        Cost(attention=1 / 16, kv_transfer=0.1, ring_step=0.5, wave=1),
        Cost(attention=1 / 64, kv_transfer=0.3, ring_step=1, wave=4),
        Cost(attention=1 / 8, kv_transfer=0.02, ring_step=0.1, wave=0.2),
    ]
)
TOKENS = 8192


def lognormal(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [min(65_536, max(1, round(draw.lognormvariate(7, 1.5)))) for _ in range(1000)]


def zipf(seed: int, exponent: float = 1.1, shortest: int = 256) -> list[int]:
    draw = random.Random(seed)
    return [min(131_072, round(shortest * draw.paretovariate(exponent))) for _ in range(1000)]


def short_zipf(seed: int) -> list[int]:
    return zipf(seed, 1.2, 64)


def two_kinds(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [65_536 if draw.random() < 0.02 else draw.randint(100, 2000) for _ in range(1000)]


def uniform(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randint(1, TOKENS) for _ in range(1000)]


def assert_legal(plan: StepPlan, lengths: Sequence[int], ranks: int, tokens_per_rank: int) -> None:
    assert plan.waves
    assert sorted(i for wave in plan.waves for group in wave.documents for i in group) == list(range(len(lengths)))
    for wave in plan.waves:
        assert wave.context & (wave.context - 1) == 0
        assert wave.context * len(wave.documents) == ranks
        for group in wave.documents:
            held = [num_held([lengths[i] for i in group], index, wave.context) for index in range(wave.context)]
            assert max(held) <= tokens_per_rank


@given(st.lists(st.integers(1, 64), max_size=25), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 7, 16, 64]), COSTS)
def test_every_document_once_and_no_rank_above_its_memory(
    lengths: list[int], ranks: int, tokens: int, cost: Cost
) -> None:
    lengths = [min(length, ranks * tokens) for length in lengths]
    plan = plan_step(lengths, ranks, tokens, cost)
    assert_legal(plan, lengths, ranks, tokens)
    assert plan_step(lengths, ranks, tokens, cost) == plan
    for static in static_plans(lengths, ranks, tokens, cost):
        assert_legal(static, lengths, ranks, tokens)
        assert estimate(plan, lengths, cost) <= estimate(static, lengths, cost)


@pytest.mark.parametrize(
    ("draw", "ranks", "gain"),
    [
        (lognormal, 8, 1.25),
        (lognormal, 16, 1.25),
        (lognormal, 64, 1.2),
        (zipf, 8, 1.3),
        (zipf, 16, 1.3),
        (zipf, 64, 1.3),
        (short_zipf, 8, 1.0),
        (short_zipf, 16, 1.0),
        (short_zipf, 64, 1.0),
        (two_kinds, 8, 1.08),
        (two_kinds, 16, 1.08),
        (two_kinds, 64, 1.05),
        (uniform, 8, 1.0),
        (uniform, 16, 1.0),
        (uniform, 64, 1.0),
    ],
)
def test_quicker_than_one_size_for_all(draw: Callable[[int], list[int]], ranks: int, gain: float) -> None:
    lengths = [min(length, ranks * TOKENS) for length in draw(1)]
    needed = context_needed(max(lengths), TOKENS)
    static = pack(lengths, needed * TOKENS, ranks // needed, needed)
    plan = plan_step(lengths, ranks, TOKENS)
    assert_legal(plan, lengths, ranks, TOKENS)
    ratio = estimate(static, lengths, Cost()) / estimate(plan, lengths, Cost())
    waits = imbalance(plan, lengths, Cost())
    print(f"{draw.__name__}, {ranks} ranks: {ratio:.2f} ({needed}), imbalance {waits:.3f}")
    assert ratio >= gain - 1e-9
    assert waits < 1.05


@pytest.mark.timing
def test_a_thousand_documents_are_planned_in_a_fifth_of_a_second() -> None:
    """The best of up to twelve times each: a machine that is busy with other tests takes half as long again."""
    for draw in (lognormal, zipf, uniform):
        lengths = [min(length, 16 * TOKENS) for length in draw(2)]
        took: list[float] = []
        while len(took) < 12 and min(took, default=1.0) >= 0.2:
            started = time.process_time()
            plan_step(lengths, 16, TOKENS)
            took.append(time.process_time() - started)
        print(f"{draw.__name__}: {min(took):.3f} s")
        assert min(took) < 0.2, took


# ---- against every plan there is ----


def best_time(lengths: Sequence[int], ranks: int, tokens: int, cost: Cost) -> float:
    """The optimum over all partitions into waves and groups; sets of documents are bit masks."""
    contexts = [2**power for power in range(ranks.bit_length())]

    def subsets_with_lowest(mask: int) -> list[int]:
        lowest = mask & -mask
        rest = subset = mask ^ lowest
        found = [subset | lowest]
        while subset:
            subset = (subset - 1) & rest
            found.append(subset | lowest)
        return found

    @cache
    def group_time(mask: int, context: int) -> float:
        members = [length for i, length in enumerate(lengths) if mask >> i & 1]
        if sum(max_shard_length(length, context) for length in members) > tokens:
            return inf
        return sum(cost.of_document(length, context) for length in members)

    @cache
    def slowest(mask: int, context: int, groups: int) -> float:
        if mask == 0:
            return 0.0
        if groups == 0:
            return inf
        return min(
            max(group_time(one, context), slowest(mask ^ one, context, groups - 1)) for one in subsets_with_lowest(mask)
        )

    @cache
    def best(mask: int) -> float:
        if mask == 0:
            return 0.0
        return min(
            cost.of_wave(context, slowest(wave, context, ranks // context)) + best(mask ^ wave)
            for wave in subsets_with_lowest(mask)
            for context in contexts
        )

    return best((1 << len(lengths)) - 1)


def test_close_to_the_best_plan_there_is() -> None:
    """Of 150 small steps 132 are planned as well as possible; the mean is 0.5 % above the best, the worst 19 %."""
    draw = random.Random(0)
    ratios = []
    for _ in range(150):
        ranks, tokens, number = draw.choice([2, 4]), draw.choice([8, 16]), draw.randint(1, 6)
        lengths = [min(ranks * tokens, max(1, round(draw.lognormvariate(1.5, 1.0)))) for _ in range(number)]
        cost = Cost(attention=draw.choice([1 / 8, 1 / 64]), kv_transfer=draw.choice([0.02, 0.3]), ring_step=0.5, wave=1)
        plan = plan_step(lengths, ranks, tokens, cost)
        ratios.append(estimate(plan, lengths, cost) / best_time(tuple(lengths), ranks, tokens, cost))
    equal = sum(ratio < 1 + 1e-9 for ratio in ratios)
    print(f"{equal} of 150 are best, mean {sum(ratios) / 150:.4f}, worst {max(ratios):.3f}")
    assert min(ratios) > 1 - 1e-9
    assert max(ratios) < 1.2
    assert sum(ratios) / len(ratios) < 1.01
    assert equal > 110


# ---- by hand ----


def test_a_long_document_is_shared_and_short_ones_are_not() -> None:
    plan = plan_step([64, 5, 6, 7, 8], ranks=8, tokens_per_rank=8, cost=Cost(kv_transfer=0.5, ring_step=0, wave=0))
    assert Wave(8, ((0,),)) in plan.waves
    assert {wave.context for wave in plan.waves if wave.documents != ((0,),)} == {1}


def test_no_documents_are_one_empty_wave() -> None:
    assert plan_step([], 4, 16) == StepPlan((Wave(1, ((), (), (), ())),))


def test_what_cannot_be_held_is_refused() -> None:
    with pytest.raises(DataError, match="document 1 of the step has 65 tokens, but a microbatch holds at most 64"):
        plan_step([3, 65], 8, 8)
    with pytest.raises(ValueError, match="6 ranks are not a power of two"):
        plan_step([3], 6, 8)


@given(st.integers(1, 5000), st.integers(1, 600))
def test_the_context_needed_is_the_least_that_holds(length: int, tokens: int) -> None:
    needed = context_needed(length, tokens)
    assert max_shard_length(length, needed) <= tokens
    assert needed == 1 or max_shard_length(length, needed // 2) > tokens


@given(st.integers(1, 100_000), st.sampled_from([1, 2, 8]), COSTS)
def test_longest_within_inverts_the_time_of_a_document(length: int, context: int, cost: Cost) -> None:
    assert cost.longest_within(cost.of_document(length, context), context) == pytest.approx(length, rel=1e-9)
    assert cost.longest_within(0.0, context) == 0


def test_the_bound_counts_the_fullest_rank() -> None:
    """Eight documents of one token over two ranks all begin on the first."""
    plan = StepPlan((Wave(2, (tuple(range(8)),)),))
    assert max_rank_tokens(plan, [1] * 8) == 8
