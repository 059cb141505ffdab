"""Real steps on fake CUDA with the Triton kernels, attention included: MLA, windows and sinks, around a ring."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="kernels are an extra")

# In a process of its own: fake CUDA must be loaded before torch is imported.
PROGRAM = """
from moefold.dryrun.fake_cuda.load_guard import load_guard
load_guard()
import sys
from moefold.checks.kernels import attention_in_use
from moefold.config.loading import override
from moefold.dryrun.fake_cuda.laboratory import examine
from moefold.recipes.catalog import recipe
changes = {"kernels.experts": "grouped", "kernels.backend": "triton", "precision.compute": "bfloat16", "parallel.cp": 2}
run = override(recipe(sys.argv[1]), changes | {"parallel.context.full": sys.argv[2]})
assert attention_in_use(run) == "triton"
print("findings:", [str(finding) for finding in examine(run, 2, 1)])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [("deepseek_v3_proxy", "ring"), ("deepseek_v3_proxy", "all_to_all"), ("gpt_oss_20b_proxy", "ring")],
)
def test_nothing_is_found(name: str, mode: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, name, mode], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "findings: []", done.stdout
