"""Start ranks on this machine by forking, and bring their answers back.

Importing torch takes seconds; forking a process that has imported it takes milliseconds. So everything a rank will
need is imported once, here, and every proof and every test of several ranks forks from that. Ranks find each other
through a file in a private directory and talk over the loopback interface: nothing listens on the network. They
die with the process that started them, and answer in JSON, never in pickles.

A forked process inherits the signal handlers of the one that forked it. SIGINT and SIGTERM are therefore blocked while
ranks are forked, and a rank lets them in only after ``in_rank`` has had the chance to install its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # the first optimizer step of a process would import it, at a cost of seconds
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from moefold.errors import MoefoldError, RankError
from moefold.ops.malloc import disable_malloc_trim

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_BLOCKED_WHILE_FORKING = (signal.SIGINT, signal.SIGTERM)
_LONGEST_WAIT = 1.0  # seconds; a deadline can move while nothing else happens


@dataclass
class _Life:
    """What every rank of one start is to do; ``mask`` are the signals that were blocked before forking."""

    work: Callable[[int], Any]
    world: int
    meeting: Path
    patience: float
    interface: Callable[[int], str]
    in_rank: Callable[[], None] | None
    mask: set[int]


@dataclass
class _Rank:
    pid: int
    pipe: int
    answer: bytes = b""
    done_at: float | None = None

    @property
    def failed(self) -> bool:
        return not self.answer.startswith(b'{"answer"')


def spawn_ranks(
    work: Callable[[int], Any],
    world: int,
    *,
    seconds: float = 120.0,
    patience: float | None = None,
    grace: float = 2.0,
    deadline: Callable[[], float] | None = None,
    in_rank: Callable[[], None] | None = None,
    started: Callable[[list[int]], None] = lambda pids: None,
    interface: Callable[[int], str] = lambda rank: "lo",
) -> list[Any]:
    """Run ``work(rank)`` on ``world`` gloo processes; its JSON-serialisable results come back in rank order.

    A rank that raises or dies ends all of them after ``grace`` seconds, and its error is raised here; so does the end
    of ``seconds``, and of ``deadline()`` in the clock of ``time.monotonic``, which may change while ranks run. A
    collective waits ``patience`` seconds for its peers. ``in_rank`` is called first thing in a rank, before it can
    receive SIGINT or SIGTERM. ``started`` is told the process numbers, and an empty list before they become invalid.
    ``interface`` names the network interface that a rank talks over, and is called in the rank before it talks.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="moefold-ranks-") as meeting:
        wait = seconds if patience is None else patience
        ranks: list[_Rank] = []
        try:
            with _signals_blocked() as mask:
                life = _Life(work, world, Path(meeting), wait, interface, in_rank, mask)
                ranks.extend(_fork(life, rank) for rank in range(world))
                started([rank.pid for rank in ranks])
            last = time.monotonic() + seconds
            _listen(ranks, lambda: last if deadline is None else min(last, deadline()), grace)
        finally:
            started([])
            _end(ranks)
    # The first to fail is the cause; the others only lost their peer.
    for _, index in sorted((rank.done_at or float("inf"), index) for index, rank in enumerate(ranks) if rank.failed):
        raise _failure(ranks[index], index, seconds)
    return [json.loads(rank.answer)["answer"] for rank in ranks]


def join_world(seconds: float) -> tuple[int, int]:
    """Meet the ranks that torchrun or a cluster's launcher has started; returns (rank, world).

    The only place that reads a launcher's environment. Without one this process is the whole world, and no process
    group is made. A process that trains on a CPU keeps the memory it has once had: see ``ops/malloc.py``.
    """
    if not torch.cuda.is_available():
        disable_malloc_trim()
    if "RANK" not in os.environ:
        return 0, 1
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    return dist.get_rank(), dist.get_world_size()


def this_device() -> torch.device:
    """The GPU that the launcher gave this rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextmanager
def _signals_blocked() -> Iterator[set[int]]:
    """Inside, SIGINT and SIGTERM wait; yields the mask from before."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_WHILE_FORKING)
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork(life: _Life, rank: int) -> _Rank:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Rank(pid, reading)
    _live(life, rank, reading, writing)


def _live(life: _Life, rank: int, reading: int, pipe: int) -> NoReturn:
    """A rank's whole life; it never returns into the code that forked it."""
    code = 1
    try:
        os.close(reading)
        if life.in_rank is not None:
            life.in_rank()
        signal.pthread_sigmask(signal.SIG_SETMASK, life.mask)
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = life.interface(rank)
        store = FileStore(str(life.meeting / "store"), life.world)
        wait = timedelta(seconds=life.patience)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=life.world, timeout=wait)
        answer = json.dumps({"answer": life.work(rank)})
        # A rank that leaves early takes its connections along; the slowest must be done first.
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException as error:
        said = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        answer = json.dumps(said | {"mendable": isinstance(error, MoefoldError)})
    with os.fdopen(pipe, "wb") as out:
        out.write(answer.encode())
    os._exit(code)


def _listen(ranks: list[_Rank], deadline: Callable[[], float], grace: float) -> None:
    """Collect answers until all have spoken, the time is up, or one has failed and the others had their grace."""
    given_up = float("inf")
    with selectors.DefaultSelector() as waiting:
        for rank in ranks:
            waiting.register(rank.pipe, selectors.EVENT_READ, rank)
        while waiting.get_map() and (left := min(given_up, deadline()) - time.monotonic()) > 0:
            for key, _ in waiting.select(timeout=min(_LONGEST_WAIT, left)):
                rank = key.data
                piece = os.read(rank.pipe, 1 << 16)
                rank.answer += piece
                if not piece:
                    rank.done_at = time.monotonic()
                    waiting.unregister(rank.pipe)
                    if rank.failed:
                        given_up = min(given_up, time.monotonic() + grace)


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.done_at is None:
            os.kill(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)
        os.close(rank.pipe)


def _failure(rank: _Rank, index: int, seconds: float) -> RankError:
    if rank.done_at is None:
        limit = f"within {seconds:.0f} s" if isfinite(seconds) else "by its deadline"
        return RankError(f"rank {index} gave no answer {limit}")
    if not rank.answer:
        return RankError(f"rank {index} died without a word (out of memory, or killed from outside)")
    message = json.loads(rank.answer)
    trace = "" if message["mendable"] else f"\n{message['trace']}"
    return RankError(f"rank {index}: {message['error']}{trace}", message["mendable"])
