"""A save that fails: tried again, skipped or the end of the run, as `train.saving` says, on all ranks alike."""

from __future__ import annotations

import errno
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.test_checkpoint_background import ALONE, check_all, chunks
from tests.save_faults import measure
from tests.support import on_ranks

import moefold
from moefold import Callback, Control, StepRecord, Trainer, load_run
from moefold.checkpoint import files, save, save_failures
from moefold.checkpoint.files import free_bytes
from moefold.checkpoint.run_lock import take_incarnation
from moefold.checkpoint.save import Saver
from moefold.checkpoint.save_failures import FailurePolicy, agreed_reason, describe
from moefold.checkpoint.step_dirs import committed_steps, final_path, verify
from moefold.checkpoint.tensor_spec import Chunk
from moefold.checkpoint.writer_thread import Job
from moefold.comm.process_groups import Groups
from moefold.config.run import RunConfig
from moefold.errors import CheckpointError, FencedError
from moefold.train.callbacks.jsonl import JsonLines

SKIP = FailurePolicy(retries=3, on_failure="skip", max_failures=3, free_space=1.0)


def fails(times: int, code: int = errno.ENOSPC) -> Callable[..., None]:
    """Raises the first few times."""
    left, fsync = [times], files.fsync

    def now_and_then(descriptor: int) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    return now_and_then


def until_settled(saver: Saver) -> int:
    """Steps until nothing is in progress."""
    steps = 0
    while saver.in_progress is not None:
        saver.advance()
        steps += 1
        time.sleep(0.01)
        assert steps < 2000
    return steps


@pytest.mark.parametrize("background", [True, False], ids=["background", "waiting"])
def test_it_is_tried_again_from_its_copies_while_training_goes_on(tmp_path: Path, background: bool) -> None:
    """Rank 1 fails twice; by then the tensors hold other numbers."""

    def work(groups: Groups) -> list[tuple[int, int | None]]:
        patch = pytest.MonkeyPatch()
        if groups.rank == 1:
            patch.setattr(files, "fsync", fails(2))
        saver = Saver(tmp_path, groups["world"], 0, background=background, policy=SKIP)
        held = chunks(groups["world"], 3)
        saver.begin(3, held, {"step": 3})
        for chunk in held:
            chunk.tensor.fill_(-1.0)
        until_settled(saver)
        failed, _ = saver.take_failures()
        assert all("rank 1: " in each.reason and "No space left" in each.reason for each in failed)
        return [(each.retries_left, each.retry_after) for each in failed]

    assert on_ranks(work, 2) == [[[3, 1], [2, 2]]] * 2
    assert check_all(tmp_path) == [3]


def test_after_the_last_retry_it_is_skipped_and_the_next_one_is_written(tmp_path: Path) -> None:
    def work(groups: Groups) -> list[str]:
        patch = pytest.MonkeyPatch()
        saver = Saver(tmp_path, groups["world"], 0, policy=SKIP)
        saver.begin(1, chunks(groups["world"], 1), {"step": 1})
        assert saver.finish() == 1
        if groups.rank == 0:
            patch.setattr(files, "fsync", fails(4, errno.EDQUOT))
        saver.begin(2, chunks(groups["world"], 2), {"step": 2})
        steps = until_settled(saver)
        # They wait for 1 + 2 + 4 steps.
        assert steps >= 7 and committed_steps(tmp_path) == [1]
        said = [str(each) for each in saver.take_failures()[0]]
        saver.begin(3, chunks(groups["world"], 3), {"step": 3})
        assert saver.finish() == 3
        return said

    first, second = on_ranks(work, 2)
    assert first == second and len(first) == 4
    assert "the checkpoint of step 2 was not written: rank 0: " in first[0] and "quota" in first[0]
    assert "tried again in 1 step (3 left)" in first[0] and "tried again in 4 steps (1 left)" in first[2]
    assert first[3].endswith("it is skipped, and older ones are as they were")
    assert check_all(tmp_path) == [1, 3]


def test_a_save_that_is_due_takes_the_place_of_one_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(tmp_path, ALONE, 0, policy=FailurePolicy(retries=3, retry_after=100, on_failure="skip"))
    monkeypatch.setattr(files, "fsync", fails(1))
    saver.begin(1, chunks(ALONE, 1), {"step": 1})
    while not saver.take_failures()[0]:
        saver.advance()
    assert saver.in_progress == 1
    saver.begin(2, chunks(ALONE, 2), {"step": 2})
    assert saver.finish() == 2 and check_all(tmp_path) == [2]
    (given_up,) = saver.take_failures()[0]
    assert given_up.step == 1 and given_up.retry_after is None


