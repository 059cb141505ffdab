"""The proof on launched ranks: here over gloo on CPUs, against the float64 reference, with the format's tolerances."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.api.runs import load_run
from moefold.checks.kernels import kernels_in_use
from moefold.cli.main import main
from moefold.cli.run_argument import launched_ranks
from moefold.comm.spawn import spawn_ranks
from moefold.config.precision import Format
from moefold.prove import compare_rank
from moefold.prove.cases import Case
from moefold.prove.verdict import device_case, prove_on_ranks, reference_case

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# Two waves of a pipeline, so that the replay of routing has to tell them apart; and a context-parallel one with sinks.
LAYOUTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "ep": ("debug_tiny", {"parallel.ep": 2}, 2),
    "pp": ("debug_mla", {"parallel.pp": 2}, 2),
    "cp": ("gpt_oss_20b_proxy", {"parallel.cp": 2}, 2),
}


def verdicts(case: Case, fault: bool = False) -> list[Any]:
    def work(rank: int) -> list[Any]:
        if fault and rank == 1:
            count = compare_rank.count_step_labels
            compare_rank.count_step_labels = lambda mine, groups: 2 * count(mine, groups)  # type: ignore[assignment]
        verdict = prove_on_ranks(case, rank, CPU)
        return [verdict.holds, verdict.worst, verdict.culprit, len(verdict.rows)]

    return spawn_ranks(work, case.world)


@pytest.mark.parametrize("layout", ["ep", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pp", "cp"))])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_layouts_hold_in_every_format(layout: str, dtype: Format) -> None:
    name, changes, world = LAYOUTS[layout]
    first, *others = verdicts(device_case(load_run(name, changes), world, dtype, "cpu"))
    assert first[0] and first[3] > 50 and all(other == first for other in others)
    # The format's own error is there: the reference is in float64.
    least, most = {"float64": (0.0, 1e-9), "float32": (1e-8, 1e-3), "bfloat16": (1e-3, 1.0)}[dtype]
    assert least <= first[1] <= most


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_fault_on_one_rank_is_found_by_all(dtype: Format) -> None:
    for holds, _, culprit, _ in verdicts(device_case(load_run("debug_tiny"), 2, dtype, "cpu"), fault=True):
        assert not holds and culprit == "loss"


def test_kernels_are_those_of_the_run_and_the_device() -> None:
    run = load_run("debug_tiny", {"kernels.backend": "triton", "kernels.experts": "grouped"})
    chosen = {dtype: device_case(run, 1, dtype, "cuda").run.kernels for dtype in ("float64", "float32", "bfloat16")}
    assert [(kernels.experts, kernels.backend) for kernels in chosen.values()] == [
        ("sequential", "torch"),
        ("sequential", "triton"),
        ("grouped", "triton"),
    ]
    case = reference_case(device_case(run, 1, "bfloat16", "cuda"))
    assert case.run.precision.compute == case.run.precision.params == "float64"
    assert (case.run.kernels.experts, case.run.kernels.backend) == ("sequential", "torch")


def test_engines_that_a_run_names_are_proved_where_they_take_the_format() -> None:
    named = {"experts": "deepgemm", "permute": "transformer_engine", "linear": "transformer_engine"}
    run = load_run(
        "debug_tiny", {f"kernels.{key}": name for key, name in named.items()} | {"kernels.attention": "flex"}
    )
    used = {dtype: kernels_in_use(device_case(run, 1, dtype, "cuda").run, "cuda") for dtype in ("float32", "bfloat16")}
    assert used["bfloat16"] == {**named, "attention": "flex", "backend": "torch"}
    # DeepGEMM and Transformer Engine's GEMM multiply bfloat16 only.
    own = {"experts": "sequential", "permute": "transformer_engine", "linear": "torch"}
    assert used["float32"] == {**own, "attention": "flex", "backend": "torch"}
    # MXFP8 needs blocks of 32, which the reduced experts do not fill.
    run = load_run("debug_tiny", {"kernels.experts": "mxfp8"})
    assert device_case(run, 1, "bfloat16", "cuda").run.kernels.experts == "grouped"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "debug_tiny", "--device", "cuda"]) == 2
    assert "device cuda: torch sees no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["debug_tiny", "--world", "4"],
            "--world 4, but 1 rank was started; start 4 ranks: torchrun --master-port 29500 --nproc-per-node 4",
        ),
        (["--cases", "3"], "on launched ranks, a proof is of a RUN"),
    ],
)
def test_what_cannot_be_proven_there_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", *words, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def test_a_shell_of_a_job_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert launched_ranks() == 1
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[3-4]")
    assert launched_ranks() == 4


def test_one_process_is_a_world(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "debug_tiny", "--device", "cpu", "--dtype", "bfloat16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] and (found["world"], found["device"], found["experts"]) == (1, "cpu", "fused")


@pytest.mark.slow
def test_a_run_is_proven_in_bfloat16_with_more_than_one_wave(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "debug_tiny", "--world", "2", "--parallel.ep", "2", "--dtype", "bfloat16"]) == 0
    assert main(["prove", "debug_tiny", "--world", "2", "--parallel.ep", "2", "--dtype", "float32"]) == 0


@pytest.mark.slow
def test_the_verb_runs_under_torchrun() -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "moefold.cli.main"]
    done = subprocess.run(
        [sys.executable, *words, "prove", "debug_tiny", "--device", "cpu", "--parallel.ep", "2", "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["holds"] and found["world"] == 2 and found["worst"] < 1e-9
