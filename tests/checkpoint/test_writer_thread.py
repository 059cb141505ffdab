"""One thread per saver; whatever ends it, or keeps it from starting, is a failed save and never a wait."""

from __future__ import annotations

import _thread
import gc
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support import on_ranks

from moefold.checkpoint import save, writer_thread
from moefold.checkpoint.save import Saver
from moefold.checkpoint.step_dirs import committed_steps
from moefold.checkpoint.tensor_spec import Chunk
from moefold.checkpoint.writer_thread import Job, WriterThread
from moefold.comm.process_groups import Group, Groups, Ledger
from moefold.errors import CheckpointError

ALONE = Group("world", (0,), 0, None, Ledger())


def chunks(rank: int = 0, ranks: int = 1) -> list[Chunk]:
    rows = 64 // ranks
    box = (slice(rank * rows, (rank + 1) * rows), slice(0, 1000))
    return [Chunk("parameter/x", (64, 1000), box, torch.ones(rows, 1000))]


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def soon(is_so: Callable[[], bool]) -> bool:
    for _ in range(500):
        if is_so():
            return True
        time.sleep(0.01)
    return False


def test_jobs_run_in_one_thread_one_after_the_other() -> None:
    thread = WriterThread()
    jobs = [Job(threading.get_native_id) for _ in range(5)]
    for job in jobs:
        thread.submit(job)
    for job in jobs:
        job.wait()
    assert len({job.result for job in jobs}) == 1 and jobs[0].result != threading.get_native_id()


@pytest.mark.parametrize("error", [MemoryError(), SystemExit(3), CheckpointError("full")], ids=repr)
def test_whatever_a_job_raises_is_its_error_and_the_next_one_runs(error: BaseException) -> None:
    def fail() -> None:
        raise error

    thread = WriterThread()
    job, after = Job(fail), Job(lambda: 7)
    thread.submit(job)
    thread.submit(after)
    after.wait()
    assert job.ended and job.error is error and after.result == 7


def die(*_: object) -> None:
    raise MemoryError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_at_birth_fails_its_job_and_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = WriterThread()
    thread.close()
    assert soon(lambda: not thread.alive)
    serve = writer_thread._serve
    monkeypatch.setattr(writer_thread, "_serve", die)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    job = Job(lambda: 1)
    thread.submit(job)
    job.wait()
    with pytest.raises(CheckpointError, match="has died"):
        _ = job.result
    monkeypatch.setattr(writer_thread, "_serve", serve)
    after = Job(lambda: 2)
    thread.submit(after)
    after.wait()
    assert after.result == 2


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_a_job_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", no_thread)
    thread, job = WriterThread(), Job(lambda: 1)
    thread.submit(job)
    assert job.ended and "cannot be started: can't start new thread" in str(job.error)
    monkeypatch.undo()
    after = Job(lambda: 2)
    thread.submit(after)
    after.wait()
    assert after.result == 2


@pytest.mark.parametrize("fault", ["no thread", "dies at birth", "no memory to write", "no memory to copy"])
def test_lack_of_memory_on_one_rank_is_a_failed_save_on_both(tmp_path: Path, fault: str) -> None:
    """In the first save of the run, on rank 1; the second one is committed."""

    def work(groups: Groups) -> None:
        patch = pytest.MonkeyPatch()
        if groups.rank == 1:
            patch.setattr("sys.unraisablehook", lambda _: None)
            if fault == "no thread":
                patch.setattr(_thread, "start_new_thread", no_thread)
            elif fault == "dies at birth":
                patch.setattr(writer_thread, "_serve", die)
            elif fault == "no memory to write":
                patch.setattr(save, "write_shard", die)
            else:
                patch.setattr(Saver, "_copy", die)
        saver = Saver(tmp_path, groups["world"], 0)
        with pytest.raises(CheckpointError, match="step 1 was not written: rank 1"):
            saver.begin(1, chunks(groups.rank, 2), {})
            saver.finish()
        patch.undo()
        saver.begin(2, chunks(groups.rank, 2), {})
        assert saver.finish() == 2

    on_ranks(work, 2)
    assert committed_steps(tmp_path) == [2]


def test_a_real_limit_on_memory_fails_the_save_and_not_the_rank(tmp_path: Path) -> None:
    """RLIMIT_AS leaves no room for the copy of 256 MB; without it the next save is committed."""

    def work(groups: Groups) -> None:
        saver = Saver(tmp_path, groups["world"], 0)
        big = torch.ones(1 << 26) if groups.rank == 0 else None
        held = [] if big is None else [Chunk("parameter/x", (1 << 26,), (slice(0, 1 << 26),), big)]
        before = resource.getrlimit(resource.RLIMIT_AS)
        if groups.rank == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (1 << 24), before[1]))
        with pytest.raises(CheckpointError, match="step 1 was not written: rank 0"):
            saver.begin(1, held, {})
            saver.finish()
        resource.setrlimit(resource.RLIMIT_AS, before)
        saver.begin(2, held, {})
        assert saver.finish() == 2

    on_ranks(work, 2)


@pytest.mark.slow
def test_many_saves_need_no_more_threads_descriptors_or_memory(tmp_path: Path) -> None:
    """Half of them fail."""

    def used() -> tuple[int, int]:
        return num_threads(), len(os.listdir("/proc/self/fd"))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def work(groups: Groups) -> None:
        saver, patch = Saver(tmp_path, groups["world"], 0), pytest.MonkeyPatch()
        before, at_first = used(), 0
        for step in range(1, 201):
            if step % 2:
                patch.setattr(save, "write_table", die)
            saver.begin(step, chunks(), {})
            if step % 2:
                with pytest.raises(CheckpointError):
                    saver.finish()
                patch.undo()
            else:
                assert saver.finish() == step
            if step == 20:
                gc.collect()
                at_first = resident()
        gc.collect()
        assert used() == before
        assert resident() < at_first * 1.01

    on_ranks(work, 1)


def test_the_thread_ends_with_its_saver(tmp_path: Path) -> None:
    before = num_threads()
    for step in range(20):
        saver = Saver(tmp_path, ALONE, 0)
        saver.begin(step, chunks(), {})
        saver.finish()
    del saver
    gc.collect()
    assert soon(lambda: num_threads() <= before)
