"""Uploads to two S3 servers: moto honours conditional puts, rclone stores on the disk; neither does both."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.test_upload import Machine, fetched

from moefold.checkpoint.object_store import open_store
from moefold.checkpoint.step_dirs import verify
from moefold.checkpoint.upload_log import UploadLog

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
KEY, SECRET = "storagekey", "canary-of-the-storage"
URL = "s3://bucket/prefix"


@pytest.fixture(autouse=True)
def login(monkeypatch: pytest.MonkeyPatch) -> int:
    """The library reads all of it from the environment."""
    pytest.importorskip("s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    return port


def started(command: list[str], port: int) -> subprocess.Popen[bytes]:
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return server
        except OSError:
            time.sleep(0.1)
    server.kill()
    raise AssertionError(f"{command[0]} did not start")


@pytest.fixture
def moto(login: int) -> Iterator[None]:
    pytest.importorskip("moto")
    script = shutil.which("moto_server") or str(Path(sys.executable).parent / "moto_server")
    server = started([sys.executable, script, "-H", "127.0.0.1", "-p", str(login)], login)
    import boto3  # type: ignore[import-untyped]

    boto3.client("s3").create_bucket(Bucket="bucket")
    yield
    server.kill()
    server.wait()


def serve_rclone(folder: Path, port: int) -> subprocess.Popen[bytes]:
    rclone = shutil.which("rclone") or pytest.skip("there is no rclone")
    (folder / "bucket").mkdir(parents=True, exist_ok=True)
    # "off": other cache modes acknowledge an object before it is stored.
    options = ["--vfs-cache-mode", "off", "--auth-key", f"{KEY},{SECRET}", "--addr", f"127.0.0.1:{port}"]
    return started([rclone, "serve", "s3", *options, str(folder)], port)


def test_conditional_commits(moto: None, tmp_path: Path) -> None:
    """A replaced writer is refused by the server; six starts at the same time get six numbers."""
    old = Machine(tmp_path / "a", open_store(URL, "run"))
    old.upload(10, 20)
    assert old.said == []
    new = Machine(tmp_path / "b", open_store(URL, "run"))
    assert new.fetch() == [20]
    old.upload(30)
    assert "started elsewhere as incarnation 2" in old.said[0]
    new.upload(25)
    assert fetched(open_store(URL, "run"), tmp_path / "c") == [25]
    assert len(open_store(URL, "run").names("checkpoints")) == 2
    machines: list[Machine] = []
    threads = [
        threading.Thread(target=lambda i=i: machines.append(Machine(tmp_path / f"t{i}", open_store(URL, "run"))))
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(machine.incarnation for machine in machines) == list(range(4, 10))
    # Only the last of them may commit.
    for machine in machines:
        machine.upload(40 + machine.incarnation)
    assert next(UploadLog(open_store(URL, "run")).commits())[0].step == 49


def test_what_is_acknowledged_is_stored(login: int, tmp_path: Path) -> None:
    """The server is killed when an upload has ended: all of it is on its disk. Killed before: the old one counts."""
    server = serve_rclone(tmp_path / "disk", login)
    machine = Machine(tmp_path / "a", open_store(URL, "run"))
    assert any("ignores `If-None-Match`" in line for line in machine.said)
    machine.upload(10)
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    (stored,) = (tmp_path / "disk/bucket/prefix/run/checkpoints").iterdir()
    shutil.copytree(stored, tmp_path / "step_00000010")
    verify(tmp_path / "step_00000010")
    # Not there: tried again, then given up; training would go on.
    machine.upload(20)
    assert machine.uploads.newest == 10 and machine.uploads.missing == 20
    assert not any(SECRET in line for line in machine.said)
    server = serve_rclone(tmp_path / "disk", login)
    assert fetched(open_store(URL, "run"), tmp_path / "b") == [10]
    server.kill()
    server.wait()
