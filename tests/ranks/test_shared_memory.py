"""All-to-all through shared memory: any sizes and dtypes, slow ranks, ranks that end, memory that grows."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm import process_groups, shared_memory
from moefold.comm.collectives import all_to_all_rows
from moefold.comm.shared_memory import SharedMemory, in_order, open_shared_memory
from moefold.comm.sorted_exchange import from_experts, to_experts
from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.errors import MoefoldError
from moefold.moe.permute import by_expert, by_source
from moefold.parallel.parallelize import groups_of

_WAIT = timedelta(seconds=60)
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float64)


def opened(rank: int, world: int, seconds: float = 60.0) -> SharedMemory:
    assert dist.group.WORLD is not None
    found = open_shared_memory(dist.group.WORLD, rank, world, "ep", seconds)
    assert found is not None
    return found


def exchange(memory: SharedMemory, rank: int, sizes: list[list[int]], dtype: torch.dtype, number: int) -> None:
    check_exchange(
        lambda received, rows, recv, send: memory.all_to_all(received, rows, in_order(recv), in_order(send)),
        *(rank, sizes, dtype, number),
    )


def check_exchange(
    all_to_all: Callable[[Tensor, Tensor, list[int], list[int]], None],
    rank: int,
    sizes: list[list[int]],
    dtype: torch.dtype,
    number: int,
) -> None:
    """``sizes[i][j]``: rows from rank i to rank j. Every row tells where it came from, and in which exchange."""
    world = len(sizes)
    rows = [torch.full((sizes[rank][j], 3), (number * 16 + rank * 4 + j) % 251).to(dtype) for j in range(world)]
    expected = [torch.full((sizes[i][rank], 3), (number * 16 + i * 4 + rank) % 251).to(dtype) for i in range(world)]
    received = torch.empty(sum(sizes[i][rank] for i in range(world)), 3, dtype=dtype)
    all_to_all(received, torch.cat(rows), [sizes[i][rank] for i in range(world)], sizes[rank])
    assert torch.equal(received, torch.cat(expected)), number


def drawn_sizes(draw: random.Random, world: int, most: int) -> list[list[int]]:
    """A third of all messages are empty."""
    return [[draw.randrange(most) * (draw.random() > 1 / 3) for _ in range(world)] for _ in range(world)]


@pytest.mark.parametrize("world", [2, 3, 8])
def test_random_exchanges_arrive(world: int) -> None:
    """Some of them larger than a slot: segments grow, on one rank earlier than on another."""

    def work(rank: int) -> None:
        memory, draw = opened(rank, world), random.Random(7)
        for number in range(60):
            most = 1 << draw.randrange(1, 18 if number % 20 == 19 else 10)
            exchange(memory, rank, drawn_sizes(draw, world, most), DTYPES[number % len(DTYPES)], number)

    spawn_ranks(work, world, seconds=120)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_rank_reads_what_was_sent_to_it(slow: int) -> None:
    """The others may be an exchange ahead; what the slow one has not read is not written over."""

    def work(rank: int) -> None:
        memory, draw = opened(rank, 3), random.Random(1)
        for number in range(12):
            if rank == slow:
                time.sleep(0.01 * draw.random())
            exchange(memory, rank, drawn_sizes(random.Random(number), 3, 400), torch.float32, number)

    spawn_ranks(work, 3, seconds=60)


def test_a_slot_that_is_written_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant with one slot: rank 0 sends its next rows while rank 1 has not read the last ones."""
    monkeypatch.setattr(shared_memory, "_SLOTS", 1)

    def work(rank: int) -> None:
        memory, wait = opened(rank, 2), SharedMemory._wait

        def wait_and_sleep(peer: int, number: int) -> None:
            wait(memory, peer, number)
            time.sleep(0.01 * rank)

        memory._wait = wait_and_sleep  # type: ignore[method-assign]
        for number in range(40):
            exchange(memory, rank, [[0, 3000], [0, 0]], torch.float32, number)

    with pytest.raises(MoefoldError, match="AssertionError"):
        spawn_ranks(work, 2, seconds=30)


def test_counters_wrap() -> None:
    def work(rank: int) -> None:
        memory = opened(rank, 2)
        memory._exchanges = 2**32 - 4
        memory._segments[rank].announced.value = 2**32 - 4
        dist.barrier()
        for number in range(8):
            exchange(memory, rank, [[5, 6], [7, 8]], torch.float32, number)

    spawn_ranks(work, 2, seconds=30)