def test_a_job_that_fails_while_it_is_asked_about_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(tmp_path, ALONE, 0, policy=FailurePolicy(retries=0, on_failure="skip"))
    monkeypatch.setattr(files, "fsync", fails(1))

    def ends_after_the_answer(job: Job[object]) -> bool:
        answer = job._done
        with job._running:
            return answer

    monkeypatch.setattr(Job, "ended", property(ends_after_the_answer))
    saver.begin(1, chunks(ALONE, 1), {"step": 1})
    saver.advance()
    saver.advance()
    (given_up,) = saver.take_failures()[0]
    assert given_up.step == 1 and "No space left" in given_up.reason


def test_several_in_a_row_end_the_run_and_a_commit_between_them_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(tmp_path, ALONE, 0, policy=FailurePolicy(on_failure="skip", max_failures=3))
    for step in (1, 2):
        monkeypatch.setattr(files, "fsync", fails(1))
        saver.begin(step, chunks(ALONE, step), {"step": step})
        assert saver.finish() is None
    saver.begin(3, chunks(ALONE, 3), {"step": 3})
    assert saver.finish() == 3
    monkeypatch.setattr(files, "fsync", fails(10))
    for step in (4, 5):
        saver.begin(step, chunks(ALONE, step), {"step": step})
        assert saver.finish() is None
    saver.begin(6, chunks(ALONE, 6), {"step": 6})
    with pytest.raises(CheckpointError, match=r"3 checkpoints in a row have failed.*train.saving.max_failures is 3"):
        saver.finish()
    assert check_all(tmp_path) == [3]


def test_where_the_loop_waits_it_needs_neither_steps_nor_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a run."""
    monkeypatch.setattr("_thread.start_new_thread", lambda *_: (_ for _ in ()).throw(RuntimeError("no more threads")))
    monkeypatch.setattr(save, "_RETRY_SECONDS", 0.01)
    saver = Saver(tmp_path, ALONE, 0, policy=SKIP)
    saver.begin(1, chunks(ALONE, 1), {"step": 1})
    assert saver.finish() == 1
    (failed,) = saver.take_failures()[0]
    assert "cannot be started: no more threads" in failed.reason


def test_without_room_for_all_ranks_nothing_is_written(tmp_path: Path) -> None:
    """Both together need 256,000 bytes; each alone would have room."""

    def work(groups: Groups) -> None:
        patch = pytest.MonkeyPatch()
        patch.setattr(save_failures, "free_bytes", lambda path: 200_000)
        patch.setattr(save, "write_rank", lambda *_: 1 / 0)
        saver = Saver(tmp_path, groups["world"], 0, policy=SKIP)
        saver.begin(1, chunks(groups["world"], 1), {"step": 1})
        (failed,) = saver.take_failures()[0]
        assert (
            f"(256,000 bytes), and the disk of {tmp_path} has" in failed.reason and "(200,000 bytes)" in failed.reason
        )
        assert list(tmp_path.iterdir()) == []
        # It is asked again before the next attempt.
        patch.undo()
        until_settled(saver)

    on_ranks(work, 2)
    assert check_all(tmp_path) == [1]


def test_a_file_system_that_does_not_know_its_room_is_not_asked(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) > 0
    assert free_bytes(tmp_path / "nothing here") == -1
    saver = Saver(tmp_path, ALONE, 0, policy=FailurePolicy(free_space=1e30))
    with pytest.raises(CheckpointError, match=r"train.saving.free_space asks for 1e\+30 times as much"):
        saver.begin(1, chunks(ALONE, 1), {})
    Saver(tmp_path, ALONE, 0, policy=FailurePolicy(free_space=0.0)).begin(1, chunks(ALONE, 1), {})


def test_without_its_copy_on_one_rank_a_save_is_not_tried_again(tmp_path: Path) -> None:
    """The buffers there hold another step's numbers."""

    def work(groups: Groups) -> None:
        saver = Saver(tmp_path, groups["world"], 0, policy=SKIP)
        saver.begin(1, chunks(groups["world"], 1), {"step": 1})
        assert saver.finish() == 1
        held = chunks(groups["world"], 2)
        if groups.rank == 1:
            held = [Chunk(held[0].name, held[0].shape, held[0].box, Unreadable(held[0].tensor))]
        saver.begin(2, held, {"step": 2})
        (failed,) = saver.take_failures()[0]
        assert failed.retry_after is None and failed.reason == "rank 1: can't allocate memory"
        assert saver.finish() is None

    on_ranks(work, 2)
    assert check_all(tmp_path) == [1]


class Unreadable(torch.Tensor):
    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> Unreadable:
        return tensor.as_subclass(cls)

    def detach(self) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")


