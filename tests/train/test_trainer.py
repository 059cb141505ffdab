"""`Trainer` and its callbacks: which hooks run where, what they can ask for, and what their metrics become."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

import moefold
from moefold.errors import MoefoldError, RankError
from moefold.train.report.history import read_history
from moefold.train.report.run_page import page


def tiny(directory: Path, steps: int = 4, **changes: object) -> moefold.RunConfig:
    small = {"data.seq_len": 16, "data.global_batch": 4, "data.micro_batch": 2, "train.log_every": 2}
    fixed = {"train.steps": steps, "train.directory": str(directory), "train.saving.every": 0}
    return moefold.load_run("debug_tiny", {**small, **fixed, **changes})


class Everything(moefold.Callback):
    """Notes every call in a file of the rank that it came to."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.rank = directory, 0

    def note(self, *words: object) -> None:
        with (self.directory / f"rank_{self.rank}").open("a") as file:
            print(*words, file=file)

    def on_start(self, info: moefold.RunInfo) -> None:
        self.note("on_start", info.world)

    def before_step(self, step: int, control: moefold.Control) -> None:
        self.rank = control.rank
        self.note("before_step", step)

    def after_backward(self, gradients: Mapping[str, Tensor], control: moefold.Control) -> None:
        changed = all(parameter is not None for parameter in control.model.parameters())
        self.note("after_backward", len(gradients) > 0 and changed)

    def after_step(self, record: moefold.StepRecord, control: moefold.Control) -> None:
        self.note("after_step", record.step)

    def on_evaluate(self, evaluation: moefold.Evaluation, control: moefold.Control) -> None:
        self.note("on_evaluate", evaluation.step)

    def on_save(self, step: int, path: Path) -> None:
        self.note("on_save", step)

    def on_error(self, error: BaseException) -> None:
        self.note("on_error", error)

    def on_end(self, reason: str) -> None:
        self.note("on_end", reason)


STEP = ["before_step {0}", "after_backward True", "after_step {0}"]


def test_hooks_come_in_order(tmp_path: Path) -> None:
    run = tiny(tmp_path, steps=2)
    assert moefold.Trainer(run, [Everything(tmp_path)], reporters=[]).fit() == "finished"
    steps = [line.format(number) for number in (1, 2) for line in STEP]
    expected = ["on_start 1", *steps, "on_evaluate 2", "on_save 2", "on_end finished"]
    assert (tmp_path / "rank_0").read_text().splitlines() == expected


def test_two_hooks_run_on_every_rank(tmp_path: Path) -> None:
    run = tiny(tmp_path, steps=2, **{"parallel.ep": 2, "data.validation": None})
    assert moefold.Trainer(run, [Everything(tmp_path)], reporters=[], nproc=2).fit() == "finished"
    assert (tmp_path / "rank_1").read_text().splitlines() == [
        line.format(number) for number in (1, 2) for line in STEP[:2]
    ]
    assert "after_step 2" in (tmp_path / "rank_0").read_text()


def test_host_switches_change_no_number(tmp_path: Path) -> None:
    """Garbage is collected after every second step, and each of two ranks stays on cores of its own."""
    switches = {"train.host.gc": "manual", "train.host.gc_every": 2, "train.host.bind": "cores"}
    losses = []
    for name, changes in (("plain", {}), ("switched", switches)):
        run = tiny(tmp_path / name, **{"parallel.ep": 2, "data.validation": None, **changes})
        assert moefold.Trainer(run, nproc=2).fit() == "finished"
        losses.append(read_history(tmp_path / name / run.name).columns["loss"].tolist())
    assert losses[0] == losses[1] and len(losses[0]) == 4


