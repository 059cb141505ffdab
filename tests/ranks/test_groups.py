"""Process groups: one handle per list of ranks, all-to-all of rows over a group, and errors that name the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from tests.support import on_ranks

import moefold
from moefold.comm.collectives import all_to_all_rows
from moefold.comm.process_groups import Groups
from moefold.comm.process_probe import state_of
from moefold.comm.spawn import _end, _Rank, spawn_ranks
from moefold.errors import ExchangeError, ExclusionError, RankError
from moefold.parallel.parallelize import build_local_model


def test_each_distinct_rank_list_gets_one_handle_and_lone_ranks_none() -> None:
    def work(groups: Groups) -> bool:
        # tp=2 and etp=2 are the same neighbours; cp=1 is a lone rank.
        assert groups["tp"].handle is groups["etp"].handle
        assert groups["cp"].handle is None
        return groups["ep"].handle is not groups["dp"].handle or groups["ep"].ranks == groups["dp"].ranks

    assert all(on_ranks(work, 4, tp=2, ep=2, etp=2))


def test_exchanges_on_another_thread_have_process_groups_of_their_own() -> None:
    """Here ep and dp are the same ranks. With one process group for both, sums of routers' counts met exchanges in
    another order on each rank, now and then, and a step hung."""
    small = {"model.num_layers": 2, "data.seq_len": 16, "data.global_batch": 4, "parallel.ep": 2}
    run = moefold.load_run("debug_tiny", small | {"parallel.schedule": "1f1b_overlapped"})

    def work(groups: Groups) -> None:
        with pytest.raises(ExchangeError, match=r"exchanges of ep run beside .* own_stream=True"):
            build_local_model(run, groups, torch.device("cpu"))

    on_ranks(work, 2, ep=2)

    def right(groups: Groups) -> bool:
        return groups["ep"].handle is not groups["dp"].handle and bool(
            build_local_model(run, groups, torch.device("cpu"))
        )

    assert all(on_ranks(right, 2, ep=2, schedule="1f1b_overlapped"))


def test_all_to_all_moves_rows_and_their_gradients_come_back() -> None:
    """Rank r sends r + p rows to peer p: uneven, and nothing at all from 0 to 0."""

    def work(groups: Groups) -> None:
        ep = groups["ep"]
        send = tuple(ep.index + peer for peer in range(ep.size))
        recv = tuple(peer + ep.index for peer in range(ep.size))
        rows = torch.full((sum(send), 2), float(ep.index)).requires_grad_()
        arrived = all_to_all_rows(rows, send=send, recv=recv, group=ep)
        assert arrived[:, 0].tolist() == [float(peer) for peer, count in enumerate(recv) for _ in range(count)]
        (arrived * (ep.index + 1)).sum().backward()
        assert rows.grad is not None
        assert rows.grad[:, 0].tolist() == [peer + 1.0 for peer, count in enumerate(send) for _ in range(count)]

    on_ranks(work, 3, ep=3)


def test_counts_that_do_not_add_up_are_refused_before_anything_moves() -> None:
    def work(groups: Groups) -> None:
        with pytest.raises(ExchangeError, match="add up to 3 but there are 2 rows"):
            all_to_all_rows(torch.zeros(2, 1), send=(1, 2), recv=(1, 2), group=groups["ep"])

    on_ranks(work, 2, ep=2)


def test_the_first_rank_to_fail_is_the_one_named() -> None:
    def work(rank: int) -> None:
        if rank == 2:
            raise ValueError("the cause")
        torch.distributed.barrier()

    with pytest.raises(RankError, match="rank 2: ValueError: the cause"):
        spawn_ranks(work, 3, seconds=20)


def test_a_rank_that_asks_for_an_exclusion_is_heard() -> None:
    def work(rank: int) -> int:
        raise ExclusionError("ranks 1 and 2 are slow", (1, 2))

    with pytest.raises(RankError, match=r"ranks 1 and 2 are slow$") as caught:
        spawn_ranks(work, 3)
    # Whoever supervises starts the others again: nothing is left to the user.
    assert caught.value.exclude == (1, 2) and not caught.value.mendable


def test_a_silent_rank_is_named_when_the_time_is_up() -> None:
    def work(rank: int) -> None:
        while rank == 1:
            pass

    with pytest.raises(RankError, match="no result within 1 s"):
        spawn_ranks(work, 2, seconds=1.0)


# A killed process whose other thread waits for a disk looks like this: its main thread has ended, nothing is closed.
ENDED_BUT_FOR_A_THREAD = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


def test_a_lost_rank_is_one_that_a_signal_ended() -> None:
    """None has closed its pipe: killed by a signal, killed but for a thread, exited since it lost a peer, running."""
    kill_itself, running = "import os; os.kill(os.getpid(), 9)", "import time; time.sleep(60)"
    ways = kill_itself, ENDED_BUT_FOR_A_THREAD, "raise SystemExit(1)", running
    ranks = [_Rank(subprocess.Popen([sys.executable, "-S", "-c", way]).pid, os.pipe()[0]) for way in ways]
    for rank in ranks[:3]:
        while state_of(rank.pid) != "Z":
            time.sleep(0.01)
    _end(ranks)
    assert [rank.done_at is not None for rank in ranks] == [True, True, False, False]
    assert [rank.exit_code for rank in ranks] == [-signal.SIGKILL, -signal.SIGKILL, 1, -signal.SIGKILL]
