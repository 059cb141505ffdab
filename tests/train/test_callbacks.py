"""What a run shows while it runs: lines, JSONL that survives kills, and services that are asked for."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.run_records import CONTROL, info_of, record_of, tell

from moefold.errors import BackendError
from moefold.train.callback import Callbacks, Evaluation
from moefold.train.callbacks.console import ConsoleLines, ProgressBar
from moefold.train.callbacks.jsonl import FILE_NAME, JsonLines, cut_after
from moefold.train.callbacks.registry import default_callbacks, services


def lines_of(directory: Path, kind: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / FILE_NAME).read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def test_a_line_has_every_field_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell(ConsoleLines("CPU"), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step=")]
    assert [line.split()[0] for line in steps] == ["step=5/20", "step=10/20", "step=15/20", "step=20/20"]
    names = [field.partition("=")[0] for field in steps[0].split()]
    assert " ".join(names) == "step loss balance.sequence grad_norm lr tokens/s tflops mfu memory ms data load dead eta"
    assert " loss=2.2833 " in steps[0]  # the mean of 5/1 ... 5/5
    for expected in ("tokens/s=5.1K", "mfu=unknown", "memory=3.0GiB", "ms=100.0", "data=10.0%", "load=4.00", "dead=1"):
        assert f" {expected} " in steps[0], steps[0]
    assert steps[0].endswith("eta=1.5s")
    assert "mfu: none on a CPU" in lines[1]
    assert "validation step=10 loss=2.5000" in lines
    assert lines[-1] == "stopped reason=finished"


def test_a_skipped_step_says_why_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ConsoleLines("CPU")
    lines.on_start(info_of(tmp_path))
    lines.after_step(record_of(1), CONTROL)
    lines.after_step(record_of(2, loss=float("nan"), skipped="loss is nan"), CONTROL)
    assert "step=2/20 skipped=loss_is_nan" in capsys.readouterr().out
    for step in (3, 4, 5):
        lines.after_step(record_of(step, dropped=7), CONTROL)
    out = capsys.readouterr().out
    assert "skipped=1 " in out and "nan" not in out and "dropped=21 " in out


def test_every_step_is_one_json_line(tmp_path: Path) -> None:
    tell(JsonLines("CPU"), tmp_path)
    steps = lines_of(tmp_path, "step")
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert steps[3]["grad_norm"] == 1.25 and steps[3]["speed"]["tokens_per_s"] == pytest.approx(5120)
    counted = [line for line in steps if "counts" in line]
    assert [line["step"] for line in counted] == [5, 10, 15, 20]
    assert counted[0]["counts_steps"] == 5 and counted[0]["counts"][1][0] == 5 * 512
    assert [line["kind"] for line in lines_of(tmp_path) if line["kind"] != "step"] == [
        "start",
        "validation",
        "save",
        "stop",
    ]
    assert lines_of(tmp_path, "start")[0]["config"]["train"]["log_every"] == 5


def test_layers_of_an_interval(tmp_path: Path) -> None:
    """Load and entropy of the summed counts; balance losses of the mean step."""
    lines = JsonLines("CPU")
    lines.on_start(info_of(tmp_path))
    for step in range(1, 6):
        losses = {"sequence": [0.5 * step, float("nan") if step == 2 else 0.25]}
        lines.after_step(record_of(step, counts=[[3, 1, 0, 0], [1, 1, 1, 1]], layer_balance=losses), CONTROL)
    *others, last = lines_of(tmp_path, "step")
    assert not any("layers" in line or "layer_balance" in line for line in (*others,)) and "layer_balance" not in last
    layers = last["layers"]
    assert layers["max_load"] == [3.0, 1.0] and layers["balance"] == {"sequence": [1.5, None]}
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert layers["entropy"] == [pytest.approx(entropy, rel=1e-5), 1.0]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    lines = JsonLines("CPU")
    lines.on_start(info_of(tmp_path))
    lines.after_step(
        record_of(1, loss=float("nan"), grad_norm=float("inf"), counts=None, skipped="loss is nan"), CONTROL
    )
    lines.on_evaluate(Evaluation(1, float("nan")), CONTROL)
    (step,) = lines_of(tmp_path, "step")
    assert (step["loss"], step["grad_norm"], step["skipped"]) == (None, None, "loss is nan")
    assert lines_of(tmp_path, "validation")[0]["loss"] is None


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    first = JsonLines("CPU")
    first.on_start(info_of(tmp_path))
    for step in range(1, 14):
        first.after_step(record_of(step), CONTROL)
    first.on_save(10, tmp_path / "step_10")  # committed while training had gone on
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b'{"kind":"step","step":14,"lo')  # killed while writing
    second = JsonLines("CPU")
    second.on_start(info_of(tmp_path, resumed_from=10))
    for step in range(11, 21):
        second.after_step(record_of(step, loss=1.0), CONTROL)
    second.on_end("finished")
    assert [line["step"] for line in lines_of(tmp_path, "step")] == list(range(1, 21))
    assert [line["loss"] for line in lines_of(tmp_path, "step")][9:12] == [0.5, 1.0, 1.0]
    assert [line["step"] for line in lines_of(tmp_path, "save")] == [10]
    assert [line["resumed_from"] for line in lines_of(tmp_path, "start")] == [None, 10]


def test_a_run_that_starts_anew_forgets_its_steps(tmp_path: Path) -> None:
    for _ in range(2):
        tell(JsonLines("CPU"), tmp_path, steps=6)
    assert [line["step"] for line in lines_of(tmp_path, "step")] == [1, 2, 3, 4, 5, 6]
    assert len(lines_of(tmp_path, "start")) == 2 and len(lines_of(tmp_path, "stop")) == 1


@pytest.mark.parametrize("cut", range(0, 1200, 37))
def test_any_cut_leaves_whole_lines(tmp_path: Path, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefold.train.callbacks.jsonl._BLOCK", 16)
    path = tmp_path / FILE_NAME
    text = b"".join(b'{"kind":"step","step":%d,"x":"%s"}\n' % (i, b"y" * (i % 40)) for i in range(1, 31))
    path.write_bytes(text[:cut])
    whole = text[:cut].count(b"\n")
    cut_after(path, 12)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, min(whole, 12) + 1))


def test_walking_back_does_not_read_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with path.open("wb") as file:
        file.seek(1 << 40)  # a terabyte of earlier steps, not really there
        file.write(b'\n{"kind":"step","step":7}\n{"kind":"step","step":8}\n')
    cut_after(path, 7)
    assert path.stat().st_size == (1 << 40) + len(b'\n{"kind":"step","step":7}\n')


def test_the_bar_follows_the_run(tmp_path: Path) -> None:
    out = io.StringIO()
    tell(ProgressBar(Console(file=out, force_terminal=True, width=120), "CPU"), tmp_path)
    assert "20/20" in out.getvalue() and "tokens/s" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


def test_json_keeps_standard_output_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell(Callbacks(default_callbacks(as_json=True)), tmp_path, loss=float("inf"))
    out, err = capsys.readouterr()
    assert json.loads(out)["record"]["step"] == 20 and json.loads(out)["record"]["loss"] is None
    assert "step=20/20" in err
    tell(Callbacks(default_callbacks()), tmp_path)
    assert "step=20/20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow-skinny")]
)
def test_a_missing_service_is_named(key: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    train = info_of(tmp_path, **{key: True if key == "tensorboard" else "my project"}).run.train
    with pytest.raises(
        BackendError,
        match=f"train.{key}: {package} .*(is not installed|does not import).*pip install {package}; or set train.{key}",
    ):
        services(train)


class Recorder:
    """Stands for both services: remembers what it was told."""

    def __init__(self, **made_with: Any) -> None:
        self.made_with, self.seen, self.summary, self.closed = made_with, [], {}, False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.append((name, value, step))

    def log(self, values: dict[str, float]) -> None:
        self.seen += [(name, value, values["step"]) for name, value in values.items() if name != "step"]

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def close(self) -> None:
        self.closed = True

    finish = close


def test_services_get_finite_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recorder] = []

    def make(**kwargs: Any) -> Recorder:
        made.append(Recorder(**kwargs))
        return made[-1]

    board, wandb = types.ModuleType("torch.utils.tensorboard"), types.ModuleType("wandb")
    board.SummaryWriter, wandb.init = make, make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for resumed in (None, 10):
        told = Callbacks(services(info_of(tmp_path, tensorboard=True, wandb="project").run.train))
        told.on_start(info_of(tmp_path, resumed_from=resumed))
        told.after_step(
            record_of(
                11,
                grad_norm=float("inf"),
                skipped="norm is inf",
                metrics={"mine": 1.0, "a/b": 2.0},
                layer_balance={"sequence": [0.5, float("nan")]},
            ),
            CONTROL,
        )
        told.on_evaluate(Evaluation(11, 2.0, {"perplexity": 7.0}), CONTROL)
        told.on_end("finished")
    assert [service.closed for service in made] == [True] * 4
    for service in made:
        names = [name for name, _, _ in service.seen]
        assert {"train/loss", "router/max_load", "validation/loss", "balance/sequence"} <= set(names)
        assert {"metrics/mine", "a/b", "validation/perplexity"} <= set(names)
        assert {"max_load/0", "max_load/1", "entropy/1", "balance_sequence/0"} <= set(names)
        assert "balance_sequence/1" not in names
        assert "train/grad_norm" not in names and {step for *_, step in service.seen} == {11}
    assert [service.made_with["purge_step"] for service in made[::2]] == [None, 11]
    first, second = (service.made_with for service in made[1::2])
    assert first["project"] == "project" and first["id"] == second["id"]
