"""Gradients summed in buckets are those summed one by one; and a step's sums take as few collectives as buckets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.marks import slow_except
from tests.ranks.test_message_dtypes import SMALL, one_step
from tests.support import on_ranks
from torch import Tensor

import moefold
from moefold.blueprint.flat_layout import fill_buckets
from moefold.comm.collectives import all_reduce_no_grad, reduce_scatter_no_grad
from moefold.comm.process_groups import Group, Groups
from moefold.parallel.gradient_buckets import bucket_bytes, chunks_of, reduce_bucket

# Every dim can be the one that is cut; some do not divide, some have fewer rows than there are ranks.
SHAPES = [(8, 3), (3, 8), (5,), (2, 5, 4), (1, 2), (7, 7), (4,), (1,)]


def one_by_one(gradient: Tensor, replicate: Group, shard: Group, dtype: torch.dtype) -> Tensor:
    """The plain form: a reduce-scatter and an all-reduce of one gradient."""
    if not shard.alone:
        cut = chunks_of(tuple(gradient.shape), shard.size)
        sizes = tuple(max(0, min(cut.chunk, cut.size - cut.chunk * index)) for index in range(shard.size))
        rows = reduce_scatter_no_grad(gradient.movedim(cut.dim, 0), sizes, shard, dtype)
        gradient = rows.movedim(0, cut.dim).contiguous()
    return all_reduce_no_grad(gradient, replicate, dtype)


@pytest.mark.parametrize("replicas", slow_except([1, 2, 4], 2))
def test_a_bucket_is_its_gradients_one_by_one(replicas: int) -> None:
    """Small integers, whose sums are exact in any order."""

    def work(groups: Groups) -> None:
        generator = torch.Generator().manual_seed(groups.rank)
        replicate, shard = groups["dense_replicate"], groups["dense_shard"]
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            full = [torch.randint(-9, 9, shape, generator=generator).float() for shape in SHAPES]
            before = groups["world"].ledger.traffic.copy()
            together = reduce_bucket(full, replicate, shard, dtype)
            assert sum(now.calls for now in groups["world"].ledger.traffic.values()) - sum(
                then.calls for then in before.values()
            ) == int(not replicate.alone) + int(not shard.alone)
            for gradient, found in zip(full, together, strict=True):
                expected = one_by_one(gradient, replicate, shard, dtype)
                assert found.dtype == gradient.dtype and found.is_contiguous()
                torch.testing.assert_close(found, expected, rtol=0, atol=0)

    on_ranks(work, 4, dp_replicate=replicas)


def test_buckets_hold_at_most_their_limit_and_everything_once() -> None:
    generator = torch.Generator().manual_seed(3)
    for limit in (1, 50, 1000):
        sizes = {f"p{i}": int(torch.randint(1, 90, (), generator=generator)) for i in range(40)}
        buckets = fill_buckets(sizes, limit)
        assert sorted(name for names in buckets for name in names) == sorted(sizes)
        assert all(len(names) == 1 or sum(sizes[name] for name in names) <= limit for names in buckets)
        # No bucket could have taken the first of the next one.
        assert all(sum(sizes[name] for name in names) + sizes[after[0]] > limit for names, after in pairwise(buckets))
    assert bucket_bytes((5, 2), 4, torch.bfloat16) == 2 * 4 * 2 * 2


LAYOUTS = [
    {"schedule": "1f1b_overlapped"},
    {"pp": 2, "ep": 2, "dp_replicate": 2, "edp_replicate": 1},
    {"pp": 2, "tp": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_in_large_buckets_is_the_step_in_small_ones(layout: dict[str, Any], monkeypatch: Any) -> None:
    """In float64 to 1e-12; and fewer collectives."""
    world = 4 if "pp" in layout else 2
    small = SMALL | {"precision.params": "float64", "precision.compute": "float64"}
    run = moefold.load_run("deepseek_v3_proxy", small | {f"parallel.{name}": value for name, value in layout.items()})

    def work(groups: Groups) -> list[int]:
        calls, found = [], []
        for unit in (1, 1 << 20):
            # Buckets of 128 bytes, which hold one gradient, and of 128 MiB.
            monkeypatch.setattr("moefold.parallel.parallelize.MEBIBYTE", unit)
            before = sum(now.calls for now in groups["world"].ledger.traffic.values())
            found.append(one_step(run, groups))
            calls.append(sum(now.calls for now in groups["world"].ledger.traffic.values()) - before)
        (loss, one), (other_loss, other) = found
        assert loss == other_loss and one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-15)
        return calls

    for small_buckets, large_buckets in on_ranks(work, world, **layout):
        # Without data-parallel ranks only the gradients that tp ranks share are left to sum.
        assert large_buckets <= small_buckets - (5 if "tp" in layout else 10)
