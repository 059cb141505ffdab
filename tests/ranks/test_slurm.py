"""A preempted job of a real SLURM, of four nodes on this machine, is saved, queued again, and goes on where it was."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.signal_draws import environment

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
CLUSTER, GRACE = ROOT / "tests" / "slurm_cluster.sh", 120
TRAIN = (
    "{python} -m moefold.cli.main train debug_tiny --name run --train.directory {directory} --parallel.ep 4 "
    "--data.seq_len 16 --data.global_batch 4 --data.micro_batch 1 --train.steps 2000 --train.log_every 1 --patience 120"
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.getuid():
        pytest.skip(f"a SLURM of four nodes needs root and slurm-wlm and munge; missing: {missing or 'root'}")
    directory = tmp_path / "slurm"
    monkeypatch.setenv("SLURM_CONF", str(directory / "slurm.conf"))
    # Nodes of one machine have names that nothing resolves.
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    try:
        subprocess.run(["bash", CLUSTER, "start", directory, str(GRACE)], check=True, env=environment())
        yield directory
    finally:
        subprocess.run(["bash", CLUSTER, "stop", directory], check=True)


def job_script(directory: Path) -> str:
    """The launch file of the examples from where it ignores SIGTERM, with a small run on CPUs."""
    text = (ROOT / "examples/launch/slurm.sbatch").read_text()
    text = text[text.index("trap ") :]
    words = TRAIN.format(python=sys.executable, directory=directory)
    text, replaced = re.subn(r"moefold train .*?(?= \|\| code)", words, text, flags=re.DOTALL)
    assert replaced == 1
    head = f"#!/bin/bash\n#SBATCH --partition=low --nodes=4 --ntasks-per-node=1 --requeue --output={directory}/log\n"
    return head + "#SBATCH --exclusive --open-mode=append\n" + text


def wait_for(pattern: str, log: Path, seconds: float = 400.0) -> re.Match[str]:
    deadline = time.monotonic() + seconds
    while not (found := re.search(pattern, log.read_text() if log.exists() else "", re.MULTILINE)):
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "the job wrote nothing"
        time.sleep(0.2)
    return found


def submit(*words: str) -> str:
    return slurm_says("sbatch", "--parsable", *words)


def slurm_says(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, env=environment()).stdout.strip()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_preempted_job_is_saved_and_queued_again(slurm: Path, tmp_path: Path) -> None:
    (script := tmp_path / "job.sbatch").write_text(job_script(tmp_path))
    log = tmp_path / "log"
    low = submit(str(script))
    wait_for(r"^step=5/", log)
    high = submit("--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    saved = wait_for(r"^saved step=(\d+) ", log, GRACE)[1]
    wait_for("exit code 75", log)
    state = slurm_says("scontrol", "show", "job", low)
    while "JobState=PENDING" not in state and "Restarts=1" not in state:
        time.sleep(0.5)
        state = slurm_says("scontrol", "show", "job", low)
    while "JobState=COMPLETED" not in slurm_says("scontrol", "show", "job", high):
        time.sleep(0.5)
    # SLURM lets a job that was queued again rest for two minutes.
    slurm_says("scontrol", "update", f"jobid={low}", "StartTime=now")
    wait_for(rf"resumed_from={saved}$", log)
    first = int(wait_for(r"resumed_from=\d+\n(?:(?!step=).*\n)*step=(\d+)/", log)[1])
    assert first == int(saved) + 1 and "Traceback" not in log.read_text(), log.read_text()
    # A job that a person cancels is saved, and not queued again.
    slurm_says("scancel", low)
    wait_for(rf"(?s)resumed_from={saved}.*^saved step=", log, 120)
    time.sleep(8)
    assert "JobState=CANCELLED" in slurm_says("scontrol", "show", "job", low)
