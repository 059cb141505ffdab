"""What the laboratory says about single mechanisms: the communication stream, and the first transfer of a ring."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
Found = dict[str, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def found() -> Found:
    command = [sys.executable, "-m", "tests.gpu_lab.small_programs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


def test_a_communication_stream_keeps_what_it_reads(found: Found) -> None:
    assert found["comm stream"] == []
    ((kind, text),) = found["comm stream that keeps nothing"]
    assert kind == "no record_stream" and "neg on another stream" in text


def test_a_gradient_is_added_by_its_gemm(found: Found) -> None:
    """`addmm` with float32 output, into a view of a buffer."""
    assert found["fused accumulation"] == []


def test_a_rank_without_rows_may_skip_the_first_transfer_of_a_ring(found: Found) -> None:
    """Only because communicators exist by then: torch makes a lazy one when all ranks of the group call it."""
    assert found["ring with an empty rank"] == []
    kinds = dict(found["the same, communicators made at first use"])
    assert "init" in kinds["deadlock"] and "device_id None" in kinds["device"]
    assert "no such call on rank 2" in kinds["ranks differ"]
