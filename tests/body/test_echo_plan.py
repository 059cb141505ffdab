"""The plan of ECHO: equal to its rules in loops, sync-free, and as balanced as the report's method is said to be."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch
from tests.sync_free import sync_free
from torch import Tensor

from moefold.moe.dispatch.base import Routing
from moefold.moe.echo_plan import places_of_rows, places_of_rows_reference, plan_clones
from moefold.moe.permute import flat_experts
from moefold.ops.segments import rank_within_key
from moefold.plan.clone_loads import Clone, EchoSizes, loads_with, planned_clones

SIZES = [EchoSizes(8, 2, 1), EchoSizes(12, 4, 2), EchoSizes(64, 8, 1), EchoSizes(6, 6, 3), EchoSizes(4, 1, 1)]


def zipf_rows(num_rows: int, num_experts: int, top_k: int, seed: int, skew: float = 1.0) -> Tensor:
    """Experts of tokens, [t, K], with the popularity of the n-th most popular expert falling as 1 / n^skew."""
    popularity = 1 / torch.arange(1, num_experts + 1).double() ** skew
    popularity = popularity[torch.randperm(num_experts, generator=torch.Generator().manual_seed(7))]
    return torch.multinomial(popularity.expand(num_rows, -1), top_k, generator=torch.Generator().manual_seed(seed))


def as_clones(expert_N: Tensor, rows_N: Tensor) -> list[Clone]:
    return [
        Clone(slot, expert, rows)
        for slot, (expert, rows) in enumerate(zip(expert_N.tolist(), rows_N.tolist(), strict=True))
        if expert >= 0
    ]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("min_rows", [1, 5])
def test_plan_equals_its_rules_in_loops(sizes: EchoSizes, min_rows: int) -> None:
    random = Random(3)
    for spread in (0, 1, 10, 100):
        rows = [random.randint(0, spread) ** random.choice((1, 2)) for _ in range(sizes.num_experts)]
        plan = plan_clones(torch.tensor(rows), sizes, min_rows)
        expected = planned_clones(rows, sizes, min_rows)
        assert as_clones(plan.expert_N, plan.rows_N) == sorted(expected)
        moved = Counter[int]()
        for _, expert, number in expected:
            moved[expert] += number
        assert plan.home_rows_E.tolist() == [number - moved[expert] for expert, number in enumerate(rows)]
        before, after = loads_with(rows, [], sizes), loads_with(rows, expected, sizes)
        assert (
            sum(after) == sum(before)
            and max(after) <= max(before)
            and all(number >= min_rows for *_, number in expected)
        )


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_go_where_the_rules_say(sizes: EchoSizes) -> None:
    """From three sources, of which one has no rows; some assignments are dropped."""
    generator = torch.Generator().manual_seed(5)
    sources = [zipf_rows(number, sizes.num_experts, 2, seed) for seed, number in enumerate((40, 0, 25))]
    kept = [torch.rand(experts.shape, generator=generator) < 0.8 for experts in sources]
    counts = torch.stack([experts[keep].bincount(minlength=sizes.num_experts) for experts, keep in zip(sources, kept)])
    rows_E = counts.sum(0)
    plan = plan_clones(rows_E, sizes)
    clones = planned_clones(rows_E.tolist(), sizes)
    expected = places_of_rows_reference([experts[keep].tolist() for experts, keep in zip(sources, kept)], clones, sizes)
    for source, (experts, keep) in enumerate(zip(sources, kept)):
        key = flat_experts(Routing(experts, experts.double(), keep), sizes.num_experts)
        number = rank_within_key(key, sizes.num_experts + 1).view_as(experts) + counts[:source].sum(0)[experts]
        places = places_of_rows(experts, number, plan, sizes)
        assert places[keep].tolist() == expected[source]
        if places.numel():
            assert int(places.min()) >= 0 and int(places.max()) < sizes.num_places


def test_neither_reads_the_device() -> None:
    sizes = EchoSizes(16, 4, 2)
    experts = zipf_rows(32, 16, 2, 0)
    rows_E = experts.flatten().bincount(minlength=16)
    number = rank_within_key(experts.flatten(), 16).view_as(experts)
    with sync_free():
        places_of_rows(experts, number, plan_clones(rows_E, sizes), sizes)


# Slots, and the largest load of a rank over the mean without and with clones. The report has no figures.
BALANCED = {
    (64, 8, 1): (1.5, 1.15),
    (64, 8, 2): (1.5, 1.01),
    (256, 64, 1): (5.0, 1.12),
    (256, 64, 2): (5.0, 1.03),
}


@pytest.mark.parametrize(("given", "bounds"), BALANCED.items(), ids=str)
def test_one_slot_nearly_balances_a_zipf_router(given: tuple[int, int, int], bounds: tuple[float, float]) -> None:
    """Mean over routings of 1,024 tokens a rank with 8 experts each (128 with 64 ranks), popularity 1 / n."""
    sizes, (without, limit) = EchoSizes(*given), bounds
    tokens, draws = (1024 * 8, 20) if sizes.num_ranks == 8 else (128 * 64, 4)
    plain, cloned = [], []
    for seed in range(draws):
        rows = zipf_rows(tokens, sizes.num_experts, 8, seed).flatten().bincount(minlength=sizes.num_experts)
        mean = int(rows.sum()) / sizes.num_ranks
        plan = plan_clones(rows, sizes, min_rows=int(mean) // 50)
        clones = as_clones(plan.expert_N, plan.rows_N)
        plain.append(max(loads_with(rows.tolist(), [], sizes)) / mean)
        cloned.append(max(loads_with(rows.tolist(), clones, sizes)) / mean)
    assert sum(plain) / draws > without and sum(cloned) / draws <= limit, (sum(plain) / draws, sum(cloned) / draws)
