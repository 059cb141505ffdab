"""Ring attention's memory does not depend on how many ranks share a document."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.peak_memory import PeakMemory
from tests.ranks.test_context import LocalModel

from moefold.comm.process_groups import Group, Groups, Ledger
from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ParallelConfig
from moefold.parallel import ring_attention as context_ring
from moefold.parallel.context_parallel import ContextParallelCore, ring_groups
from moefold.topology.folded_layout import fold

# heads, kv heads, qk dim, v dim, format, sinks
SHAPES = {
    "grouped": (16, 8, 8, 8, torch.float32, False),
    "latent": (8, 8, 12, 8, torch.float32, False),
    "bfloat16, sinks": (32, 8, 16, 16, torch.bfloat16, True),
}


def peak(cp: Group, tokens: int, shape: tuple[Any, ...]) -> int:
    """Bytes at most, inputs and gradients included, of forward and backward on this rank."""
    num_heads, num_kv_heads, dim, value_dim, dtype, with_sinks = shape
    with PeakMemory() as memory:
        sizes = ((num_heads, dim), (num_kv_heads, dim), (num_kv_heads, value_dim))
        leaves = [torch.randn(tokens, *size, dtype=dtype, requires_grad=True) for size in sizes]
        sinks = torch.randn(num_heads, requires_grad=True) if with_sinks and cp.size > 1 else None
        grad = torch.randn(tokens, num_heads, value_dim, dtype=dtype)
        local_model = LocalModel((tokens * cp.size,), cp.size, cp.index)
        out = ContextParallelCore(ring_groups({cp.size: cp}))(
            *leaves, local_model, scale=0.3, window=None, sinks_H=sinks
        )
        torch.autograd.grad(out, leaves, grad)
    return memory.peak


def peaks(tokens: int, shape: tuple[Any, ...]) -> list[int]:
    """Of the worst rank, on 1, 2, 4 and 8 of them."""

    def worst(size: int) -> int:
        layout = fold(ParallelConfig(cp=size), size)

        def live(rank: int) -> int:
            return peak(Groups(layout, rank, Ledger(), timedelta(seconds=100))["cp"], tokens, shape)

        return max(spawn_ranks(live, size, seconds=300))

    return [worst(size) for size in (1, 2, 4, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_memory_is_flat(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process's fused attention is the measure: no ring takes more than a tenth on top."""
    monkeypatch.setattr(context_ring, "MIN_MESSAGE_BYTES", 1 << 10)
    alone, *around = peaks(256, SHAPES[name])
    print(f"peak bytes on 1, 2, 4 and 8 ranks, 256 tokens each: {alone}, {around}")
    assert max(around) <= 1.1 * alone
    assert max(around) <= 1.1 * min(around)


@pytest.mark.slow
def test_memory_is_flat_with_many_tokens() -> None:
    alone, *around = peaks(2048, SHAPES["grouped"])
    print(f"peak bytes on 1, 2, 4 and 8 ranks, 2048 tokens each: {alone}, {around}")
    assert max(around) <= 1.1 * alone
    assert max(around) <= 1.1 * min(around)


def test_the_tracker_counts_what_lives() -> None:
    with PeakMemory() as memory:
        a = torch.zeros(1000)
        b = a + 1
        view = b[:10]
        del a, b
        assert memory.live == 4000
        del view
        c = torch.zeros(500)
        assert (memory.live, memory.peak) == (2000, 8000)
    del c
