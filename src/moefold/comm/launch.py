"""Start ranks on this machine by forking, and bring their answers back.

Importing torch takes seconds; forking a process that has imported it takes milliseconds. So everything a rank will
need is imported once, here, and every proof and every test of several ranks forks from that. Ranks find each other
through a file in a private directory and talk over the loopback interface: nothing listens on the network. They
die with the process that started them, and answer in JSON, never in pickles.
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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # the first optimizer step of a process would import it, at a cost of seconds
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from moefold.errors import MoefoldError, RankError
from moefold.ops.heap import keep_heap

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass
class _Rank:
    pid: int
    pipe: int
    answer: bytes = b""
    done_at: float | None = None

    @property
    def failed(self) -> bool:
        return not self.answer.startswith(b'{"answer"')


def fork_ranks(
    work: Callable[[int], Any],
    world: int,
    *,
    seconds: float = 120.0,
    patience: float | None = None,
    grace: float = 2.0,
    started: Callable[[list[int]], None] = lambda pids: None,
    interface: Callable[[int], str] = lambda rank: "lo",
) -> list[Any]:
    """Run ``work(rank)`` on ``world`` gloo processes; its JSON-serialisable results come back in rank order.

    A rank that raises or dies ends all of them after ``grace`` seconds, and its error is raised here; so does the end
    of ``seconds``. A collective waits ``patience`` seconds for its peers. ``started`` is told the process numbers.
    ``interface`` names the network interface that a rank talks over, and is called in the rank before it talks.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="moefold-ranks-") as meeting:
        wait = seconds if patience is None else patience
        ranks = [_fork(work, rank, world, Path(meeting), wait, interface) for rank in range(world)]
        started([rank.pid for rank in ranks])
        try:
            _listen(ranks, time.monotonic() + seconds, grace)
        finally:
            _end(ranks)
    # The first to fail is the cause; the others only lost their peer.
    for _, index in sorted((rank.done_at or float("inf"), index) for index, rank in enumerate(ranks) if rank.failed):
        raise _failure(ranks[index], index, seconds)
    return [json.loads(rank.answer)["answer"] for rank in ranks]


def join_world(seconds: float) -> tuple[int, int]:
    """Meet the ranks that torchrun or a cluster's launcher has started; returns (rank, world).

    The only place that reads a launcher's environment. Without one this process is the whole world, and no process
    group is made. A process that trains on a CPU keeps the memory it has once had: see ``ops/heap.py``.
    """
    if not torch.cuda.is_available():
        keep_heap()
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


def _fork(
    work: Callable[[int], Any], rank: int, world: int, meeting: Path, patience: float, interface: Callable[[int], str]
) -> _Rank:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Rank(pid, reading)
    os.close(reading)
    _live(work, rank, world, meeting, patience, interface, writing)


def _live(
    work: Callable[[int], Any],
    rank: int,
    world: int,
    meeting: Path,
    patience: float,
    interface: Callable[[int], str],
    pipe: int,
) -> NoReturn:
    """A rank's whole life; it never returns into the code that forked it."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = interface(rank)
        store = FileStore(str(meeting / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=patience))
        answer = json.dumps({"answer": work(rank)})
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


def _listen(ranks: list[_Rank], deadline: float, grace: float) -> None:
    """Collect answers until all have spoken, the time is up, or one has failed and the others had their grace."""
    with selectors.DefaultSelector() as waiting:
        for rank in ranks:
            waiting.register(rank.pipe, selectors.EVENT_READ, rank)
        while waiting.get_map() and time.monotonic() < deadline:
            for key, _ in waiting.select(timeout=min(60.0, max(0.0, deadline - time.monotonic()))):
                rank = key.data
                piece = os.read(rank.pipe, 1 << 16)
                rank.answer += piece
                if not piece:
                    rank.done_at = time.monotonic()
                    waiting.unregister(rank.pipe)
                    if rank.failed:
                        deadline = min(deadline, time.monotonic() + grace)


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.done_at is None:
            os.kill(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)
        os.close(rank.pipe)


def _failure(rank: _Rank, index: int, seconds: float) -> RankError:
    if rank.done_at is None:
        return RankError(f"rank {index} gave no answer within {seconds:.0f} s")
    if not rank.answer:
        return RankError(f"rank {index} died without a word (out of memory, or killed from outside)")
    message = json.loads(rank.answer)
    trace = "" if message["mendable"] else f"\n{message['trace']}"
    return RankError(f"rank {index}: {message['error']}{trace}", message["mendable"])
