"""`moefold dryrun --device cuda`: the same collectives as on a CPU, and models of full size with the GPU's kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
COMMAND = "import sys; from moefold.cli.main import main; sys.exit(main())"
GPU = "--device cuda --precision.compute bfloat16 --kernels.backend triton --kernels.experts grouped"


def dryrun(words: str) -> dict[str, Any]:
    command = [sys.executable, "-c", COMMAND, "dryrun", *words.split(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    return dict(json.loads(done.stdout))


def test_collectives_are_those_of_a_cpu() -> None:
    words = "deepseek_v3_proxy --world 4 --rank 1 --parallel.ep 2 --parallel.tp 2 --precision.compute bfloat16"
    on_gpu, on_cpu = dryrun(f"{words} --device cuda"), dryrun(words)
    assert on_gpu["collectives"] == on_cpu["collectives"]
    assert on_gpu["peak"]["parameters"] == on_cpu["peak"]["parameters"]
    assert on_gpu["category_peaks"]["communication"] > 0


@pytest.mark.parametrize(
    ("words", "gib"),
    [
        (
            "deepseek_v3 --world 256 --rank 192 --parallel.pp 4 --parallel.vpp 4 --parallel.ep 64 "
            "--parallel.schedule interleaved --data.global_batch 4096",
            (9, 11),
        ),
        ("qwen3_235b_a22b --world 128 --rank 127 --parallel.pp 4 --parallel.ep 32 --data.global_batch 1024", (6, 8)),
    ],
    ids=["deepseek_v3", "qwen3_235b"],
)
def test_a_model_of_full_size_has_no_finding(words: str, gib: tuple[int, int]) -> None:
    pytest.importorskip("triton", reason="kernels are an extra")
    found = dryrun(f"{words} {GPU}")
    assert found["findings"] == []
    least, most = gib
    assert least < found["peak"]["parameters"] / 2**30 < most
    assert found["peak_total"] > found["peak"]["parameters"]
