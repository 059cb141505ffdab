from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moefold.comm import spawn as launch
from moefold.ops.host_probe import probe_host

FAULTS = """
import resource, sys
from moefold.comm.spawn import disable_malloc_trim
import torch
if sys.argv[1] == "kept":
    assert disable_malloc_trim()
work = lambda: torch.ones(12 << 20).add_(1)
# Aligned buffers do not fit into what was freed at first.
for _ in range(12):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Of five buffers of 48 MiB that come and go, after a few."""
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not probe_host().malloc_trim_disabled, reason="another C library or allocator")
@pytest.mark.slow
def test_memory_that_is_kept_is_not_faulted_in_again() -> None:
    assert faults("kept") < 100 < faults("handed back")


def test_the_launcher_keeps_it_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(launch, "disable_malloc_trim", lambda: asked.append(True))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("RANK", raising=False)
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert launch.join_world(1.0) == (0, 1)
    assert asked == [True]
