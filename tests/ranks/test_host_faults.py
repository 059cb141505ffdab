"""`moefold train --nnodes`: hosts with a launcher each; the faults between them are drawn by `tests/host_faults.py`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.host_faults import FAULTS, measure, undisturbed
from tests.two_hosts import possible

from moefold.cli.main import main
from moefold.train.fault_tolerance.signals import INTERRUPTED


def _launch(
    host: int, directory: Path, port: int, addresses: str = "localhost", steps: int = 100_000, *more: str
) -> subprocess.Popen[str]:
    words = (
        *(sys.executable, "-m", "moefold.cli.main", "train", "debug_tiny", "--nnodes", "2", "--node-rank", str(host)),
        *("--nproc", "1", "--master-addr", addresses, "--master-port", str(port), "--patience", "60"),
        *("--train.directory", str(directory), "--train.steps", str(steps), *more),
    )
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _said_until(launcher: subprocess.Popen[str], words: str) -> str:
    """What it wrote up to the line with these words."""
    assert launcher.stderr is not None
    said = ""
    for line in launcher.stderr:
        said += line
        if words in line:
            return said
    raise AssertionError(f"ended without {words!r}: {said}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _listening(port: int) -> set[str]:
    """Addresses, as the kernel writes them, on which something listens on this port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and int(address.rpartition(":")[2], 16) == port:
                found.add(address.rpartition(":")[0])
    return found


@pytest.mark.slow
def test_a_signal_to_one_host_saves_and_ends_both_with_75(tmp_path: Path) -> None:
    port = _free_port()
    launchers = [_launch(host, tmp_path, port) for host in range(2)]
    try:
        metrics, ends = tmp_path / "debug_tiny" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count('"loss"') > 1):
            assert time.monotonic() < ends and launchers[0].poll() is None, launchers[0].communicate()[1]
            time.sleep(0.1)
        # The store is open where it was asked for, and nowhere else.
        assert _listening(port) <= {"0100007F", "00000000000000000000000001000000"} and _listening(port)
        launchers[1].send_signal(signal.SIGTERM)
        said = [launcher.communicate(timeout=90)[1] for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [INTERRUPTED] * 2, said
        assert any((tmp_path / "debug_tiny" / "checkpoints").glob("step_*"))
    finally:
        for launcher in launchers:
            launcher.kill()


@pytest.mark.slow
def test_the_host_of_the_store_is_lost_for_good_and_comes_back_too_late(tmp_path: Path) -> None:
    """The other goes on alone from the copy in its memory; the lost one stands by, and ends when the run does."""
    port, directory = _free_port(), tmp_path / "debug_tiny"
    more = ("127.0.0.1,127.0.0.2", 100_000, "--host-patience", "4", "--train.saving.every", "2")
    memory = ("--train.saving.memory_every", "1")
    launchers = [_launch(host, tmp_path, port, *more, *memory) for host in range(2)]
    try:
        ends = time.monotonic() + 120
        while not any((directory / "checkpoints").glob("step_*")):
            assert time.monotonic() < ends and launchers[0].poll() is None, launchers[0].communicate()[1]
            time.sleep(0.05)
        launchers[0].kill()
        # On a busy computer the loss may be noticed so late that a launcher started at once is in time.
        said = _said_until(launchers[1], "from the copy in memory")
        assert "without hosts [0], going on with world 1" in said, said
        launchers.append(_launch(0, tmp_path, port, *more, *memory))
        _said_until(launchers[2], "goes on with hosts [1]; this one stands by")
        launchers[1].send_signal(signal.SIGTERM)
        for launcher in launchers[1:]:
            launcher.communicate(timeout=90)
        assert [each.returncode for each in launchers[1:]] == [INTERRUPTED] * 2
        records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        steps = [record["step"] for record in records if record["kind"] == "step"]
        assert sorted(set(steps)) == list(range(1, max(steps) + 1))
    finally:
        for launcher in launchers:
            launcher.kill()


def test_what_several_hosts_need_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("--node-rank", "2", "--master-port", "0", "--host-patience", "-1")
    assert main(["train", "debug_tiny", "--nnodes", "2", *wrong]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("--node-rank", "--master-addr", "--master-port", "--host-patience"))
    assert main(["train", "debug_tiny", "--nnodes", "2", "--master-addr", "a,b,c"]) == 2
    assert "one address for each" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_hosts_that_lost_each_other_train_on_as_if_they_had_not(fault: str) -> None:
    if not possible():
        pytest.skip("needs the right to make network namespaces")
    assert measure(fault, FAULTS[fault].hosts[-1], 4, undisturbed()).same_losses
