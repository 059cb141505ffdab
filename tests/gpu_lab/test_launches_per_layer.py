"""A layer of a whole step on fake GPUs launches no more kernels than docs/host-overhead.md says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs/host-overhead.md"
ROW = re.compile(r"^\| (\w+_proxy) \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_launches_are_those_of_the_docs() -> None:
    pytest.importorskip("triton", reason="kernels are an extra")
    command = [sys.executable, "-m", "tests.gpu_lab.launches_per_layer"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    documented = {
        name: {"torch": float(torch), "triton": float(triton)} for name, torch, triton in ROW.findall(DOCS.read_text())
    }
    assert json.loads(done.stdout) == documented
    assert all(launches["triton"] <= 251 for launches in documented.values())
