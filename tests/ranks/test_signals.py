"""However often and wherever SIGINT and SIGTERM come, a run is saved, ends with 75, and is not started again."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kill import SAVE_EVERY, small_run
from tests.signal_draws import (
    GROUP,
    LAUNCHER,
    RANK_0,
    RANK_1,
    Dispatched,
    Draw,
    Run,
    children,
    command,
    draws,
    environment,
    follow,
    hears_sigterm,
    kind_of_end,
    run_draws,
    run_uninterrupted,
)

from moefold.checkpoint.run_lock import read_incarnation
from moefold.comm import spawn
from moefold.comm.launchers import LAUNCHERS, Place, die_with_parent
from moefold.comm.rendezvous import agree_on_start, store_at
from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ParallelConfig
from moefold.errors import RankError, TrainingError
from moefold.recipes.catalog import RECIPES
from moefold.train import train_loop
from moefold.train.fault_tolerance.signals import _LAUNCHED, INTERRUPTED, SAME_SECONDS, StopRequest
from moefold.train.fault_tolerance.supervise import supervise
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
    Draw("save", 4, 0.0, (Dispatched(INT, GROUP, 0.0), Dispatched(INT, GROUP, 0.02), Dispatched(TERM, GROUP, 0.05))),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_uninterrupted(tmp_path_factory.mktemp("uninterrupted"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("draw", FIXED, ids=str)
def test_a_signalled_run_is_saved_and_goes_on_exactly(draw: Draw, uninterrupted: Path, tmp_path: Path) -> None:
    assert follow(draw, tmp_path, uninterrupted)[0] in ("saved", "no step")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_drawn_signals(tmp_path: Path) -> None:
    """`.ci/run` draws twelve of each commit's own, `make nightly` 500."""
    figures = run_draws(list(enumerate(draws(7, 1))), tmp_path)
    assert not figures.failures, "\n".join(figures.failures)


@pytest.mark.slow
@pytest.mark.parametrize("number", [TERM, INT])
def test_one_process_remembers_a_signal_of_the_first_moment(number: int, tmp_path: Path) -> None:
    run = Run(tmp_path, "--parallel.ep", "1", cold=True)
    try:
        run.wait_for("imports", 0)
        for _ in range(3):
            os.kill(run.process.pid, number)
            time.sleep(0.05)
    finally:
        found = run.outcome()
    assert kind_of_end(found, Draw("imports", 0, 0.0, ())) == "no step"


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
    assert (tmp_path / "err").read_text().startswith("moefold: SIGINT: stopping after the step under way")
    assert (tmp_path / "err").read_text().count("\n") == 1
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_ranks_of_another_launcher_agree_on_a_signal_that_one_of_them_got_early(tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
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
    assert supervise(work, 2, tmp_path, 1.0) == INTERRUPTED
    assert time.monotonic() - began < 60
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "1"]
    said = capfd.readouterr().err
    assert "SIGTERM: stopping" in said and "returned no result by its deadline" in said
    assert "resumes from the beginning" in said
    assert (signal.getsignal(TERM), signal.getsignal(INT)) == before


@pytest.mark.parametrize("asked", ["launcher", "the rank that dies", "the other rank"])
def test_a_rank_that_dies_after_a_stop_was_asked_for_is_not_started_again(
    asked: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(rank: int) -> int:
        with (tmp_path / "starts").open("a") as file:
            file.write(f"{rank}\n")
        if rank == 0:
            if asked == "launcher":
                os.kill(os.getppid(), INT)
            elif asked == "the rank that dies":
                signal.raise_signal(INT)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        elif asked == "the other rank":
            signal.raise_signal(INT)
        time.sleep(60)
        return 0

    assert supervise(work, 2, tmp_path, 30.0) == INTERRUPTED
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "1"]
    said = capfd.readouterr().err
    assert "rank 0 was ended by SIGKILL" in said and "restarting" not in said


