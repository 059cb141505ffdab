"""The scripts that teach run as they are, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.marks import slow_except

ROOT = Path(__file__).parents[1]
# What each must say, beside its own assertions.
EXAMPLES = {
    "moe_layer.py": "output: (5, ",
    "grpo_cpu.py": "mean reward of the first five steps ",
    "own_router.py": "holds = False; first seen in: counts",
    "own_callback.py": "outcome: stopped; ",
    "plan_layouts.py": "best of these: ",
}


def test_every_example_is_run() -> None:
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == sorted(EXAMPLES)


@pytest.mark.parametrize("name", slow_except(EXAMPLES, "moe_layer.py", "plan_layouts.py"))
def test_example_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert EXAMPLES[name] in done.stdout
    # An example that resumes with more steps is told so.
    said = [line for line in done.stderr.splitlines() if not line.startswith("moefold: settings changed since")]
    assert said == []


def test_examples_have_cells_and_use_the_public_api_only() -> None:
    for name in EXAMPLES:
        lines = (ROOT / "examples" / name).read_text().splitlines()
        assert sum(line.startswith("# %%") for line in lines) >= 4, name
        assert not [line for line in lines if line.strip().startswith(("from moefold", "import moefold."))], name
