"""Strangers at every port and channel that moefold opens."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.client import HTTPConnection
from pathlib import Path

import torch
import torch.distributed as dist
from tests.security.attacks_pages import question

from moefold.checkpoint.run_lock import check_incarnation, commit_gate, take_incarnation
from moefold.cli.plan_serve import MAX_CONNECTIONS, REQUEST_SECONDS, make_server
from moefold.comm.launchers import Place
from moefold.comm.rendezvous import agree_on_start, store_at
from moefold.errors import MoefoldError
from moefold.rl.weight_transport import SharedChannel, receive_weights

ROOT = Path(__file__).parents[2]
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


@contextmanager
def served() -> Iterator[int]:
    server = make_server(question(), 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(port: int, path: str = "/nothing", **headers: str) -> tuple[int, dict[str, str]]:
    """A path that is not there needs no plan, so that its time is that of the server."""
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders())


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def half_open_request(place: Path) -> str | None:
    with served() as port:
        silent = [connect(port) for _ in range(4)]
        for each in silent[1:]:
            each.sendall(b"GET / HTTP/1.1\r\nHost: ")
        began = time.monotonic()
        status, _ = ask(port)
        waited = time.monotonic() - began
        for each in silent:
            each.close()
    return None if status == 404 and waited < REQUEST_SECONDS / 2 else f"others wait {waited:.1f} s"


def request_byte_by_byte(place: Path) -> str | None:
    """Each byte resets a timeout that counts from the last one; this one counts from the first."""
    with served() as port, connect(port) as slow:
        began, ended = time.monotonic(), None
        while time.monotonic() - began < 3 * REQUEST_SECONDS:
            try:
                slow.sendall(b"G" if ended is None else b"E")
                ended = time.monotonic()
            except OSError:
                break
            time.sleep(0.2)
        lasted = time.monotonic() - began
    return None if lasted < 2 * REQUEST_SECONDS else f"a thread is held for {lasted:.1f} s"


def many_connections(place: Path) -> str | None:
    before = threading.active_count()
    with served() as port:
        many = []
        for _ in range(400):
            with suppress(OSError):
                many.append(connect(port))
        most = threading.active_count() - before
        for each in many:
            each.close()
        for _ in range(40):
            with suppress(OSError):
                if ask(port)[0] == 404:
                    break
            time.sleep(0.25)
        else:
            return "the server does not answer any more"
    return None if most <= MAX_CONNECTIONS + 2 else f"{most} threads"


def foreign_host_header(place: Path) -> str | None:
    with served() as port:
        for headers in (
            {"Host": "evil.example"},
            {"Host": f"evil.example:{port}"},
            {"Host": "127.0.0.1"},
            {"Host": f"127.0.0.1:{port}.evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
        ):
            if (status := ask(port, "/", **headers)[0]) != 403:
                return f"{headers} is answered with {status}"
    return None


def random_requests(place: Path) -> str | None:
    """Bytes that are no request; every answer that there is has the headers that protect a browser."""
    chance = random.Random(7)
    with served() as port:
        for size in (0, 1, 10, 1000, 70_000, 200_000):
            with suppress(OSError), connect(port) as stranger:
                stranger.sendall(chance.randbytes(size) + b"\r\n\r\n")
                stranger.recv(1000)
        for path in ("/", "/nothing", "/?gpus=0", "/?" + "a=1&" * 100, "/%00", "/plan.json?gpus=x"):
            if path == "/":
                continue
            status, headers = ask(port, path)
            missing = {"Content-Security-Policy", "X-Content-Type-Options", "Referrer-Policy"} - set(headers)
            if missing or status >= 500 or "frame-ancestors 'none'" not in headers["Content-Security-Policy"]:
                return f"{path}: {status} without {missing}"
    return None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def listening(pids: set[int]) -> list[str]:
    """Addresses, as the kernel writes them, on which these processes listen, but for those of this machine only."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.append(words[1])
    return found


def open_store(place: Path) -> str | None:
    """The store of a job listens on the address it was given; bytes of a stranger neither stop nor change it."""
    port = free_port()
    store = store_at(Place("srun", 0, 1, 0, "127.0.0.1", port), timedelta(seconds=20))
    store.set("key", "right")
    chance = random.Random(3)
    for size in (1, 7, 64, 5000):
        with suppress(OSError), connect(port) as stranger:
            stranger.sendall(chance.randbytes(size))
    if store.get("key") != b"right":
        return f"the value is {store.get('key')!r}"
    outside = [each for each in listening({os.getpid()}) if not each.startswith(LOOPBACK)]
    return f"listens on {outside}" if outside else None


