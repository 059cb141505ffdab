"""The adapter of torch's symmetric memory against a fake of it: values, gradients, and when a buffer may be reused."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from tests.engines.dispatch_cases import CHOICES, DIM, EXPERTS, TOKENS_OF_RANK, WORLD, assert_equals_local
from tests.engines.fake_symm_mem import FakeSymmetricMemory
from tests.engines.rank_threads import ContractError, ThreadProcessGroup

from moefold.comm.process_groups import Group
from moefold.moe.dispatch.base import SyncSplitSizes
from moefold.moe.dispatch.symmetric_memory import (
    SymmetricExchange,
    SymmetricMemoryDispatcher,
    _BufferSet,
    buffer_sizes,
)

SIZES = buffer_sizes(EXPERTS, WORLD, CHOICES, max(TOKENS_OF_RANK), None, row_bytes=DIM * 8, prob_bytes=4)
# As many rows as any rank has tokens, so that nothing is dropped.
CAPACITY = max(TOKENS_OF_RANK)
PADDED = buffer_sizes(EXPERTS, WORLD, CHOICES, 0, CAPACITY, row_bytes=DIM * 8, prob_bytes=4)


def make(
    group: Group, exchange: type[SymmetricExchange] = SymmetricExchange, sizes: tuple[int, ...] = SIZES
) -> SymmetricMemoryDispatcher:
    fake = FakeSymmetricMemory(cast(ThreadProcessGroup, group.connected))
    return SymmetricMemoryDispatcher(EXPERTS, WORLD, exchange(fake.module(), fake, group, type(SIZES)(*sizes)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dropping", [False, True])
def test_symmetric_memory_equals_the_local_dispatcher(dropping: bool, dtype: torch.dtype) -> None:
    assert_equals_local(make, dropping, dtype)


class NoCounts(SyncSplitSizes):
    def arriving(self, rows_from_We: torch.Tensor) -> list[list[int]]:
        raise AssertionError("a count is read on the host")


@pytest.mark.parametrize("dropping", [False, True])
def test_with_a_capacity_nothing_is_read_on_the_host(dropping: bool) -> None:
    def padded(group: Group) -> SymmetricMemoryDispatcher:
        exchange = make(group, sizes=PADDED).exchange
        return SymmetricMemoryDispatcher(EXPERTS, WORLD, exchange, CAPACITY, NoCounts())

    assert_equals_local(padded, dropping)


class OneSet(SymmetricExchange):
    def _next_set(self, device: torch.device) -> _BufferSet:
        super()._next_set(device)
        return self._sets[0]


def test_one_set_of_buffers_would_be_overwritten_while_peers_read_it() -> None:
    with pytest.raises(ContractError, match="changed while peers may still read it"):
        assert_equals_local(lambda group: make(group, OneSet), False)


def test_buffers_without_room_for_the_worst_case_are_overrun() -> None:
    with pytest.raises(ContractError, match=r"rows are written into a buffer of 9"):
        assert_equals_local(lambda group: make(group, sizes=SIZES._replace(received_rows=9)), False)


def test_buffers_hold_every_token_for_this_rank_and_a_row_for_experts_without_any() -> None:
    # 4 ranks, 7 tokens each, at most 2 of 3 choices on a rank of 2 experts; rows of 16 bytes and a prob of 4.
    assert buffer_sizes(8, 4, 3, 7, None, row_bytes=16, prob_bytes=4) == (8, 21, 4 * 7 * 2 + 2, 32)
    assert buffer_sizes(8, 4, 3, 7, 5, row_bytes=16, prob_bytes=4) == (8, 8 * 5, 4 * 2 * 5, 32)
