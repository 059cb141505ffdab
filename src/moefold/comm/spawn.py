"""Start ranks on this machine by forking, and collect their results.

Importing torch takes seconds; forking a process that has imported it takes milliseconds. So everything a rank needs is
imported once, here, and every proof and every test of several ranks forks from that process. Ranks meet through a
FileStore in a private directory and communicate over the loopback interface: no port is open to the network. They die
with the process that started them, and return JSON, never pickles.

A forked process inherits the signal handlers of its parent. SIGINT and SIGTERM are therefore blocked while ranks are
forked, and a rank unblocks them only after ``in_rank`` has been able to install its own handlers.

Ranks keep freed memory. glibc returns every large buffer to the kernel when it is freed, and the kernel clears each
page of the next one, a page fault per 4 KiB; a training step allocates and frees the same buffers again and again. With
trimming and mmap disabled (`disable_malloc_trim`) a process stays at its peak size, which is usual for training. The
setting is global and permanent, so it is made once, before the work starts.
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
from math import inf, isfinite
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # the first optimizer step of a process would import it, at a cost of seconds
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from moefold.comm.launchers import Place, die_with_parent, place_of
from moefold.comm.process_probe import state_of
from moefold.comm.rendezvous import agree_on_start, store_at
from moefold.errors import BackendError, CorruptionError, ExclusionError, LostPeerError, MoefoldError, RankError

# glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER = 2**31 - 1
# Extra bytes per request to the kernel.
_TOP_PAD_BYTES = 64 << 20


def disable_malloc_trim() -> bool:
    """Keep freed memory for the next buffer; False where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _TOP_PAD_BYTES))
    return all(mallopt(name, value) for name, value in settings)


# From the number of a rank on this host: the store, the rank among all hosts' ranks, and their number.
Join = Callable[[int], tuple[Store, int, int]]
_BLOCKED_WHILE_FORKING = (signal.SIGINT, signal.SIGTERM)
# What a signal that ended a rank usually means.
_MEANING: dict[int, str] = {
    signal.SIGSEGV: "native code used memory that is not its own",
    signal.SIGABRT: "native code gave up; its own message is above",
    signal.SIGBUS: "a mapped file became shorter, or /dev/shm is full",
    signal.SIGILL: "native code has an instruction that this CPU lacks",
    signal.SIGFPE: "native code divided by zero",
}
_POLL_SECONDS = 1.0  # the deadline may change between two polls
_WATCH_SECONDS = 0.2
# A rank that died is the cause, whatever its peers would say; others that died with it are seen within this time.
_DIED_SECONDS = 0.05


@dataclass
class _RankSpec:
    """What every rank runs; ``mask`` is the signal mask from before forking."""

    work: Callable[[int], Any]
    world: int
    directory: Path
    collective_timeout: float
    interface: Callable[[int], str] | None
    in_rank: Callable[[], None] | None
    mask: set[int]
    launcher: int
    join: Join | None = None


@dataclass
class _Rank:
    """``exit_code`` is negative if a signal ended the rank, as for `subprocess`; None until it was waited for."""

    pid: int
    pipe: int
    result: bytes = b""
    done_at: float | None = None
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        return self.died or not self.result.startswith(b'{"result"')

    @property
    def died(self) -> bool:
        """Ended without a result or an error, or while it wrote them."""
        return self.done_at is not None and not self.result.endswith(b"}")

    @property
    def failed_alone(self) -> bool:
        """Died, or raised before it had met its peers: what it lost cannot have been one of them."""
        return self.died or (self.done_at is not None and self.failed and not json.loads(self.result)["met"])

    @property
    def lost_peer(self) -> bool:
        """Raised since another rank had ended or was absent."""
        return self.done_at is not None and self.failed and not self.died and bool(json.loads(self.result)["lost_peer"])


