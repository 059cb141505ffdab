"""The GPU laboratory: one training step of every rank of a run on fake GPUs, and what is wrong with it.

Each rank is started as a launcher would start it (environment, `join_world`, `this_device`), builds its part of the
model on its own device and runs a real step. `StreamHazards` watches storages and streams, `CollectiveLog` all calls of
`torch.distributed`. With the logs of all ranks, `nccl_replay` compares them and executes them by NCCL's rules.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefold.comm.spawn import join_world, this_device
from moefold.config.run import RunConfig
from moefold.dryrun.dry_run import DryRun, Progress, dry_run_of_rank
from moefold.dryrun.fake_cuda.collective_log import CollectiveLog, logged_collectives
from moefold.dryrun.fake_cuda.fake_device import DEVICES_PER_HOST, fake_cuda
from moefold.dryrun.fake_cuda.fake_graphs import fake_graphs
from moefold.dryrun.fake_cuda.nccl_replay import Call, disagreements
from moefold.dryrun.fake_cuda.nccl_replay import replay as replay_calls
from moefold.dryrun.fake_cuda.stream_hazards import Finding, StreamHazards
from moefold.errors import MoefoldError
from moefold.parallel.parallelize import groups_of

T = TypeVar("T")


@dataclass(frozen=True)
class RankReport:
    """What one rank's step showed."""

    rank: int
    findings: tuple[Finding, ...]
    calls: tuple[Call, ...]
    num_launches: int
    # The most bytes that this rank held.
    peak: int

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, said: bytes) -> RankReport:
        data = json.loads(said)
        calls = [Call(**{name: _tupled(value) for name, value in call.items()}) for call in data["calls"]]
        findings = tuple(Finding(**each) for each in data["findings"])
        return cls(data["rank"], findings, tuple(calls), data["num_launches"], data["peak"])


def _tupled(value: object) -> Any:
    """JSON has lists only."""
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def examine(run: RunConfig, world: int, microbatches: int | None = None) -> list[Finding]:
    """Run every rank of the world and compare them; what is wrong, each thing once."""
    return compare(run_ranks(run, world, microbatches))


def run_ranks(
    run: RunConfig, world: int, microbatches: int | None = None, progress: Progress | None = None
) -> list[RankReport]:
    """Every rank of the world, one after the other; ``progress`` is told how many are done."""
    return run_ranks_of_each([LabRun(run, world, microbatches)], progress)[0]


class LabRun(NamedTuple):
    """A run on so many ranks; without ``microbatches``, as many as a dry run needs."""

    run: RunConfig
    world: int
    microbatches: int | None = None


def run_ranks_of_each(runs: Sequence[LabRun], progress: Progress | None = None) -> list[list[RankReport]]:
    """Every rank of several runs. Ranks of one device share a process, in which torch is warm after the first."""
    reports: list[dict[int, RankReport]] = [{} for _ in runs]
    total = sum(each.world for each in runs)
    for device in range(min(DEVICES_PER_HOST, max(each.world for each in runs))):
        turns = [(each, rank) for each in runs for rank in range(device, each.world, DEVICES_PER_HOST)]
        numbers = [i for i, each in enumerate(runs) for _ in range(device, each.world, DEVICES_PER_HOST)]
        made = in_child(run_rank(each.run, each.world, rank, each.microbatches) for each, rank in turns)
        for number, report in zip(numbers, made, strict=True):
            reports[number][report.rank] = report
            if progress is not None:
                progress(sum(map(len, reports)), total)
    return [[by_rank[rank] for rank in sorted(by_rank)] for by_rank in reports]


