"""The wheel, installed alone: the quickstart's commands work without a GPU, and their steps on fake ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Command = Callable[[str], str]


@pytest.fixture(scope="module")
def moefold(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs a command of the installed wheel in an empty folder; packages that it needs come from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("moefold-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
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