def spawn_ranks(
    work: Callable[[int], Any],
    world: int,
    *,
    seconds: float = 120.0,
    collective_timeout: float | None = None,
    grace: float = 2.0,
    deadline: Callable[[], float] | None = None,
    watch: Callable[[], RankError | None] | None = None,
    in_rank: Callable[[], None] | None = None,
    started: Callable[[list[int]], None] | None = None,
    interface: Callable[[int], str] | None = None,
    join: Join | None = None,
) -> list[Any]:
    """Run ``work(rank)`` on ``world`` gloo processes; its JSON-serialisable results come back in rank order.

    If a rank raises or dies, all are killed after ``grace`` seconds and its error is raised here; the same happens
    after ``seconds``, and at ``deadline()`` (``time.monotonic``), which may change while ranks run. ``watch`` is called
    a few times per second; the error that it returns ends all ranks at once and is raised here. A collective waits
    ``collective_timeout`` seconds for its peers. ``in_rank`` is called first in a rank, before it can receive SIGINT or
    SIGTERM. ``started`` receives the process ids, and an empty list before they become invalid. ``interface`` returns a
    rank's network interface (default: loopback), and is called in the rank before the process group is made. With
    ``join`` these are some of the ranks of several hosts: it is called in the rank instead, and chooses the interface.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    oom_kills = _oom_kills()
    with tempfile.TemporaryDirectory(prefix="moefold-ranks-") as directory:
        wait = seconds if collective_timeout is None else collective_timeout
        ranks: list[_Rank] = []
        try:
            with _signals_blocked() as mask:
                spec = _RankSpec(work, world, Path(directory), wait, interface, in_rank, mask, os.getpid(), join)
                ranks.extend(_fork(spec, rank) for rank in range(world))
                if started is not None:
                    started([rank.pid for rank in ranks])
            last = time.monotonic() + seconds
            alarm = _collect_results(ranks, lambda: last if deadline is None else min(last, deadline()), grace, watch)
        finally:
            if started is not None:
                started([])
            _end(ranks)
    if alarm is not None:
        raise alarm
    if failed := [index for index, rank in enumerate(ranks) if rank.failed]:
        raise _failure(ranks, min(failed, key=lambda index: _cause_first(ranks[index])), seconds, oom_kills)
    return [json.loads(rank.result)["result"] for rank in ranks]


def join_world(
    seconds: float, device_type: str | None = None, store: Store | None = None, world: int | None = None
) -> tuple[int, int]:
    """Join the ranks that torchrun, srun or mpirun has started; returns (rank, world). ``device_type``: see
    ``this_device``. ``world``: the first so many of them, which meet in ``store`` (`meeting_store`); the others must
    not call this.

    Without a launcher the world is this process, and no process group is made. On a GPU the rank's device becomes the
    current one and every group's communicators are made at once: FSDP, Triton and events use the current device, and
    NCCL then makes subgroups by splitting the world's communicator. On a CPU, freed memory is kept by the process: see
    ``comm/spawn.py``.
    """
    place, device = place_of(os.environ), this_device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        disable_malloc_trim()
    if place is None:
        return 0, 1
    world = place.world if world is None else world
    # A script may train several runs, one after the other.
    if not dist.is_initialized():
        # Without a store, torch's own rendezvous reads address, rank and world from the variables.
        store = _launchers_store(place, seconds) if store is None else store
        rank, size = (-1, -1) if store is None else (place.rank, world)
        backend, where = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        timeout = timedelta(seconds=seconds)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=where)
    return place.rank, world


def meeting_store(place: Place, seconds: float) -> Store:
    """The store of this start, for all ranks of the launcher, also those that take no part in the run."""
    store = _launchers_store(place, seconds)
    if store is not None:
        return store
    wait = timedelta(seconds=seconds)
    found: Store = next(iter(rendezvous("env://", rank=place.rank, world_size=place.world, timeout=wait)))[0]
    return found


def _launchers_store(place: Place, seconds: float) -> Store | None:
    timeout = timedelta(seconds=seconds)
    if place.address is not None:
        return store_at(place, timeout)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = TCPStore(address, port, place.world, False, timeout=timeout)
    return agree_on_start(shared, place.rank, place.world, seconds)


def this_device(device_type: str | None = None) -> torch.device:
    """The GPU that the launcher gave this rank, or the CPU. ``device_type`` is cpu or cuda; None is cuda if there is a
    GPU."""
    if device_type == "cuda" and not torch.cuda.is_available():
        built = f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build for CPUs only"
        raise BackendError(
            f"device cuda: torch sees no GPU here (torch {torch.__version__} {built}); use --device cpu, or see what "
            "`moefold doctor --gpus` misses"
        )
    if device_type == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    place = place_of(os.environ)
    # Where each task sees one GPU only (srun --gpus-per-task 1), it is number 0 for all of them.
    if place is None or torch.cuda.device_count() == 1:
        return torch.device("cuda", 0)
    if place.local_rank is None or place.local_rank >= torch.cuda.device_count():
        said = "nothing says" if place.local_rank is None else f"local rank {place.local_rank} has no GPU:"
        raise BackendError(
            f"device cuda: {said} which of {torch.cuda.device_count()} GPUs this rank has; start one rank per GPU with "
            "torchrun or srun, which set LOCAL_RANK"
        )
    return torch.device("cuda", place.local_rank)


@contextmanager
def _signals_blocked() -> Iterator[set[int]]:
    """Block SIGINT and SIGTERM; yields the previous mask."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_WHILE_FORKING)
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork(spec: _RankSpec, rank: int) -> _Rank:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Rank(pid, reading)
    _rank_main(spec, rank, reading, writing)


