"""What a dry run is made of: adding up what came and went, rows without a router, results from memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moefold.batching.zigzag import held_spans
from moefold.config.loading import override
from moefold.dryrun.balanced_splits import BalancedSplitSizes
from moefold.dryrun.fake_world import CachedFakeMode
from moefold.dryrun.storage_tracker import Event, Mark, StorageTracker, peak_of
from moefold.moe.topk import choose_balanced
from moefold.recipes.catalog import recipe
from moefold.topology.folded_layout import fold, shard_sizes


def test_the_peak_is_found_and_named() -> None:
    events = [Event(0, 10), Event(1, 5), Event(1, -5), Event(2, 7), Event(3, 1), Event(2, -7), Event(3, 4)]
    marks = [Mark(3, "first"), Mark(5, "second"), Mark(7, "third")]
    peak = peak_of(events, {0: "parameters", 1: "activations", 2: "activations"}, marks)
    assert (peak.total, peak.when) == (18, "second")
    assert (
        peak.by_category["parameters"] == 10 and peak.by_category["activations"] == 7 and peak.by_category["other"] == 1
    )
    assert peak.category_peaks["activations"] == 7 and peak.category_peaks["other"] == 5
    assert peak.alive == {0: 10, 2: 7, 3: 1}


def test_a_storage_counts_once_and_until_it_is_freed() -> None:
    with StorageTracker() as watch:
        x = torch.zeros(100)
        view = x[10:20].view(2, 5)
        copy = view.double()
        del x, copy
        view.add_(1)
        del view
    assert [event.change for event in watch.events] == [400, 80, -80, -400]


def test_emptied_storages_count_as_empty() -> None:
    with StorageTracker() as watch:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(400)
        del x
    assert [event.change for event in watch.events] == [400, -400, 400, -400]


@pytest.mark.parametrize("cut", [{"tp": 2, "ep": 4}, {"cp": 2, "ep": 2, "etp": 2}, {"cp": 2, "tp": 2, "ep": 4}])
def test_rows_are_those_of_the_balanced_router(cut: dict[str, int]) -> None:
    """Uneven shards: 2 documents of 23 and 10 tokens, top 3 of 8 experts."""
    lengths, world = (23, 10), 8
    changes = [f"--parallel.{axis}={size}" for axis, size in cut.items()]
    run = override(recipe("debug_tiny"), ["--model.moe.top_k=3", *changes])
    layout, context = fold(run.parallel, world), cut.get("cp", 1)

    def rows_of(rank: int) -> Tensor:
        spans = held_spans(lengths, layout.index("cp", rank), context)
        held = torch.cat([torch.arange(start, stop) for start, stop in spans])
        mine = held.split(shard_sizes(len(held), layout.size("tp")))[layout.index("tp", rank)]
        return choose_balanced(mine, 8, 3).flatten().bincount(minlength=8)

    nothing = torch.zeros(0)
    for rank in range(world):
        counts = BalancedSplitSizes(run, layout, rank, lengths, context)
        assert counts.leaving(nothing) == rows_of(rank).tolist()
        first = layout.index("ep", rank) * (8 // cut["ep"])
        experts = slice(first, first + 8 // cut["ep"])
        sources = [peer for part in layout.ranks("etp", rank) for peer in layout.ranks("ep", part)]
        assert counts.arriving(nothing) == [rows_of(peer)[experts].tolist() for peer in sources]
        block = sum(rows_of(peer)[experts] for peer in layout.ranks("expert_block", rank))
        assert counts.gathered(nothing) == block.tolist()


def _work(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Results of every kind: new, viewed, changed in place, several at once, reshaped in place."""
    y = nn.functional.linear(x, weight)
    left, right = y.chunk(2, dim=1)
    y.mul_(2)
    values, order = left.sort(dim=0)
    flipped = right.clone().t_()
    return [y, left, right, values, order, flipped, x.expand(3, *x.shape), y.to(torch.bfloat16), y[:, ::2]]


def _described(tensors: list[Tensor]) -> list[object]:
    """With the first tensor that each shares its storage with."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [
        (tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), storages.index(storage))
        for tensor, storage in zip(tensors, storages)
    ] + [tensor.untyped_storage().nbytes() for tensor in tensors]


def test_results_from_memory_are_like_real_ones() -> None:
    x, weight = torch.zeros(6, 4), torch.zeros(8, 4)
    real = _described([x, *_work(x, weight)])
    with CachedFakeMode():
        for _ in range(3):
            x, weight = torch.empty(6, 4), torch.empty(8, 4)
            assert _described([x, *_work(x, weight)]) == real


def test_values_that_torch_knows_stay_true() -> None:
    """Optimizers count their steps in tensors and read them back."""
    with CachedFakeMode():
        steps = torch.tensor(0.0)
        for number in range(1, 4):
            steps += 1
            assert steps.item() == number