def test_a_start_that_was_replaced_ends_whatever_the_policy(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "checkpoints", ALONE, take_incarnation(tmp_path), policy=SKIP)
    number = tmp_path / "incarnation.json"
    number.write_text(number.read_text().replace('"number": 1', '"number": 2'))
    saver.begin(1, chunks(ALONE, 1), {"step": 1})
    with pytest.raises(FencedError, match="incarnation 1 may not write any more"):
        saver.finish()


def test_the_reason_of_a_rank_is_one_short_line() -> None:
    world, device = ALONE, torch.device("cpu")
    assert agreed_reason(MemoryError(), world, device) == ("out of memory", False)
    assert describe(ValueError("a\nb  c")) == "a b c" and describe(KeyError()) == "KeyError"
    assert len(describe(OSError("ü" * 1000)).encode()) <= 480


# ---- a whole run ----


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def small(directory: Path, **saving: object) -> RunConfig:
    settings = {"data.seq_len": 16, "data.global_batch": 4, "data.micro_batch": 2, "data.validation": None}
    settings |= {"train.steps": 12, "train.directory": str(directory), "train.saving.every": 3}
    return load_run("debug_tiny", settings | {f"train.saving.{key}": value for key, value in saving.items()})


class FailAt(Callback):
    """Every write of the saves that begin at some steps fails."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.failed = first, last, []
        self.patch = pytest.MonkeyPatch()

    def after_step(self, record: StepRecord, control: Control) -> None:
        if record.step == self.first:
            self.patch.setattr(files, "fsync", fails(10**6))
        if record.step == self.last + 1:
            self.patch.undo()

    def on_save_failed(self, step: int, reason: str, retries_left: int) -> None:
        self.failed.append((step, retries_left))

    def on_end(self, reason: str) -> None:
        self.patch.undo()


def test_a_run_goes_on_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Losses and the last checkpoint are those of a run without faults."""
    for name, callbacks in (("whole", []), ("faulty", [FailAt(3, 7)])):
        run = small(tmp_path / name, retries=1, background=False)
        assert Trainer(run, callbacks=callbacks, reporters=[JsonLines()]).fit() == "finished"
    lines = [read_lines(tmp_path / name / "debug_tiny" / "metrics.jsonl") for name in ("whole", "faulty")]
    losses = [[line["loss"] for line in each if line["kind"] == "step"] for each in lines]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    said = capfd.readouterr().err
    assert said.count("warning: the checkpoint of step 3 was not written") == 2
    assert [line["step"] for line in lines[1] if line["kind"] == "save_failed"] == [3, 3, 6, 6]
    last = [final_path(tmp_path / name / "debug_tiny/checkpoints", 12) for name in ("whole", "faulty")]
    assert verify(last[0]).files == verify(last[1]).files


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "_RETRY_SECONDS", 0.01)
    watch = FailAt(10, 99)
    with pytest.raises(CheckpointError, match=r"last checkpoint, of step 12, could not be written: .*No space left"):
        Trainer(small(tmp_path, background=False), callbacks=[watch], reporters=[]).fit()
    assert watch.failed == [(12, 3), (12, 2), (12, 1), (12, 0)]
    assert committed_steps(tmp_path / "debug_tiny/checkpoints") == [6, 9]


def test_a_run_stops_where_that_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step 3 was not written: .*No space left"):
        Trainer(small(tmp_path, on_failure="stop", retries=0), callbacks=[FailAt(3, 99)], reporters=[]).fit()


def test_settings_that_make_no_sense_are_refused() -> None:
    wrong = {"retries": -1, "retry_after": 0, "max_failures": -1, "free_space": -0.5}
    found = [problem.path for problem in moefold.check(small(Path("runs"), **wrong))]
    assert found == [f"train.saving.{name}" for name in wrong]
    (problem,) = moefold.check(small(Path("runs"), retries=64))
    assert problem.fix == "use 0 to 20"


def test_drawn_faults_end_no_run_and_change_no_bit() -> None:
    """Six kinds in one run of one rank; `python -m tests.save_faults` draws more of them, over more ranks."""
    found = measure(6, seed=7)
    assert found["failed_saves"] == 6 and found["runs_ended"] == found["runs_that_differ"] == 0


class NoMemory(Callback):
    """The address space ends a little above what the rank has."""

    def after_backward(self, gradients: Any, control: Control) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (1 << 24), before[1]))
        try:
            torch.ones(1 << 28)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_rank_without_memory_says_where_it_was_and_what_it_held(tmp_path: Path) -> None:
    wanted = r"rank 0 is out of memory in step 1, after backward, with a peak of [\d.]+ .?i?B resident: .*allocate"
    with pytest.raises(MemoryError, match=wanted):
        Trainer(small(tmp_path), callbacks=[NoMemory()], reporters=[]).fit()
