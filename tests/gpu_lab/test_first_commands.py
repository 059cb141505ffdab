"""The first commands that a person with GPUs types give no BackendError: their runs, on fake GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Half a minute on an idle core: every rank of nine runs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_lab.first_commands"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_run_takes_a_step_without_a_finding(found: Any) -> None:
    assert len(found["runs"]) == 9
    assert not [name for name, run in found["runs"].items() if run["findings"]]
    assert found["layers"] == ["ParallelInterfaces"] * 2


def test_experts_suit_the_format(found: Any) -> None:
    chosen = {name: run["experts"] for name, run in found["runs"].items()}
    assert chosen.pop("bench step") == chosen.pop("prove in bfloat16") == "grouped"
    assert set(chosen.values()) == {"sequential"}


def test_torch_itself_judges_the_grouped_gemm_on_a_gpu(found: Any) -> None:
    judged = found["grouped_mm"]
    assert judged.pop("cuda:0 torch.float32").startswith("Expected inputs of BF16 type")
    assert set(judged.values()) == {"(32, 16)"}


def test_grouped_experts_in_float32_are_refused_before_that(found: Any) -> None:
    assert found["refused"].startswith(
        "kernels.experts: grouped cannot do experts: takes bfloat16 on a GPU, not float32; "
        "what works here on cuda: sequential; auto chooses"
    )