def replayed_registration(place: Path) -> str | None:
    """What ranks of an earlier start have written is written again: a new start must not take it for its own ranks."""
    store = dist.HashStore()
    for number in (1, 2):
        store.set(f"moefold/start_{number}/here_1", "")
        store.set(f"moefold/start_{number}/open", "")
    store.add("moefold/starts", 2)
    with suppress(MoefoldError):
        agree_on_start(store, 0, 2, 0.3)
        return "rank 0 goes on with ranks that are not there"
    with suppress(MoefoldError):
        agree_on_start(store, 1, 2, 0.3)
        return "a rank joins a start that is over"
    return None


def old_incarnation(place: Path) -> str | None:
    """A writer that was replaced comes back with its old number, and with one that nobody gave it."""
    run = place / "run"
    for _ in range(2):
        take_incarnation(run)
    for number in (1, 3, 99, -1):
        with commit_gate(run), suppress(MoefoldError):
            check_incarnation(run, number)
            return f"incarnation {number} may write"
    return None


def sockets_of_a_job(place: Path) -> str | None:
    """`moefold train --nproc 2`, while it trains: who listens where."""
    words = ["train", "debug_tiny", "--name", "x", "--train.directory", str(place), "--nproc", "2", "--device", "cpu"]
    job = subprocess.Popen(
        [sys.executable, "-m", "moefold.cli.main", *words, "--train.steps", "100000", "--train.saving.every", "0"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    outside: set[str] = set()
    try:
        ends, metrics = time.monotonic() + 120, place / "x" / "metrics.jsonl"
        while time.monotonic() < ends and job.poll() is None:
            children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            outside |= {each for each in listening({job.pid, *map(int, children)}) if not each.startswith(LOOPBACK)}
            if metrics.exists() and metrics.read_bytes().count(b'"kind":"step"') > 3:
                return f"listens on {sorted(outside)}" if outside else None
            time.sleep(0.2)
    finally:
        job.kill()
        job.wait()
    return "the job did not train, so nothing was shown"


def foreign_channel(place: Path) -> str | None:
    """A channel for weights that somebody else made, or made for everybody."""
    path = place / "channel"
    SharedChannel(path, 1024)
    path.chmod(0o666)
    with suppress(MoefoldError):
        SharedChannel(path)
        return "weights are taken from a file that everybody can write"
    path.unlink()
    path.symlink_to(place / "elsewhere")
    with suppress(MoefoldError, OSError):
        SharedChannel(path, 1024)
        return "the channel is made behind a link"
    return None


def lying_header(place: Path) -> str | None:
    """Headers of weights that point outside of their bucket."""

    class Channel:
        def __init__(self, header: bytes) -> None:
            self.header = header

        def send(self, header: bytes, payload: torch.Tensor) -> None: ...

        def receive(self) -> tuple[bytes, torch.Tensor]:
            return self.header, torch.zeros(64, dtype=torch.uint8)

    good = {"name": "w", "dtype": "F32", "shape": [4], "offset": 0, "first_row": 0, "full_shape": [4]}
    lies = (
        {"offset": 60},
        {"offset": 1},
        {"offset": -4},
        {"shape": [2**40]},
        {"shape": [2, 2]},
        {"first_row": 1},
        {"dtype": "object"},
    )
    lies += ({"shape": "4"}, {"offset": None}, {"full_shape": [[4]]}, {"name": None, "shape": [-1]})  # type: ignore[assignment]
    headers = [json.dumps({"parts": [good | lie], "bytes": 64}).encode() for lie in lies]
    headers += [b"\xff\x00", b"[]", b"{}", b'{"parts": 3}', b'{"parts": [3]}', b'{"parts": [{}]}', b"[" * 100_000]
    for header in headers:
        try:
            next(receive_weights(Channel(header)))
        except MoefoldError:
            continue
        except Exception as error:
            return f"{header[:100]!r} raises {type(error).__name__}"
        return f"{header[:100]!r} is taken"
    return None


ATTACKS = {
    "plan --serve": [
        ("requests that are never finished", "nobody else is answered", half_open_request),
        ("a request sent byte by byte", "a thread is held for good", request_byte_by_byte),
        ("four hundred connections", "threads without bound, or no answer", many_connections),
        ("DNS rebinding, and requests of other sites", "another site reads plans", foreign_host_header),
        ("requests that are random bytes", "the server ends, or answers without its policy", random_requests),
    ],
    "jobs": [
        ("strangers at the store of a job", "values change, or it listens elsewhere", open_store),
        ("replayed registrations of ranks", "a start goes on without its ranks", replayed_registration),
        ("an old incarnation that comes back", "it commits a checkpoint", old_incarnation),
        ("ports of a job that trains", "one is open to other machines", sockets_of_a_job),
    ],
    "weights for rollouts": [
        ("a channel that somebody else made", "weights are another's", foreign_channel),
        ("headers that point outside of their bucket", "other memory is read", lying_header),
    ],
}
SLOW = (sockets_of_a_job, request_byte_by_byte, random_requests)
