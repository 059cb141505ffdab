"""`moefold train --nnodes`: hosts with a launcher each; the faults between them are drawn by `tests/host_faults.py`."""

from __future__ import annotations

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


def _launch(host: int, directory: Path, port: int) -> subprocess.Popen[str]:
    words = (
        *(sys.executable, "-m", "moefold.cli.main", "train", "debug_tiny", "--nnodes", "2", "--node-rank", str(host)),
        *("--nproc", "1", "--master-addr", "localhost", "--master-port", str(port), "--patience", "60"),
        *("--train.directory", str(directory), "--train.steps", "100000"),
    )
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
