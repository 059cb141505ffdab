"""Saving beside training. Kills, failures and overlaps in the background never leave a false checkpoint."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import on_ranks

import moefold.checkpoint.files as files
import moefold.checkpoint.manifest as manifest
import moefold.checkpoint.save as save
from moefold.checkpoint.load import Checkpoint, latest
from moefold.checkpoint.run_lock import take_incarnation
from moefold.checkpoint.save import Saver
from moefold.checkpoint.step_dirs import committed_steps, final_path, verify
from moefold.checkpoint.tensor_spec import Chunk
from moefold.comm.process_groups import Group, Groups, Ledger
from moefold.errors import CheckpointError, RankError

ALONE = Group("world", (0,), 0, None, Ledger())
ROWS = 64


def chunks(world: Group, step: int) -> list[Chunk]:
    """A tensor cut over the ranks, every element of which is the step."""
    rows = ROWS // world.size
    box = (slice(world.index * rows, (world.index + 1) * rows), slice(0, 1000))
    return [Chunk("parameter/x", (ROWS, 1000), box, torch.full((rows, 1000), float(step)))]


def train(saver: Saver, first: int, last: int) -> list[int]:
    """A loop that saves every third step and tells what was committed."""
    told = []
    for step in range(first, last + 1):
        if step % 3 == 0:
            saver.begin(step, chunks(saver.world, step), {"step": step})
        told.append(saver.advance())
        time.sleep(0.002)
    told.append(saver.finish())
    return [step for step in told if step is not None]


def check_all(root: Path) -> list[int]:
    """Every committed step verifies to the last bit and holds its own numbers."""
    steps = committed_steps(root)
    for step in steps:
        assert verify(final_path(root, step)).state == {"step": step}
        assert (Checkpoint(final_path(root, step)).read("parameter/x") == step).all()
    return steps


def at(owner: Any, name: str, nth: int, instead: Callable[..., Any]) -> None:
    """At the nth call of a function, do something else first; it may not return."""
    original, calls = getattr(owner, name), [0]

    def counted(*args: Any, **words: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            instead(original, *args)
        return original(*args, **words)

    setattr(owner, name, counted)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def write_half(write: Callable[..., None], descriptor: int, part: memoryview) -> None:
    write(descriptor, part[: len(part) // 2])
    die()


def remove_one(remove: Callable[..., None], path: Path) -> None:
    for file in sorted(file for file in path.rglob("*") if file.is_file())[:1]:
        file.unlink()
    die()


POINTS: dict[str, tuple[Any, str, Callable[..., Any], int]] = {
    "mid-file": (files, "_write_all", write_half, 14),
    "before flushing": (files, "fsync", die, 16),
    "before the data": (save, "write_shard", die, 3),
    "before the table": (save, "write_table", die, 3),
    "before reading back": (save, "read_back", die, 3),
    "before the manifest": (save, "write_manifest", die, 3),
    "before a name changes": (files, "rename", die, 5),
    "mid-deletion": (files, "remove_tree", remove_one, 1),
}
ONLY_RANK_0 = ("before the manifest", "before a name changes", "mid-deletion")


def start_and_die(run_dir: Path, point: str, nth: int) -> bool:
    """Whether it came to the kill before the end."""
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            owner, name, instead, _ = POINTS[point]
            at(owner, name, nth, instead)
            saver = Saver(run_dir / "checkpoints", ALONE, take_incarnation(run_dir))
            train(saver, (committed_steps(saver.root) or [0])[-1] + 1, 300)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("seed", range(4))
def test_kills_in_the_background_of_one_process(tmp_path: Path, seed: int) -> None:
    """Eight kills, one after the other, in one run: what is committed stays committed."""
    dice, root, before = random.Random(seed), tmp_path / "checkpoints", -1
    points = list(POINTS)
    dice.shuffle(points)
    for point in points:
        assert start_and_die(tmp_path, point, dice.randint(1, min(POINTS[point][3], 3))), (seed, point)
        steps = check_all(root)
        assert (steps or [-1])[-1] >= before and len(steps) <= 4, (seed, point)
        before = (steps or [-1])[-1]
    Saver(root, ALONE, take_incarnation(tmp_path))
    assert all(path.name.count(".") == 0 for path in root.iterdir())


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_in_the_background_of_two_ranks(tmp_path: Path, point: str) -> None:
    owner, name, instead, most = POINTS[point]
    for victim in (0,) if point in ONLY_RANK_0 else (0, 1):
        nth = random.Random(f"{point}{victim}").randint(1, min(most, 9))

        def work(groups: Groups, victim: int = victim, nth: int = nth) -> None:
            if groups.rank == victim:
                at(owner, name, nth, instead)
            saver = Saver(tmp_path / f"run{victim}", groups["world"], 0)
            train(saver, 1, 15)

        with pytest.raises(RankError):
            on_ranks(work, 2)
        root = tmp_path / f"run{victim}"
        steps = check_all(root)
        assert latest(root) == (final_path(root, steps[-1]) if steps else None)


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuse(*_: object) -> None:
    raise CheckpointError("refused for the test")


@pytest.mark.parametrize("background", [True, False], ids=["background", "waiting"])
def test_a_failure_in_a_writer_is_raised_in_the_loop_on_every_rank(tmp_path: Path, background: bool) -> None:
    """A full disk on one rank, at every point of it; then the next save works."""
    cases = [(files, "_write_all", no_space), (files, "fsync", no_space), (save, "write_shard", refuse)]
    cases += [(save, "write_table", refuse), (save, "read_back", refuse)]
    cases += [(save, "write_manifest", refuse), (save, "commit", refuse)]

    def work(groups: Groups) -> int:
        saver = Saver(tmp_path, groups["world"], 0, background=background)
        step = 0
        for owner, name, instead in cases:
            for victim in (0, 1) if name not in ("write_manifest", "commit") else (0,):
                original = getattr(owner, name)
                if groups.rank == victim:
                    at(owner, name, 1, instead)
                step += 3
                reason = f"rank {victim}: .*(No space left|refused for)"
                with pytest.raises(CheckpointError, match=f"step {step} was not written: {reason}"):
                    saver.begin(step, chunks(groups["world"], step), {"step": step})
                    for _ in range(500):
                        saver.advance()
                        time.sleep(0.005)
                assert saver.in_progress is None
                setattr(owner, name, original)
                step += 3
                saver.begin(step, chunks(groups["world"], step), {"step": step})
                assert saver.finish() == step
        return step

    last = on_ranks(work, 2)[0]
    steps = check_all(tmp_path)
    assert steps[-1] == last
    assert all("." not in path.name for path in tmp_path.iterdir())


def test_the_next_save_waits_for_the_last_and_none_is_lost(tmp_path: Path) -> None:
    def work(groups: Groups) -> list[int | None]:
        slowly = save.write_shard

        def slow(*args: Any) -> Any:
            time.sleep(0.1 if groups.rank else 0.02)
            return slowly(*args)

        save.write_shard = slow
        saver = Saver(tmp_path, groups["world"], 0, keep=10)
        for step in (1, 2, 3):
            saver.begin(step, chunks(groups["world"], step), {"step": step})
            assert saver.in_progress == step
        return [saver.advance(), saver.advance(), saver.finish(), saver.advance()]

    answers = on_ranks(work, 2)
    assert answers[0] == answers[1] == [1, 2, 3, None]
    assert check_all(tmp_path) == [1, 2, 3]


def test_two_failed_saves_running_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(tmp_path, ALONE, 0)
    assert train(saver, 1, 6) == [3, 6]
    monkeypatch.setattr(files, "fsync", no_space)
    for step in (9, 12):
        with pytest.raises(CheckpointError, match="No space left"):
            train(saver, step, step)
    monkeypatch.undo()
    assert check_all(tmp_path) == [3, 6]
    assert train(saver, 15, 15) == [15]
    assert check_all(tmp_path) == [6, 15]


def test_no_collective_without_a_save_and_none_in_a_thread(tmp_path: Path) -> None:
    def work(groups: Groups) -> int:
        ledger = groups["world"].ledger
        saver = Saver(tmp_path, groups["world"], 0)
        for _ in range(5):
            assert saver.advance() is None
        quiet = len(ledger.traffic)
        saver.begin(1, chunks(groups["world"], 1), {"step": 1})
        time.sleep(0.2)
        # Whether all ranks have their copies, and the disk has room for them.
        assert len(ledger.traffic) == quiet + 1
        assert saver.finish() == 1
        return quiet

    assert on_ranks(work, 2) == [0, 0]


def test_parts_that_do_not_make_up_the_whole_are_not_committed(tmp_path: Path) -> None:
    def work(groups: Groups) -> None:
        saver = Saver(tmp_path, groups["world"], 0)
        saver.begin(1, chunks(groups["world"], 1) if groups.rank == 0 else [], {})
        with pytest.raises(CheckpointError, match=r"rank 0: step 1: the ranks wrote 32,000 elements of 64,000"):
            saver.finish()

    on_ranks(work, 2)
    assert committed_steps(tmp_path) == []


@pytest.mark.parametrize("lie", [lambda file: os.pwrite(file, b"!", 5000), lambda file: os.ftruncate(file, 5000)])
def test_bytes_that_did_not_reach_the_disk_are_noticed_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: Callable[[int], Any]
) -> None:
    """A disk that says it wrote, and did not: one byte is another, or the end is missing."""
    write = files._write_all

    def forget(descriptor: int, part: memoryview) -> None:
        write(descriptor, part)
        if len(part) > 100_000:
            lie(descriptor)

    monkeypatch.setattr(files, "_write_all", forget)
    saver = Saver(tmp_path, ALONE, 0)
    saver.begin(1, chunks(ALONE, 1), {})
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors: what was read back is not what was"):
        saver.finish()
    assert committed_steps(tmp_path) == []


def test_an_old_checkpoint_that_stays_is_a_warning_and_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "delete_outdated", refuse)
    saver = Saver(tmp_path, ALONE, 0)
    saver.begin(1, chunks(ALONE, 1), {"step": 1})
    assert saver.finish() == 1
    assert saver.take_failures() == ([], ["an old checkpoint was not deleted: refused for the test"])
    assert check_all(tmp_path) == [1]


def test_retention_keeps_the_newest_that_verify_and_the_permanent_ones(tmp_path: Path) -> None:
    saver = Saver(tmp_path, ALONE, 0, keep=2, keep_every=10, background=False)
    for step in (5, 10, 15, 20, 25):
        saver.begin(step, chunks(ALONE, step), {"step": step})
    assert check_all(tmp_path) == [10, 20, 25]
    # A damaged one does not count: 20 stays though two newer ones are there.
    (final_path(tmp_path, 25) / manifest.MANIFEST).write_text("{}")
    saver.begin(30, chunks(ALONE, 30), {"step": 30})
    assert committed_steps(tmp_path) == [10, 20, 25, 30]
    saver.begin(35, chunks(ALONE, 35), {"step": 35})
    assert committed_steps(tmp_path) == [10, 20, 30, 35]


def test_a_checkpoint_that_made_way_comes_back_if_its_successor_never_came(tmp_path: Path) -> None:
    Saver(tmp_path, ALONE, 0, background=False).begin(5, chunks(ALONE, 5), {"step": 5})
    os.rename(final_path(tmp_path, 5), tmp_path / "step_00000005.0.replaced")
    assert latest(tmp_path) is None
    Saver(tmp_path, ALONE, 0)
    assert check_all(tmp_path) == [5]