class AskOnRank(moefold.Callback):
    """Asks for a checkpoint after step 2 and a stop after step 3, on one rank only."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def before_step(self, step: int, control: moefold.Control) -> None:
        if control.rank == self.rank:
            if step == 2:
                control.request_save()
            if step == 3:
                control.request_stop("seen enough")


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 1)])
def test_all_ranks_save_and_stop_when_one_asks(world: int, rank: int, tmp_path: Path) -> None:
    run = tiny(tmp_path, steps=9, **{"parallel.ep": world})
    callbacks = [AskOnRank(rank), Everything(tmp_path)]
    assert moefold.Trainer(run, callbacks, reporters=[], nproc=world).fit() == "stopped"
    noted = (tmp_path / "rank_0").read_text().splitlines()
    assert [line for line in noted if line.startswith("on_save")] == ["on_save 2", "on_save 3"]
    assert noted[-1] == f"on_end stopped: {'seen enough' if rank == 0 else 'asked by a callback on another rank'}"


class Metrics(moefold.Callback):
    def after_backward(self, gradients: Mapping[str, Tensor], control: moefold.Control) -> None:
        control.log("early", len(gradients))

    def after_step(self, record: moefold.StepRecord, control: moefold.Control) -> None:
        assert list(record.metrics) == ["early"], "a metric belongs to one step"
        control.log("late", record.step)
        if record.step == 3:
            control.log("rare", float("nan"))

    def on_evaluate(self, evaluation: moefold.Evaluation, control: moefold.Control) -> None:
        control.log("perplexity", 2.0)


def test_metrics_appear_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moefold.Trainer(tiny(tmp_path), [Metrics()]).fit()
    lines = [json.loads(line) for line in (tmp_path / "debug_tiny" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["metrics"]["late"] for line in steps] == [1, 2, 3, 4]
    assert steps[2]["metrics"]["rare"] is None and "rare" not in steps[3]["metrics"]
    assert [line["metrics"] for line in lines if line["kind"] == "validation"] == [{"perplexity": 2.0}]
    out = capsys.readouterr().out
    assert " late=1.5 " in out and " late=3.5 " in out and "perplexity=2" in out
    history = read_history(tmp_path / "debug_tiny")
    assert history.metrics["late"].tolist() == [1, 2, 3, 4]
    assert "<h2>Metrics of callbacks</h2>" in page(history) and "<b>late</b>" in page(history)


@pytest.mark.parametrize("name", ["", "two words", "a=b", "loss"])
def test_a_metric_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    class Bad(moefold.Callback):
        def after_step(self, record: moefold.StepRecord, control: moefold.Control) -> None:
            control.log(name, 1.0)

    with pytest.raises(ValueError, match="a metric cannot be called"):
        moefold.Trainer(tiny(tmp_path), [Bad(), Everything(tmp_path)], reporters=[]).fit()
    noted = (tmp_path / "rank_0").read_text().splitlines()
    assert noted[-2].startswith("on_error a metric cannot") and noted[-1] == "on_end failed"


def test_callbacks_that_only_look_change_nothing(tmp_path: Path) -> None:
    losses = []
    for name, callbacks in (("bare", []), ("watched", [Everything(tmp_path), Metrics()])):
        moefold.Trainer(tiny(tmp_path, name=name), callbacks).fit()
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([line["loss"] for line in map(json.loads, lines) if line["kind"] == "step"])
    assert losses[0] == losses[1]


def test_a_run_resumes_and_an_own_router_trains(tmp_path: Path) -> None:
    run = tiny(tmp_path, steps=2)
    moefold.Trainer(run, reporters=[], routing_policy="balanced").fit()
    longer = moefold.load_run(run, {"train.steps": 3})
    counts: list[list[list[int]]] = []

    class Counts(moefold.Callback):
        def after_step(self, record: moefold.StepRecord, control: moefold.Control) -> None:
            assert record.step == 3 and record.counts is not None
            counts.append(record.counts)

    moefold.Trainer(longer, [Counts()], reporters=[], routing_policy="balanced").fit()
    assert [set(row) for row in counts[0]] == [{16}, {16}]


def test_it_trains_outside_the_main_thread(tmp_path: Path) -> None:
    outcomes: list[str] = []
    trainer = moefold.Trainer(tiny(tmp_path, steps=1), reporters=[])
    thread = threading.Thread(target=lambda: outcomes.append(trainer.fit()))
    thread.start()
    thread.join()
    assert outcomes == ["finished"]


def test_problems_come_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MoefoldError, match=r"parallel.ep"):
        moefold.Trainer(tiny(tmp_path, **{"parallel.ep": 3}))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MoefoldError, match="a launcher has started this one already"):
        moefold.Trainer(tiny(tmp_path), nproc=2)
    assert not (tmp_path / "debug_tiny").exists()


def test_an_error_on_one_rank_is_raised_here(tmp_path: Path) -> None:
    class Fails(moefold.Callback):
        def before_step(self, step: int, control: moefold.Control) -> None:
            if control.rank == 1:
                raise MoefoldError("rank 1 does not want to")

    with pytest.raises(RankError, match="rank 1 does not want to"):
        moefold.Trainer(tiny(tmp_path), [Fails()], reporters=[], nproc=2, patience=20).fit()


def test_a_finished_run_started_again_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def files() -> dict[str, tuple[int, bytes]]:
        found = [path for path in (tmp_path / "debug_tiny").rglob("*") if path.is_file()]
        # Locks and the number of starts say who holds the run.
        kept = [
            path for path in found if path.suffix != ".lock" and path.name not in ("incarnation.json", "config.yaml")
        ]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in kept}

    run = tiny(tmp_path, steps=2)
    assert moefold.Trainer(run).fit() == "finished"
    before = files()
    assert len(before) > 3
    capfd.readouterr()
    noted = Everything(tmp_path)
    assert moefold.Trainer(run, [noted]).fit() == "finished"
    assert files() == before and not list(tmp_path.glob("rank_*"))
    said = capfd.readouterr().err
    assert (
        "finished already: " in said and "step_00000002 has step 2 of 2; a larger train.steps goes on from it" in said
    )
    assert moefold.Trainer(tiny(tmp_path, steps=3), [noted], reporters=[]).fit() == "finished"
    assert list(tmp_path.glob("rank_*"))
