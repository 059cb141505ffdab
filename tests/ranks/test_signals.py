"""However often and wherever SIGINT and SIGTERM come, a run is saved, ends with 75, and is not started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kill import SAVE_EVERY, small_run
from tests.signal_draws import (
    GROUP,
    LAUNCHER,
    RANK_0,
    RANK_1,
    STEPS,
    Dispatched,
    Draw,
    Outcome,
    Run,
    command,
    draws,
    environment,
    hears_sigterm,
)

from moefold.checkpoint.run_lock import read_incarnation
from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ParallelConfig
from moefold.errors import TrainingError
from moefold.recipes.catalog import RECIPES
from moefold.train import train_loop
from moefold.train.signals import INTERRUPTED, StopRequest
from moefold.train.supervise import supervise
from moefold.train.train_context import build_train_context, run_directory

TERM, INT = signal.SIGTERM, signal.SIGINT
BURST = tuple(Dispatched(TERM, GROUP, pause) for pause in (0.0, 0.02, 0.05, 0.1, 0.1, 0.1, 0.2))
FIXED = [
    Draw("imports", 0, 0.0, (Dispatched(INT, GROUP, 0.0), Dispatched(INT, GROUP, 0.1))),
    Draw("set-up", 0, 0.0, (Dispatched(TERM, GROUP, 0.0), Dispatched(TERM, GROUP, 0.02))),
    Draw("set-up", 0, 0.3, (Dispatched(TERM, RANK_1, 0.0),)),
    Draw(
        "first step",
        0,
        0.0,
        (Dispatched(TERM, LAUNCHER, 0.0), Dispatched(INT, RANK_0, 0.1), Dispatched(INT, GROUP, 0.2)),
    ),
    Draw("step", 9, 0.0, BURST),
    Draw("save", 6, 0.0, (Dispatched(INT, GROUP, 0.0), Dispatched(INT, GROUP, 0.02), Dispatched(TERM, GROUP, 0.05))),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a run that nobody signalled."""
    run = Run(tmp_path_factory.mktemp("uninterrupted"))
    found = run.outcome()
    assert found.code == 0 and found.saved[-1] == STEPS, found.said
    return run.directory


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("draw", FIXED, ids=str)
def test_a_signalled_run_is_saved_and_goes_on_exactly(draw: Draw, uninterrupted: Path, tmp_path: Path) -> None:
    assert follow(draw, tmp_path, uninterrupted) != "finished"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_thirty_draws(uninterrupted: Path, tmp_path: Path) -> None:
    """The seed is new each time; MOEFOLD_SIGNAL_SEED repeats one."""
    seed = int(os.environ.get("MOEFOLD_SIGNAL_SEED", time.time_ns() % 10**6))
    print(f"MOEFOLD_SIGNAL_SEED={seed}", flush=True)
    kinds: Counter[str] = Counter()
    for number, draw in enumerate(draws(30, seed)):
        kind = follow(draw, tmp_path / str(number), uninterrupted)
        kinds[kind] += 1
        print(f"{number + 1:2} {kind:9} {draw}", flush=True)
    print(dict(kinds), flush=True)
    # A run that ends before its signal comes says nothing about signals.
    assert kinds["finished"] <= 5 and kinds["saved"] >= 10


def follow(draw: Draw, folder: Path, uninterrupted: Path) -> str:
    """Signal a run as drawn, look at what it left, and let it go on to its end."""
    run = Run(folder)
    try:
        run.signal_as(draw)
    finally:
        found = run.outcome()
    kind = check_stopped(found)
    if kind != "finished":
        rest = Run(folder)
        after = rest.outcome()
        assert after.code == 0 and after.saved[-1] == STEPS, after.said
        assert ("resumed_from=" in after.said) == (kind == "saved")
        assert kind != "saved" or f"resumed_from={found.last_step}\n" in after.said
    assert tensors_of(run.directory) == tensors_of(uninterrupted)
    return kind


def check_stopped(found: Outcome) -> str:
    assert "Traceback" not in found.said, found.said
    assert "restarting" not in found.said and found.starts <= 1, found.said
    if found.code == 0:
        assert found.saved[-1] == STEPS
        return "finished"
    assert found.code == INTERRUPTED, found.said
    if found.last_step == 0:
        assert not found.saved and found.said.count("nothing to save") == 1, found.said
        return "no step"
    assert found.saved[-1] == found.last_step < STEPS, found.said
    assert f"saved step={found.last_step} " in found.said and "reason=interrupted" in found.said
    return "saved"


def tensors_of(directory: Path) -> dict[str, bytes]:
    """Every number of the last checkpoint, optimizer and random state included."""
    last = directory / "checkpoints" / f"step_{STEPS:08}"
    return {path.name: path.read_bytes() for path in sorted(last.glob("rank_*.safetensors"))}


@pytest.mark.slow
@pytest.mark.parametrize("number", [TERM, INT])
def test_one_process_remembers_a_signal_of_the_first_moment(number: int, tmp_path: Path) -> None:
    run = Run(tmp_path, "--parallel.ep", "1")
    try:
        run.wait_for("imports", 0)
        for _ in range(3):
            os.kill(run.process.pid, number)
            time.sleep(0.05)
    finally:
        found = run.outcome()
    assert check_stopped(found) == "no step"


