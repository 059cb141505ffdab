"""The real training step of every rank on fake GPUs: nothing is found in the code as it is, and seeded faults are."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.gpu_lab.lab_cases import CASES
from tests.gpu_lab.lab_faults import FAULTS

NUM_BATCHES = 6
# Cases in equal batches, because every process imports torch anew, and is warm after its first case.
BATCHES = [list(CASES)[start::NUM_BATCHES] for start in range(NUM_BATCHES)]


def examined(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.gpu_lab.run_cases", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", BATCHES, ids=lambda names: names[0])
def test_a_step_of_every_rank_has_no_finding(names: list[str]) -> None:
    found = examined(*names)
    assert [each["name"] for each in found] == names
    for each in found:
        assert not each["findings"], (each["name"], [text for _, text in each["findings"]])
        assert each["launches"] > 300 and (each["calls"] or CASES[each["name"]].world == 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    found = examined("--faults", name)[0]["findings"]
    assert any(kind == fault.kind and fault.words in text for kind, text in found), found


def test_there_are_at_least_sixty_cases() -> None:
    assert len(CASES) >= 60
