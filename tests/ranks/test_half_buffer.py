"""Gradients that are sent as bfloat16 and summed in float32: each part is rounded once, no sum is, in no new memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support import on_ranks
from torch import Tensor

from moefold.comm import half_buffer
from moefold.comm.half_buffer import cast_to_first_half, start_half_buffer_sum
from moefold.comm.message_codecs import BFloat16Parts, sum_parts
from moefold.comm.process_groups import Groups
from moefold.parallel.gradient_buckets import reduce_bucket

RANKS, EACH, REST = 4, 700, 37


@pytest.mark.parametrize("size", [0, 1, 5, 1023, 1024, 1025, 2048, 5001, 100_003])
def test_the_cast_in_place_is_that_of_a_copy(size: int) -> None:
    flat = torch.randn(size)
    wanted = flat.bfloat16()
    narrow = cast_to_first_half(flat)
    assert torch.equal(narrow, wanted) and narrow.data_ptr() == flat.data_ptr()


def gradient_of(rank: int, size: int = RANKS * EACH + REST) -> Tensor:
    """Of many magnitudes: else float32 has room for all bits of a sum of bfloat16 numbers, in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator) * 10 ** (-8 * torch.rand(size, generator=generator))


def expected(owned: slice) -> Tensor:
    """Written out: bfloat16 parts, added in float32, rank after rank."""
    total = torch.zeros(owned.stop - owned.start)
    for rank in range(RANKS):
        total = total + gradient_of(rank)[owned].bfloat16().float()
    return total


def sums_are_exact(groups: Groups) -> None:
    group, flat = groups["dense_shard"], gradient_of(groups.rank)
    under_way = start_half_buffer_sum(flat, EACH, group)
    found = under_way.result()
    assert found.data_ptr() == flat.data_ptr() and found.dtype == torch.float32
    assert torch.equal(found[:EACH], expected(slice(EACH * groups.rank, EACH * (groups.rank + 1))))
    assert len(found) == EACH + REST * (groups.rank == RANKS - 1)
    if len(found) > EACH:
        wanted = sum(gradient_of(rank)[RANKS * EACH :] for rank in range(RANKS))
        torch.testing.assert_close(found[EACH:], wanted)
    # Half of float32's bytes; the few elements that do not divide are summed in float32.
    assert group.ledger.of("all_to_all", group.name).bytes_sent == 0.5 * RANKS * EACH * 4
    assert group.ledger.of("all_reduce", group.name).bytes_sent == REST * 4
    assert group.ledger.of("reduce_scatter", group.name).calls == 0


def test_flat_buffers_sum_rounded_parts_in_float32() -> None:
    on_ranks(sums_are_exact, RANKS)


def test_a_buffer_smaller_than_the_group_is_all_rest() -> None:
    def work(groups: Groups) -> None:
        found = start_half_buffer_sum(gradient_of(groups.rank, 3), 0, groups["dense_shard"]).result()
        wanted = sum(gradient_of(rank, 3) for rank in range(2))
        assert len(found) == 3 * groups.rank and torch.equal(found, wanted[: len(found)])

    on_ranks(work, 2)


def test_buckets_sum_rounded_parts_in_float32() -> None:
    """Gradients of a step that FSDP reduces once, with replicas, whose sums are in float32."""
    shapes = ((6, 5), (9,), (4, 3, 2))

    def gradients(rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(shape, generator=generator) for shape in shapes]

    def work(groups: Groups) -> None:
        shard, replicate = groups["dense_shard"], groups["dense_replicate"]
        found = reduce_bucket(gradients(groups.rank), replicate, shard, torch.float32, BFloat16Parts())
        rounded = [[grad.bfloat16().float() for grad in gradients(rank)] for rank in range(4)]
        copies = [shard.ranks, tuple(rank for rank in range(4) if rank not in shard.ranks)]
        for index, part in enumerate(found):
            of_copies = [rounded[first][index] + rounded[second][index] for first, second in copies]
            whole = of_copies[0] + of_copies[1]
            dim = next(dim for dim in range(whole.dim()) if whole.shape[dim] != part.shape[dim])
            assert torch.equal(part, whole.chunk(2, dim)[shard.index])
        # Two bytes of each element, the last one of nine padded.
        assert shard.ledger.of("all_to_all", shard.name).bytes_sent == 2 * (30 + 10 + 24)

    on_ranks(work, 4, dp_replicate=2)


def in_bfloat16(parts_WN: Tensor, total_N: Tensor) -> None:
    total = parts_WN[0]
    for part_N in parts_WN[1:]:
        total = total + part_N
    total_N.copy_(total)


def cast_left_out(flat: Tensor) -> Tensor:
    """The lower half of every float32 is sent for its upper half."""
    return flat.view(torch.bfloat16)[: flat.numel()]


def overlapping(flat: Tensor) -> Tensor:
    """From the back: elements are overwritten before they are read."""
    narrow, size = flat.view(torch.bfloat16), flat.numel()
    for start in range(size - size % 512, -1, -512):
        narrow[start : start + 512][: size - start] = flat[start : start + 512].clone()
    return narrow[:size]


MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "bfloat16 accumulation": ("sum_parts", in_bfloat16),
    "another order of the ranks": ("sum_parts", lambda parts_WN, total_N: sum_parts(parts_WN.flip(0), total_N)),
    "one rank left out": ("sum_parts", lambda parts_WN, total_N: sum_parts(parts_WN[1:], total_N)),
    "the cast is left out": ("cast_to_first_half", cast_left_out),
    "a cast that overwrites": ("cast_to_first_half", overlapping),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_buffer, *MUTANTS[mutant])

    def work(groups: Groups) -> bool:
        try:
            sums_are_exact(groups)
        except AssertionError:
            return True
        return False

    assert any(on_ranks(work, RANKS))
