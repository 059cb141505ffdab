"""Copies of the state in memory: what a run resumes from after a kill, and when it must not use them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.loss_of_ranks import lines_of, run_of
from tests.peer_copies import measure, undisturbed
from tests.two_hosts import possible

from moefold.checkpoint.host_files import HostRanks
from moefold.checkpoint.memory_copies import MEMORY, memory_directory
from moefold.checkpoint.step_dirs import committed_steps, final_path
from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.config.train import SavingConfig
from moefold.train.callback import Callback, Control
from moefold.train.callbacks.jsonl import JsonLines
from moefold.train.fault_tolerance.supervise import _newest
from moefold.train.train_context import build_train_context
from moefold.train.train_loop import train
from moefold.train.trainer import Trainer

STEPS, SLOW = 6, pytest.mark.slow


class Meddler(Callback):
    """Rank 1 does something to the memory's directory before a step, once, and dies."""

    def __init__(self, step: int, mark: Path, memory: Path, how: str = "") -> None:
        self.step, self.mark, self.memory, self.how = step, mark, memory, how

    def before_step(self, step: int, control: Control) -> None:
        if step != self.step or control.rank != 1 or self.mark.exists():
            return
        self.mark.write_text("")
        newest = final_path(self.memory, committed_steps(self.memory)[-1])
        if self.how == "flip":
            for path in newest.glob("*/rank_00000.safetensors"):
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
        elif self.how == "remove":
            shutil.rmtree(self.memory)
        elif self.how == "manifest":
            (newest / "manifest.json").write_text("{}")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunConfig]:
    asked = run_of(tmp_path, ParallelConfig(), "float32")
    saving = SavingConfig(every=2, memory_every=1, background=False)
    asked = replace(asked, train=replace(asked.train, steps=STEPS, saving=saving))
    yield asked
    assert not directory_of(asked).exists(), "the end of a run leaves nothing in memory"


def directory_of(run: RunConfig) -> Path:
    return memory_directory(Path(run.train.directory) / run.name)


def losses(run: RunConfig) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines_of(run, "step")]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    asked = run_of(tmp_path_factory.mktemp("calm"), ParallelConfig(), "float32")
    asked = replace(asked, train=replace(asked.train, steps=STEPS, saving=SavingConfig(every=0)))
    assert Trainer(asked, reporters=[JsonLines()], nproc=2).fit() == "finished"
    return losses(asked)


def starts_after(run: RunConfig, step: int, how: str = "") -> list[int]:
    """The steps from which the run was started, with a kill before ``step``."""
    meddler = Meddler(step, Path(run.train.directory) / "mark", directory_of(run), how)
    assert Trainer(run, [meddler], reporters=[JsonLines()], nproc=2).fit() == "finished"
    return [line["step"] for line in lines_of(run, "start")]


