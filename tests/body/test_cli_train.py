"""The verb itself, on one process, as a user would call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moefold.cli.main import main


def command(directory: Path, *words: str) -> list[str]:
    small = [
        "--data.seq_len",
        "16",
        "--data.global_batch",
        "4",
        "--data.micro_batch",
        "2",
        "--train.validate_batches",
        "1",
    ]
    return ["train", "debug_tiny", "--train.directory", str(directory), *small, *words]


def test_a_run_ends_can_be_named_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, "--name", "mine", "--train.steps", "3", "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["reason"], said["record"]["step"]) == ("finished", 3)
    assert (tmp_path / "mine" / "checkpoints" / "step_00000003" / "manifest.json").exists()
    assert main(command(tmp_path, "--name", "mine", "--train.steps", "5")) == 0
    lines = [json.loads(line) for line in (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parallel.ep", "3"], "parallel.ep"),
        (["--parallel.pp", "2", "--parallel.vpp", "2", "--nproc", "2"], "parallel.vpp"),
        (["--train.stps", "3"], "did you mean 'steps'"),
        (["--name", "../elsewhere"], "name"),
        (["--device", "cuda", "--nproc", "2"], "torchrun --master-port 29500 --nproc-per-node 2"),
    ],
)
def test_what_cannot_start_is_said_before_anything_is_written(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path / "runs", *words)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path / "runs", "--device", "cuda")) == 2
    assert "device cuda: torch sees no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_first_line_says_device_and_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, "--device", "cpu", "--train.steps", "1")) == 0
    assert " device=cpu " in (first := capsys.readouterr().out.splitlines()[0]) and " experts=auto:fused " in first
    start = json.loads((tmp_path / "debug_tiny" / "metrics.jsonl").read_text().splitlines()[0])
    assert (start["device"], start["experts"]) == ("CPU", "fused")


def test_a_recipe_without_data_is_not_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "olmoe_1b_7b_proxy", "--train.steps", "1", "--train.directory", str(tmp_path / "runs")]
    assert main(words) == 2
    assert "data.train: names no tokens to train on" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main([*words, "--data.train", "builtin"]) == 0
