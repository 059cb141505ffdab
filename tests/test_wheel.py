"""The wheel, installed alone: it plans without torch, and with it the quickstart's commands work without a GPU, and
their steps on fake ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Command = Callable[[str], str]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([*PIP, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    (built,) = folder.glob("moefold-*.whl")
    return built


@pytest.fixture(scope="module")
def moefold(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs a command of the installed wheel in an empty folder; packages that it needs come from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    environment = os.environ | {"PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1"}

    def run(words: str) -> str:
        command = [sys.executable, str(folder / "site/bin/moefold"), *words.split()]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        assert done.returncode == 0 and "BackendError" not in said, (words, said[-2000:])
        return said

    where = [sys.executable, "-c", "import moefold; print(moefold.__file__)"]
    assert str(folder) in subprocess.run(where, env=environment, capture_output=True, text=True, check=True).stdout
    return run


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment into which the wheel was installed with what it requires, no extra."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    subprocess.run([str(folder / "bin/python"), *PIP[1:], "install", str(wheel)], check=True)
    return folder / "bin"


def in_bare(bare: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([str(bare / program), *words], cwd=bare, env=clean, capture_output=True, text=True)


def test_the_wheel_requires_no_torch(bare: Path) -> None:
    assert "No module named 'torch'" in in_bare(bare, "python", "-c", "import torch").stderr
    for words in (
        "plan qwen3_30b_a3b --gpu H100 --gpus 64",
        "check qwen3_30b_a3b --data.train somewhere --train.steps 10 --optim.lr 1e-4",
        "layout --world 64 --tp 2 --ep 8",
        "schedule dualpipe_v --stages 8 --microbatches 16",
        "init debug_tiny",
        "doctor",
    ):
        done = in_bare(bare, "moefold", *words.split())
        assert done.returncode == 0, (words, done.stderr[-2000:])
    done = in_bare(bare, "moefold", "train", "debug_tiny")
    assert done.returncode == 2 and done.stderr.startswith("moefold: moefold train needs torch"), done.stderr


def test_it_imports_in_a_fifth_of_a_second(bare: Path) -> None:
    """About 3 ms where it was written, so that the limit is sixty times that; the best of five imports."""
    timed = "import time; start = time.perf_counter(); import moefold; print(time.perf_counter() - start)"
    assert min(float(in_bare(bare, "python", "-c", timed).stdout) for _ in range(5)) < 0.2


def test_quickstart_without_a_gpu(moefold: Command) -> None:
    """Those of the README, with fewer steps."""
    quickstart = (ROOT / "README.md").read_text().split("```")[1]
    commands = [line.removeprefix("moefold ") for line in quickstart.splitlines() if line.startswith("moefold ")]
    assert [words.split()[0] for words in commands] == ["tokenize", "train", "report", "convert"]
    for words in commands:
        words = words.replace("tokenize src docs", f"tokenize {ROOT / 'docs'}")
        moefold(re.sub(r"train\.steps \d+", "train.steps 20", words))


@pytest.mark.parametrize("words", ["debug_tiny --world 1", "debug_small --world 1", "debug_small --world 2 --rank all"])
def test_quickstart_on_fake_gpus(moefold: Command, words: str) -> None:
    """The step of the same recipes with nothing chosen, on fake GPUs."""
    assert "0 findings on fake GPUs" in moefold(f"dryrun {words} --device cuda")