@pytest.mark.parametrize("again", [0.3, 1.4])
def test_a_second_signal_after_a_second_ends_the_ranks_at_once(
    again: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Sooner, it is the same request in another copy."""

    def work(rank: int) -> int:
        time.sleep(3.5)
        return INTERRUPTED

    began = time.monotonic()
    for pause in (0.5, 0.5 + again):
        threading.Timer(pause, os.kill, (os.getpid(), TERM)).start()
    assert supervise(work, 2, tmp_path, 30.0) == INTERRUPTED
    at_once = again > SAME_SECONDS
    assert (time.monotonic() - began < 3.4) == at_once
    assert ("second SIGTERM" in capfd.readouterr().err) == at_once


def test_requests_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that reminds after its grace time does not cost the checkpoint; two signals after it do again."""
    clock, heard = [100.0], list[tuple[str, float]]()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stop = StopRequest(
        lambda number: heard.append(("first", clock[0])), lambda number: heard.append(("once", clock[0]))
    )
    for clock[0] in (100.0, 100.02, 100.9, 130.0, 130.5, 150.0, 153.0):
        stop.handle(TERM, None)
    assert heard == [("first", 100.0), ("once", 153.0)] and stop.asked_at == 100.0


def test_variables_of_launchers_are_those_of_the_table() -> None:
    assert tuple((launcher.rank, launcher.world) for launcher in LAUNCHERS) == _LAUNCHED


def _ended_by(number: signal.Signals) -> None:
    """Ranks are forks: a library that another test imported may have given the signal a handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "SEGV": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "rank 1 was ended by SIGSEGV: native code used memory"),
    "abort": (os.abort, "rank 1 was ended by SIGABRT: native code gave up"),
    "exit": (lambda: os._exit(3), "rank 1 ended with exit code 3 and without an error message"),
    "KILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was ended by SIGKILL"),
    "USR1": (lambda: _ended_by(signal.SIGUSR1), "rank 1 was ended by SIGUSR1"),
    "error": (lambda: 1 // 0, "rank 1: ZeroDivisionError"),
}


@pytest.mark.parametrize("kind", ENDS)
def test_how_a_rank_ended_is_said(kind: str) -> None:
    """Also where its peer, which fails because of it, is heard first."""
    end, said = ENDS[kind]

    def work(rank: int) -> int:
        if rank == 1:
            faulthandler.disable()
            end()
        dist.barrier()
        return 0

    with pytest.raises(RankError, match=said) as caught:
        spawn_ranks(work, 2, seconds=60.0, grace=0.3)
    assert ("memory" in str(caught.value)) == (kind in ("SEGV", "KILL"))


def test_lack_of_memory_is_named_only_if_the_kernel_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for now, said in (
        (5, "from outside"),
        (7, "ended 2 process(es) here for lack"),
        (None, "out of memory, or killed"),
    ):
        monkeypatch.setattr(spawn, "_oom_kills", lambda now=now: now)
        assert said in spawn.describe_end(-signal.SIGKILL, 5)


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    """Also a rank that is forked while the launcher dies."""

    def work(rank: int) -> int:
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        time.sleep(60)
        return 0

    if not (launcher := os.fork()):
        spawn_ranks(work, 2)
        os._exit(0)
    while len(pids := [path.read_text() for path in tmp_path.iterdir()]) < 2 or "" in pids:
        time.sleep(0.01)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    deadline = time.monotonic() + 1.0
    while any(alive(int(pid)) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    if not (orphan := os.fork()):
        die_with_parent(1 << 30)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(orphan, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_end_with_the_agent_of_torchrun(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as out:
        agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
            + command(tmp_path, "--train.steps", "100000")[1:],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment(),
        )
    try:
        while "step=2/" not in (tmp_path / "log").read_text():
            assert agent.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        ranks = children(agent.pid)
        os.kill(agent.pid, signal.SIGKILL)
        agent.wait()
        deadline = time.monotonic() + 1.0
        while len(ranks) < 2 or any(alive(pid) for pid in ranks):
            assert time.monotonic() < deadline, ranks
            time.sleep(0.001)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


@pytest.mark.parametrize(
    ("address", "bound"), [("127.0.0.1", "0100007F"), ("localhost", "0100007F"), (socket.gethostname(), "0" * 32)]
)
def test_a_store_listens_on_the_address_that_was_given(address: str, bound: str) -> None:
    """A name may mean another address to the peers, so that torch's own way stays."""
    port = free_port()
    if not (rank := os.fork()):
        store = store_at(Place("srun", 0, 1, 0, address, port), timedelta(seconds=20))
        store.set("key", "value")
        opened = [
            line.split()[1].rsplit(":", 1)
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
            if line.split()[3] == "0A"
        ]
        os._exit([host for host, number in opened if int(number, 16) == port] != [bound])
    assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == 0


def test_ranks_agree_on_a_start_and_do_not_read_keys_of_another(tmp_path: Path) -> None:
    """Three starts of three ranks over one store; in the second, rank 2 comes, dies and comes again before rank 0."""
    store = dist.HashStore()

    def join(rank: int, found: dict[int, Any]) -> None:
        own = agree_on_start(store, rank, 3, 20.0)
        own.set(f"address_{rank}", f"start {len(starts)}")
        found[rank] = [own.get(f"address_{other}").decode() for other in range(3)]

    starts: list[dict[int, Any]] = []
    for order in ((0, 1, 2), (2, 2, 1, 0), (1, 0, 2)):
        found: dict[int, Any] = {}
        ranks = [threading.Thread(target=join, args=(rank, found), daemon=True) for rank in order]
        for rank in ranks:
            rank.start()
            time.sleep(0.1)
        for rank in ranks:
            rank.join(30.0)
        assert found == {rank: [f"start {len(starts)}"] * 3 for rank in range(3)}
        starts.append(found)


def test_ranks_started_again_do_not_connect_to_dead_peers() -> None:
    """The store stays, as torch's agent keeps it; in the second start rank 1 is ready before rank 0 has an address.

    Without a number of the start, rank 1 connects to the rank 0 that is gone and fails, and rank 0 waits five times its
    limit for it.
    """
    wait = timedelta(seconds=20)
    server = dist.TCPStore("127.0.0.1", 0, 2, True, timeout=wait, wait_for_workers=False)

    def join(rank: int) -> int:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        own = agree_on_start(dist.TCPStore("127.0.0.1", server.port, 2, False, timeout=wait), rank, 2, 20.0)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=2, timeout=wait)
        dist.all_reduce(total := torch.ones(1))
        return int(total) - 2

    for late in (0.0, 1.0):
        ranks = []
        for rank in (1, 0):
            if not (pid := os.fork()):
                with suppress(BaseException):
                    time.sleep(0.0 if rank else late)
                    os._exit(join(rank))
                os._exit(1)
            ranks.append(pid)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks] == [0, 0]


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(TrainingError, match=r"start 1: ranks \[1, 2\] of 3 did not come within 0.1 s"):
        agree_on_start(dist.HashStore(), 0, 3, 0.1)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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
        step, done = train_loop.take_step, [0]

        def counted(*args: Any) -> Any:
            done[0] += 1
            return signalled(step)(*args) if rank == 1 and done[0] == SAVE_EVERY + 1 else step(*args)

        train_loop.take_step, train_loop.save_last = counted, signalled(train_loop.save_last)
        return signalled(lambda code: code)(train_loop.train(context, state, [], stop))

    assert supervise(work, 2, checkpoints, 30.0, stop=stop) == INTERRUPTED
    assert stop.signal is None and stop, "a rank was asked, the launcher was not, and both know"
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
    assert heard and stop.signal is None
