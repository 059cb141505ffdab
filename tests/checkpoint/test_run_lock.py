"""F8: one run, one writer. A second start is refused by name; whoever was replaced can not commit any more."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import moefold.checkpoint.commit as commit
import moefold.checkpoint.files as files
import moefold.checkpoint.run_lock as fence
import moefold.checkpoint.save as save
from moefold.checkpoint.run_lock import check_incarnation, read_incarnation, take_incarnation
from moefold.checkpoint.save import Saver
from moefold.checkpoint.step_dirs import verify
from moefold.checkpoint.tensor_spec import Chunk, whole
from moefold.comm.process_groups import Group, Ledger
from moefold.errors import CheckpointError, RunBusyError

WORLD = Group("world", (0,), 0, None, Ledger())


def in_a_child(work: Callable[[], object]) -> int:
    """Fork; the child's exit code is 0 if ``work`` returns, 3 if it raises our errors."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except (CheckpointError, RunBusyError):
        code = 3
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_until(what: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def chunks(value: float) -> list[Chunk]:
    tensor = torch.full((1000,), value)
    return [Chunk("parameter/x", (1000,), whole((1000,)), tensor)]


def save_as(run_dir: Path, incarnation: int, step: int, background: bool = False) -> None:
    """Every number of an incarnation's checkpoint is its own."""
    saver = Saver(run_dir / "checkpoints", WORLD, incarnation, background=background)
    saver.begin(step, chunks(float(incarnation)), {"written_by": incarnation})
    saver.finish()


def test_numbers_go_up_and_the_run_keeps_its_id(tmp_path: Path) -> None:
    numbers = [exit_code(in_a_child(lambda: os._exit(take_incarnation(tmp_path)))) for _ in range(3)]
    assert numbers == [1, 2, 3]
    first = read_incarnation(tmp_path)
    assert take_incarnation(tmp_path) == 4
    # The same process may run the run again.
    assert take_incarnation(tmp_path) == 5
    last = read_incarnation(tmp_path)
    assert first is not None and last is not None and first.run == last.run


def test_a_second_start_is_refused_naming_the_holder(tmp_path: Path) -> None:
    def hold() -> None:
        take_incarnation(tmp_path)
        time.sleep(60)

    child = in_a_child(hold)
    wait_until(lambda: read_incarnation(tmp_path) is not None)
    with pytest.raises(RunBusyError, match=rf"in use by process {child} on .*, since 20\d\d-"):
        take_incarnation(tmp_path)
    assert exit_code(in_a_child(lambda: take_incarnation(tmp_path))) == 3
    os.kill(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    # The lock dies with its holder, however it died.
    assert take_incarnation(tmp_path) == 2


def test_eight_starts_at_once_and_one_wins(tmp_path: Path) -> None:
    (tried := tmp_path / "tried").mkdir()

    def start() -> None:
        try:
            take_incarnation(tmp_path)
        finally:
            (tried / str(os.getpid())).touch()
        # The winner holds the lock until all have tried, however slow the machine is.
        wait_until(lambda: len(list(tried.iterdir())) == 8, seconds=60.0)

    codes = sorted(exit_code(child) for child in [in_a_child(start) for _ in range(8)])
    assert codes == [0] + [3] * 7


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"run": 1, "number": 2}', '{"run": "a", "number": -2}', "x" * 5000])
def test_a_number_that_cannot_be_read_is_not_guessed(tmp_path: Path, text: str) -> None:
    (tmp_path / "incarnation.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"incarnation\.json"):
        take_incarnation(tmp_path)


# Where an old writer may be frozen: the function at whose call it stops itself.
FROZEN_AT = {
    "before its data": (save, "write_shard"),
    "before its table": (save, "write_table"),
    "before reading back": (save, "read_back"),
    "before its manifest": (save, "write_manifest"),
    "before a file is durable": (files, "fsync"),
    "before committing": (save, "commit"),
    "before asking whether it may": (commit, "may_write"),
    "before asking for the number": (fence, "check_incarnation"),
}


def freezing(owner: object, name: str) -> None:
    original, calls = getattr(owner, name), [0]

    def frozen(*args: object, **words: object) -> object:
        calls[0] += 1
        if calls[0] == 1:
            # To this very thread, which then stops here; sent to the process, it might get a little further.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return original(*args, **words)

    setattr(owner, name, frozen)


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("where", list(FROZEN_AT)[:-1])
def test_a_woken_writer_of_an_old_incarnation_commits_nothing(tmp_path: Path, where: str, background: bool) -> None:
    """As on another host, where the lock does not reach: the number alone must do."""

    def old() -> None:
        number = take_incarnation(tmp_path)
        save_as(tmp_path, number, 1)
        freezing(*FROZEN_AT[where])
        save_as(tmp_path, number, 2, background)

    child = in_a_child(old)
    os.waitpid(child, os.WUNTRACED)
    (tmp_path / "run.lock").unlink()
    assert take_incarnation(tmp_path) == 2
    save_as(tmp_path, 2, 2)
    os.kill(child, signal.SIGCONT)
    assert exit_code(child) == 3
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if not path.name.endswith(".1.tmp"))
    assert names == ["step_00000001", "step_00000002"]
    assert verify(tmp_path / "checkpoints" / "step_00000001").state == {"written_by": 1}
    assert verify(tmp_path / "checkpoints" / "step_00000002").state == {"written_by": 2}
    # The next start sweeps up.
    Saver(tmp_path / "checkpoints", WORLD, 3)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_a_writer_frozen_while_it_commits_keeps_the_next_start_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "_TIMEOUT_SECONDS", 0.2)

    def old() -> None:
        number = take_incarnation(tmp_path)
        freezing(fence, "check_incarnation")
        save_as(tmp_path, number, 1)

    child = in_a_child(old)
    os.waitpid(child, os.WUNTRACED)
    (tmp_path / "run.lock").unlink()
    with pytest.raises(RunBusyError, match=f"held for too long by process {child}"):
        take_incarnation(tmp_path)
    os.kill(child, signal.SIGCONT)
    assert exit_code(child) == 0
    assert take_incarnation(tmp_path) == 2
    assert verify(tmp_path / "checkpoints" / "step_00000001").incarnation == 1


def test_an_old_incarnation_deletes_nothing(tmp_path: Path) -> None:
    take_incarnation(tmp_path)
    for step in (1, 2, 3):
        save_as(tmp_path, 1, step)
    take_incarnation(tmp_path)
    with pytest.raises(CheckpointError, match="started again as incarnation 2"):
        save_as(tmp_path, 1, 4)
    with pytest.raises(CheckpointError, match="started again"):
        check_incarnation(tmp_path, 1)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000002", "step_00000003"]
    held_by = json.loads((tmp_path / "run.lock").read_text())
    assert held_by["pid"] == os.getpid()