def test_a_kill_costs_the_interrupted_step_alone(
    run: RunConfig, calm: list[tuple[int, float]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert starts_after(run, 4) == [0, 3]
    said = capfd.readouterr().err
    assert "restarting from step_00000003 in memory" in said and "step 3 from the copy in memory" in said
    assert losses(run) == calm


@pytest.mark.parametrize("how", ["flip", pytest.param("manifest", marks=SLOW), pytest.param("remove", marks=SLOW)])
def test_without_an_intact_copy_the_disk_is_used(
    run: RunConfig, calm: list[tuple[int, float]], how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of two copies, of steps 2 and 3, the older one is not newer than the checkpoint of step 2."""
    assert starts_after(run, 4, how) == [0, 2]
    said = capfd.readouterr().err
    assert ("step 3 in memory is not used" in said) == (how != "remove")
    assert how != "flip" or "no host has intact files of rank 0" in said
    assert losses(run) == calm


def test_copies_of_a_start_without_them_are_deleted(run: RunConfig) -> None:
    """Two starts later nothing is resumed that the start between has not continued."""
    left = final_path(directory_of(run), 3)
    left.mkdir(parents=True)
    off = replace(run, train=replace(run.train, saving=SavingConfig(every=0)))
    assert Trainer(off, reporters=[], nproc=1).fit() == "finished"
    assert not left.exists()


def test_another_run_of_the_same_name_does_not_resume_from_them(run: RunConfig) -> None:
    """The first run dies for good in its third step; then its directory is deleted, and the copies are not."""
    path = Path(run.train.directory) / run.name

    class Ends(Callback):
        def before_step(self, step: int, control: Control) -> None:
            if step == 3:
                raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        Trainer(run, [Ends()], reporters=[]).fit()
    assert committed_steps(directory_of(run)) == [1, 2]
    shutil.rmtree(path)
    assert Trainer(run, reporters=[JsonLines()]).fit() == "finished"
    assert [line["step"] for line in lines_of(run, "start")] == [0]


def test_a_directory_that_others_can_write_is_refused(run: RunConfig) -> None:
    memory = directory_of(run)
    memory.mkdir(parents=True)
    memory.chmod(0o777)
    try:
        with pytest.raises(Exception, match=r"train\.saving\.memory_every: .* can be written by everybody"):
            Trainer(run, reporters=[]).fit()
    finally:
        shutil.rmtree(memory)


def test_files_of_a_rank_are_kept_by_another_host() -> None:
    hosts = HostRanks(((0, 1), (2, 3), (4,)), 0)
    assert [hosts.keeper_of(rank) for rank in range(5)] == [2, 3, 4, 4, 0]
    assert HostRanks(((0, 1),), 0).keeper_of(1) is None


def test_the_launcher_names_what_it_resumes_from(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    assert _newest(disk, memory) == "" and _newest(disk) == ""
    (memory / "step_00000003").mkdir(parents=True)
    assert _newest(disk, memory) == "step_00000003 in memory"
    (disk / "step_00000003").mkdir(parents=True)
    assert _newest(disk, memory) == "step_00000003"
    (memory / "step_100000000").mkdir()
    (memory / "step_100000001.3.tmp").mkdir()
    assert _newest(disk, memory) == "step_100000000 in memory"


def test_memory_is_where_the_name_says() -> None:
    assert memory_directory(Path("runs/a"), 1).parent == MEMORY / f"moefold-{os.geteuid()}"
    assert memory_directory(Path("runs/a")) != memory_directory(Path("other/a"))


@pytest.mark.nightly
def test_a_lost_host_comes_back_to_what_the_other_has_of_it() -> None:
    if not possible():
        pytest.skip("needs the right to make network namespaces")
    found = measure((1,), 4, undisturbed())
    assert found.as_it_must_be and found.steps_redone <= 1


class Stops(Callback):
    """All ranks fail in a step."""

    def before_step(self, step: int, control: Control) -> None:
        if step == 4:
            raise ValueError("enough")


def on_four_hosts(run: RunConfig, fails: bool) -> list[int]:
    """Each of four ranks as if on a host of its own; returns the step from which each resumed."""

    def work(rank: int) -> int:
        context, state = build_train_context(run, rank, 4, torch.device("cpu"), 60.0, node=rank)
        with suppress(ValueError):
            train(context, state, [Stops()] if fails else [])
        return state.step

    return spawn_ranks(work, 4, seconds=120.0)


@pytest.mark.parametrize(
    ("lost", "resumed", "said"),
    [
        ((1,), 3, "step 3 from the copy in memory"),
        pytest.param((0, 2), 3, "step 3 from the copy in memory", marks=SLOW),
        # What host 1 had is kept by host 2.
        ((1, 2), 2, "step 3 in memory is not used: no host has intact files of rank 1"),
    ],
)
def test_memories_of_four_hosts_of_which_some_are_lost(
    run: RunConfig, lost: tuple[int, ...], resumed: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = Path(run.train.directory) / run.name
    assert on_four_hosts(run, fails=True) == [0] * 4
    for host in range(4):
        held = {path.name for path in final_path(memory_directory(directory, host), 3).glob("*/*.safetensors")}
        assert held == {f"rank_{rank:05d}.safetensors" for rank in (host, (host - 1) % 4)}
    for host in lost:
        shutil.rmtree(memory_directory(directory, host))
    assert on_four_hosts(run, fails=False) == [resumed] * 4
    assert said in capfd.readouterr().err
    assert not any(memory_directory(directory, host).exists() for host in range(4))