def test_a_rank_that_ends_is_noticed() -> None:
    """Within seconds, by who waits for it, and by name."""

    def work(rank: int) -> str:
        memory = opened(rank, 3)
        exchange(memory, rank, [[1] * 3] * 3, torch.float32, 0)
        if rank == 2:
            os._exit(3)
        began = time.monotonic()
        try:
            exchange(memory, rank, [[1] * 3] * 3, torch.float32, 1)
        except MoefoldError as error:
            print(f"{error} after {time.monotonic() - began < 5}", flush=True)
            assert "rank 2 has ended" in str(error) and time.monotonic() - began < 5
            raise
        raise AssertionError("the exchange ended without rank 2")

    with pytest.raises(MoefoldError, match=r"exit code 3|ended with"):
        spawn_ranks(work, 3, seconds=30, grace=5.0)


def test_a_rank_that_stays_away_is_noticed() -> None:
    def work(rank: int) -> None:
        memory = opened(rank, 2, seconds=1.0)
        if rank == 0:
            with pytest.raises(MoefoldError, match="rank 1 is absent for 1 s"):
                exchange(memory, rank, [[1, 1], [1, 1]], torch.float32, 0)
        else:
            time.sleep(2.5)

    spawn_ranks(work, 2, seconds=30)


@pytest.mark.parametrize("why", ["another host", "cannot be opened"])
def test_all_ranks_agree_that_it_cannot_be_used(why: str) -> None:
    def work(rank: int) -> None:
        assert dist.group.WORLD is not None
        if rank == 1 and why == "another host":
            shared_memory._host = lambda: (0, 0, 0, 0)  # type: ignore[assignment]
        if rank == 1 and why == "cannot be opened":

            def refuse(*_: object) -> SharedMemory:
                raise PermissionError

            shared_memory.SharedMemory = refuse  # type: ignore[assignment,misc]
        assert open_shared_memory(dist.group.WORLD, rank, 2, "ep", 10.0) is None

    spawn_ranks(work, 2, seconds=30)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_between_hosts_exchanges_arrive_in_pieces(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end inside rows; some ranks send nothing to some."""
    monkeypatch.setattr(process_groups, "_PIECE_BYTES", 40)

    def work(rank: int) -> None:
        shared_memory._host = lambda: (rank, 0, 0, 0)  # type: ignore[assignment]
        ep, draw = groups_of(RunConfig(parallel=ParallelConfig(ep=world)), world, rank, _WAIT)["ep"], random.Random(5)
        assert ep.memory() is None
        for number in range(40):
            sizes = drawn_sizes(draw, world, 1 << draw.randrange(1, 8))
            check_exchange(ep.all_to_all, rank, sizes, DTYPES[number % len(DTYPES)], number)

    spawn_ranks(work, world, seconds=60)


@pytest.mark.parametrize(("world", "experts"), [(2, 3), (4, 2), (3, 1)])
def test_rows_sorted_by_the_exchange_are_those_sorted_afterwards(world: int, experts: int) -> None:
    """Values and gradients of both ways, against gloo's all-to-all and a pass that sorts."""

    def work(rank: int) -> None:
        run = RunConfig(parallel=ParallelConfig(ep=world))
        shared = groups_of(run, world, rank, _WAIT)
        by_gloo = groups_of(replace(run, parallel=replace(run.parallel, cpu_exchange="gloo")), world, rank, _WAIT)
        ep = shared["ep"]
        assert ep.memory() is not None and by_gloo["ep"].memory() is None
        draw = random.Random(3)
        for _ in range(6):
            # Rows from each rank to each expert of each rank.
            sizes = [[[draw.randrange(5) for _ in range(experts)] for _ in range(world)] for _ in range(world)]
            sizes_We = [sizes[source][rank] for source in range(world)]
            send, recv = [sum(each) for each in sizes[rank]], [sum(each) for each in sizes_We]
            generator = torch.Generator().manual_seed(rank)
            rows = torch.randn(sum(send), 4, generator=generator).requires_grad_()
            again = rows.detach().clone().requires_grad_()
            factor = torch.randn(sum(recv), 4, generator=generator)
            sorted_here = to_experts(rows, send, sizes_We, ep)
            home = from_experts(sorted_here * factor, sizes_We, send, ep)
            there = all_to_all_rows(again, send=tuple(send), recv=tuple(recv), group=by_gloo["ep"])
            sorted_later = by_expert(there, sizes_We)
            back = by_source(sorted_later * factor, sizes_We)
            expected = all_to_all_rows(back, send=tuple(recv), recv=tuple(send), group=by_gloo["ep"])
            assert torch.equal(sorted_here, sorted_later) and torch.equal(home, expected)
            for each in (home, expected):
                (each * torch.arange(4.0)).sum().backward()
            assert torch.equal(rows.grad, again.grad)

    spawn_ranks(work, world, seconds=60)