@pytest.mark.slow
def test_a_reader_that_the_same_signal_ends_does_not_cost_the_checkpoint(tmp_path: Path) -> None:
    """`moefold train ... | tee log`: Ctrl-C ends `tee` at once, and the next line meets a closed pipe."""
    with (tmp_path / "err").open("wb") as err:
        run = subprocess.Popen(
            command(tmp_path, "--parallel.ep", "1"),
            stdout=subprocess.PIPE,
            stderr=err,
            start_new_session=True,
            env=environment(),
        )
    assert run.stdout is not None
    try:
        while not run.stdout.readline().startswith(b"step=3/"):
            assert run.poll() is None
        run.stdout.close()
        time.sleep(0.3)
        os.killpg(run.pid, INT)
        assert run.wait(60) == INTERRUPTED
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
    assert (tmp_path / "err").read_text() == ""
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_ranks_of_another_launcher_agree_on_a_signal_that_one_of_them_got_early(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            command(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment() | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        while not hears_sigterm(ranks[1].pid):
            time.sleep(0.001)
        os.kill(ranks[1].pid, TERM)
        said = [rank.communicate(timeout=500)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    assert [rank.returncode for rank in ranks] == [INTERRUPTED, INTERRUPTED], said
    assert "Traceback" not in said[0] + said[1] and "nothing to save" in said[0] and "step=" not in said[0]


def test_ranks_that_do_not_stop_are_ended_after_the_patience_and_not_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(rank: int) -> int:
        with (tmp_path / "starts").open("a") as file:
            file.write(f"{rank}\n")
        while True:
            time.sleep(0.01)

    before = signal.getsignal(TERM), signal.getsignal(INT)
    threading.Timer(0.7, os.kill, (os.getpid(), TERM)).start()
    began = time.monotonic()
    with pytest.raises(TrainingError, match=r"asked to stop.*\n.*resumes from the beginning"):
        supervise(work, 2, tmp_path, 1.0)
    assert time.monotonic() - began < 60
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "1"]
    assert "SIGTERM: stopping" in capfd.readouterr().err
    assert (signal.getsignal(TERM), signal.getsignal(INT)) == before


def test_a_rank_that_dies_after_a_stop_was_asked_for_is_not_started_again(tmp_path: Path) -> None:
    def work(rank: int) -> int:
        with (tmp_path / "starts").open("a") as file:
            file.write(f"{rank}\n")
        if rank == 0:
            os.kill(os.getppid(), INT)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        return 0

    with pytest.raises(TrainingError, match="rank 0 died"):
        supervise(work, 2, tmp_path, 30.0)
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "1"]


def test_signals_before_during_and_after_the_last_save_change_nothing(tmp_path: Path) -> None:
    run = small_run(RECIPES["debug_mla"](), tmp_path, ParallelConfig(ep=2), True, steps=9)
    stop, checkpoints = StopRequest(), run_directory(run) / "checkpoints"

    def signalled(function: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any) -> Any:
            for number in (TERM, INT, TERM):
                signal.raise_signal(number)
            return function(*args)

        return around

    def work(rank: int) -> int:
        context, state = build_train_context(run, rank, 2, torch.device("cpu"), 30.0)
        step, done = train_loop._step, [0]

        def counted(*args: Any) -> Any:
            done[0] += 1
            return signalled(step)(*args) if rank == 1 and done[0] == SAVE_EVERY + 1 else step(*args)

        train_loop._step, train_loop._save_last = counted, signalled(train_loop._save_last)
        return signalled(lambda code: code)(train_loop.train(context, state, [], stop))

    assert supervise(work, 2, checkpoints, 30.0, stop=stop) == INTERRUPTED
    assert not stop, "the launcher itself was not asked"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_00000003", "step_00000004"]
    started = read_incarnation(run_directory(run))
    assert started is not None and started.number == 1


def test_a_signal_to_one_rank_during_set_up_is_remembered_by_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = small_run(RECIPES["debug_mla"](), tmp_path, ParallelConfig(ep=2), True, steps=9)
    stop, checkpoints = StopRequest(), run_directory(run) / "checkpoints"

    def work(rank: int) -> int:
        if rank == 1:
            signal.raise_signal(TERM)
        context, state = build_train_context(run, rank, 2, torch.device("cpu"), 30.0)
        return train_loop.train(context, state, [], stop)

    assert supervise(work, 2, checkpoints, 30.0, stop=stop) == INTERRUPTED
    assert not list(checkpoints.iterdir())
    assert capfd.readouterr().err.count("nothing to save") == 1


def test_no_rank_runs_the_handler_of_its_launcher() -> None:
    """Signals that come while ranks are forked wait until every process has its own handler."""
    launcher, heard, stop = os.getpid(), list[int](), StopRequest()

    def in_launcher(number: int, frame: object) -> None:
        assert os.getpid() == launcher
        heard.append(number)

    def in_rank() -> None:
        # Blocked still: it must neither end this rank nor reach the handler that was inherited.
        os.kill(os.getpid(), TERM)
        os.kill(launcher, TERM)
        stop.install()

    before = signal.signal(TERM, in_launcher)
    try:
        answers = spawn_ranks(lambda rank: [bool(stop), stop.signal], 2, in_rank=in_rank)
    finally:
        signal.signal(TERM, before)
    assert answers == [[True, TERM], [True, TERM]]
    assert heard and not stop