def _rank_main(spec: _RankSpec, rank: int, reading: int, pipe: int) -> NoReturn:
    """The forked process; it never returns into the code that forked it."""
    code, met = 1, False
    try:
        os.close(reading)
        if spec.in_rank is not None:
            spec.in_rank()
        signal.pthread_sigmask(signal.SIG_SETMASK, spec.mask)
        die_with_parent(spec.launcher)
        torch.set_num_threads(1)
        wait = timedelta(seconds=spec.collective_timeout)
        store: Store
        if spec.join is None:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo" if spec.interface is None else spec.interface(rank)
            store, number, world = FileStore(str(spec.directory / "store"), spec.world), rank, spec.world
        else:
            store, number, world = spec.join(rank)
        dist.init_process_group("gloo", store=store, rank=number, world_size=world, timeout=wait)
        met = True
        result = json.dumps({"result": spec.work(rank)})
        # A rank that exits closes its connections, so all must be done first.
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException as error:
        failure = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc(), "met": met}
        exclude = list(error.exclude) if isinstance(error, ExclusionError) else []
        lost_peer = isinstance(error, LostPeerError)
        again = bool(exclude) or lost_peer or (isinstance(error, CorruptionError) and error.from_the_beginning)
        mendable = isinstance(error, MoefoldError) and not again
        result = json.dumps(failure | {"mendable": mendable, "exclude": exclude, "lost_peer": lost_peer})
    with os.fdopen(pipe, "wb") as out:
        out.write(result.encode())
    os._exit(code)


def _collect_results(
    ranks: list[_Rank],
    deadline: Callable[[], float],
    grace: float,
    watch: Callable[[], RankError | None] | None = None,
) -> RankError | None:
    """Read results until all ranks are done, the deadline has passed, or ``grace`` seconds after the first failure.

    Returns what ``watch`` returned, which ends the reading as well. After a failure there is nothing to watch for.
    """
    grace_ends = float("inf")
    poll = _POLL_SECONDS if watch is None else _WATCH_SECONDS
    with selectors.DefaultSelector() as waiting:
        for rank in ranks:
            waiting.register(rank.pipe, selectors.EVENT_READ, rank)
        while waiting.get_map() and (left := min(grace_ends, deadline()) - time.monotonic()) > 0:
            if watch is not None and grace_ends == float("inf") and (alarm := watch()) is not None:
                return alarm
            for key, _ in waiting.select(timeout=min(poll, left)):
                rank = key.data
                piece = os.read(rank.pipe, 1 << 16)
                rank.result += piece
                if not piece:
                    rank.done_at = time.monotonic()
                    waiting.unregister(rank.pipe)
                    if rank.failed:
                        left = min(grace, _DIED_SECONDS) if rank.died else grace
                        grace_ends = min(grace_ends, time.monotonic() + left)
    return None


def _cause_first(rank: _Rank) -> tuple[bool, bool, bool, float]:
    """The first to fail is the cause; the others failed because they lost their peer. A rank that died lost none, and
    the message of a peer may be read before its end is seen."""
    return not rank.died, rank.done_at is None, rank.lost_peer, rank.done_at or inf


def _end(ranks: list[_Rank]) -> None:
    silent = [rank for rank in ranks if rank.done_at is None]
    # Before any is killed here. Its pipe stays open while one of its threads waits for a disk, or while a process that
    # it had started lives.
    ended = [rank for rank in silent if state_of(rank.pid) == "Z"]
    for rank in silent:
        os.kill(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.exit_code = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
        os.close(rank.pipe)
    for rank in ended:
        # A signal had ended it. Peers that lost it are not to blame; one of them may have exited meanwhile, with a
        # message that nobody reads any more.
        if rank.exit_code is not None and rank.exit_code < 0:
            rank.done_at = time.monotonic()


def _failure(ranks: list[_Rank], index: int, seconds: float, oom_kills: int | None) -> RankError:
    """``index`` is the first rank to fail. Others are to blame as well if they lost no peer either."""
    rank = ranks[index]
    if rank.done_at is None:
        limit = f"within {seconds:.0f} s" if isfinite(seconds) else "by its deadline"
        return RankError(f"rank {index} returned no result {limit}")
    blamed = {number for number, each in enumerate(ranks) if each.failed_alone or (each is rank and not rank.lost_peer)}
    if rank.died:
        assert rank.exit_code is not None
        return RankError(f"rank {index} {describe_end(rank.exit_code, oom_kills)}", ranks=blamed)
    message = json.loads(rank.result)
    exclude = tuple(message["exclude"])
    trace = "" if message["mendable"] or exclude or rank.lost_peer else f"\n{message['trace']}"
    return RankError(f"rank {index}: {message['error']}{trace}", message["mendable"], exclude, blamed)


def describe_end(exit_code: int, oom_kills: int | None) -> str:
    """How a process ended that left no message; ``oom_kills`` is what `_oom_kills` returned when it was started."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code} and without an error message"
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number != signal.SIGKILL:
        return f"was ended by {name}" + (f": {_MEANING[number]}" if number in _MEANING else "")
    now = _oom_kills()
    if now is None or oom_kills is None:
        return f"was ended by {name}: out of memory, or killed from outside"
    if now == oom_kills:
        return f"was ended by {name}, from outside: the kernel has ended no process for lack of memory"
    return f"was ended by {name}: the kernel has ended {now - oom_kills} process(es) here for lack of memory"


def _oom_kills() -> int | None:
    """How many processes the kernel has ended for lack of memory since the machine started; None if it does not say."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    except (OSError, ValueError):
        return None