def in_child(reports: Iterable[RankReport]) -> Iterator[RankReport]:
    """Make them in a forked process, one per line: what torch caches for one device must not reach another's ranks."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            with os.fdopen(writing, "wb") as out:
                for report in reports:
                    out.write(report.to_json() + b"\n")
                    out.flush()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        yield from map(RankReport.from_json, pipe)
    _, status = os.waitpid(pid, 0)
    if status:
        raise MoefoldError("a rank of the GPU laboratory died; its error is above")


def compare(reports: Sequence[RankReport]) -> list[Finding]:
    found = {(each.kind, each.where, each.message): each for report in reports for each in report.findings}
    logs = {report.rank: report.calls for report in reports}
    findings = [*found.values()]
    for report in reports:
        threads = sorted({call.thread for call in report.calls if call.stream is not None})
        if len(threads) > 1:
            words = f"rank {report.rank} launches on communicators from {' and '.join(threads)}: orders may differ"
            findings.append(Finding("two host threads", words, "comm/p2p.py"))
            break
    findings += [Finding("ranks differ", words, "") for words in disagreements(logs)]
    stuck = replay_calls(logs)
    if stuck is not None:
        findings.append(Finding("deadlock", str(stuck), stuck.circle[0].where if stuck.circle else ""))
    return findings


def run_rank(run: RunConfig, world: int, rank: int, microbatches: int | None = None) -> RankReport:
    """Two steps of one rank; the second is like every later one."""
    return dry_run_on_gpu(run, world, rank, microbatches)[1]


def dry_run_on_gpu(
    run: RunConfig, world: int, rank: int, microbatches: int | None = None, progress: Progress | None = None
) -> tuple[DryRun | None, RankReport]:
    """The same with everything that a dry run tells; None if the step raised an error, which is a finding then."""
    hazards = StreamHazards()
    found: DryRun | None = None
    with (
        fake_cuda(),
        fake_launch(world, rank, hazards) as log,
        logged_collectives(log),
        no_memory_for_fsdp(),
        fake_triton(hazards),
        fake_graphs(hazards),
        threads_at_once(log),
        hazards.errors(),
    ):
        join_world(60.0)
        groups = groups_of(run, world, rank, timedelta(seconds=60))
        found = dry_run_of_rank(run, groups, this_device(), microbatches, progress=progress, under=hazards)
    peak = 0 if found is None else found.peak_total
    return found, RankReport(rank, tuple(hazards.findings.values()), tuple(log.calls), hazards.num_launches, peak)


@contextmanager
def no_memory_for_fsdp() -> Iterator[None]:
    """FSDP allocates an empty tensor on the device while a model is built, outside of the fake mode."""

    class Torch:
        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

        @staticmethod
        def empty(*size: int, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, device="meta" if size == (0,) else device)

    with patch.object(_fsdp_param_group, "torch", Torch()):
        yield


@contextmanager
def threads_at_once(log: CollectiveLog) -> Iterator[None]:
    """Fake tensors belong to one thread: what is handed to another one runs at once, and is logged under its name."""

    def submit(pool: ThreadPoolExecutor, work: Callable[..., T], *args: object) -> Future[T]:
        done: Future[T] = Future()
        before, log.thread = log.thread, str(pool._thread_name_prefix)
        device = torch.cuda.current_device()
        # A new thread begins with device 0.
        torch.cuda.set_device(0)
        try:
            done.set_result(work(*args))
        finally:
            log.thread = before
            torch.cuda.set_device(device)
        return done

    with patch.object(ThreadPoolExecutor, "submit", submit):
        yield


@contextmanager
def fake_triton(hazards: StreamHazards) -> Iterator[None]:
    """A Triton kernel writes into tensors that were allocated before: nothing is launched, and the use is recorded."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return

    def launch(kernel: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        tensors = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
        hazards.launch(f"triton {kernel.fn.__name__}", tensors, tensors)

    with patch.object(JITFunction, "run", launch):
        yield


@contextmanager
def fake_launch(world: int, rank: int, hazards: StreamHazards) -> Iterator[CollectiveLog]:
    """The environment of a rank as torchrun makes it; `init_process_group` makes torch's fake group."""
    log = CollectiveLog(rank, hazards)
    real = dist.init_process_group

    def init(backend: str | None = None, *_: object, device_id: torch.device | None = None, **__: object) -> None:
        log.eager = device_id is not None
        here = rank % DEVICES_PER_HOST
        if device_id is None or torch.device(device_id).index != here:
            hazards.report("device", f"init_process_group has device_id {device_id}, not cuda:{here}", "comm/spawn.py")
        if torch.cuda.current_device() != here:
            now = torch.cuda.current_device()
            hazards.report("device", f"local rank {here} left cuda:{now} the current device", "comm/spawn.py")
        if backend is not None and "gloo" in backend:
            hazards.report("backend", f"every group gets {backend}: gloo connections beside NCCL's", "comm/spawn.py")
        real("fake", store=FakeStore(), rank=rank, world_size=world)

    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % DEVICES_PER_HOST),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(min(world, DEVICES_PER_HOST)),
    }
    with patch.dict(os.environ, environment), patch.object(dist, "init_process_group", init):
        try:
            yield log
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
