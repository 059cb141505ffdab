"""Profiled steps of a run: each rank stamps its step, rank 0 lays them side by side and writes the account.

The loop says when a step begins (`next_step`), which is also where the one before it ends. A profiled step hands a
recorder to the rank's ledger and to its heartbeat, and takes it away again; other steps stamp nothing. After the step,
outside of its time, the ranks' stamps are gathered on rank 0, put on its clock, and accounted for: a line of
`profile.jsonl`, and with `train.profile.trace` a trace for Chrome or Perfetto.

Other tools get ranges of the same names: NVTX, which nsys shows (`nsys profile --trace cuda,nvtx moefold ...`, never
run on a GPU), and torch's profiler, which writes a trace per rank and step.
"""

from __future__ import annotations

import gc
import json
import time
import zlib
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from moefold.checkpoint.files import make_directory
from moefold.comm.clock_offsets import clock_offsets
from moefold.comm.collectives import all_gather_bytes, all_reduce_ints
from moefold.comm.heartbeat import Heartbeat
from moefold.comm.spans import Clock, CudaClock, HostClock, Mark, Operation, Ranges, RankStep, Span, SpanRecorder
from moefold.parallel.fsdp import FsdpSharding
from moefold.parallel.fsdp_spans import stamp_fsdp
from moefold.parallel.parallelize import LocalModel
from moefold.private_files import own_opener, replace_file
from moefold.train.profile.account import account
from moefold.train.profile.chrome_trace import chrome_trace
from moefold.train.profile.device_memory import capacity_bytes, memory_used
from moefold.train.profile.step_account import FILE_NAME, StepAccount

FOLDER = "profile"


class StepProfiler:
    """One rank's side. All ranks must call ``next_step`` with the same steps."""

    def __init__(
        self, local_model: LocalModel, heartbeat: Heartbeat, directory: Path, clock: Clock | None = None
    ) -> None:
        config, groups = local_model.run.train.profile, local_model.groups
        self.local_model, self.heartbeat, self.directory, self.config = local_model, heartbeat, directory, config
        self.world, self.ledger = groups["world"], groups["world"].ledger
        self.stages = [groups.layout.coordinate(rank, "pp") for rank in range(self.world.size)]
        if clock is None:
            clock = CudaClock(local_model.device) if local_model.device.type == "cuda" else HostClock()
        ranges: Ranges | None = ranges_named(config.ranges)
        self.recorder = SpanRecorder(groups.rank, clock, ranges)
        self.torch_profiler = TorchProfiler(directory / FOLDER, groups.rank) if config.ranges == "torch" else None
        self._offsets: list[tuple[float, float]] | None = None
        # When the step before ended, if it was profiled, and what its profile took.
        self._ended: float | None = None
        self._overhead = 0.0
        if isinstance(local_model.sharding, FsdpSharding):
            stamp_fsdp(local_model.sharding, local_model.device.type)

    def next_step(self, step: int | None) -> None:
        """The step before is over, and ``step`` begins; None: no other does."""
        self._ended = None
        if self.ledger.spans is not None:
            self._ended = time.perf_counter()
            self._end()
        if step is not None and step % self.config.every == 0:
            if self._offsets is None:
                self._offsets = clock_offsets(self.world)
            if self.torch_profiler is not None:
                self.torch_profiler.start(step)
            # Rank 0 was busy with the last step; what others wait for it does not belong to this one.
            all_reduce_ints((0,), self.world)
            self.heartbeat.on_enter = self.recorder.mark
            self._overhead = 0.0 if self._ended is None else time.perf_counter() - self._ended
            self.recorder.begin(step)
            self.ledger.spans = self.recorder

    def close(self) -> None:
        """A step that is under way is forgotten."""
        if self.ledger.spans is not None:
            self.ledger.spans = self.heartbeat.on_enter = None
            self.recorder.end()

    def _end(self) -> None:
        """What is built here is gone before the next step, so it should not have garbage collected in it."""
        self.ledger.spans = self.heartbeat.on_enter = None
        collects = gc.isenabled()
        gc.disable()
        try:
            self._gather(self.recorder.end())
        finally:
            if collects:
                gc.enable()

    def _gather(self, step: RankStep) -> None:
        if self.torch_profiler is not None:
            self.torch_profiler.stop()
        memory = memory_used(self.local_model.device), capacity_bytes(self.local_model.device)
        everyone = all_gather_bytes(pack(step, memory), self.world)
        if self.local_model.groups.rank != 0:
            return
        steps, memories = zip(*map(unpack, everyone), strict=True)
        assert self._offsets is not None
        steps = tuple(on_clock_of_rank_0(each, -offset) for each, (offset, _) in zip(steps, self._offsets, strict=True))
        found = account(steps, self.stages, self.local_model.groups["ep"].alone)
        peaks, capacities = zip(*memories, strict=True)
        found = replace(found, stages=self.stages, memory_bytes=list(peaks), capacity_bytes=min(capacities))
        self._write(replace(found, overhead=self._overhead), steps)

    def _write(self, found: StepAccount, steps: tuple[RankStep, ...]) -> None:
        """A disk that is full costs a profile, not the run."""
        with suppress(OSError):
            make_directory(self.directory)
            with open(self.directory / FILE_NAME, "a", encoding="utf-8", opener=own_opener) as file:
                file.write(found.to_json() + "\n")
            if self.config.trace:
                make_directory(self.directory / FOLDER)
                trace = chrome_trace(steps, self.stages, self.local_model.groups["ep"].alone)
                path = self.directory / FOLDER / f"step_{found.step:08d}.trace.json"
                replace_file(path, json.dumps(trace, separators=(",", ":")))


def on_clock_of_rank_0(step: RankStep, shift: float) -> RankStep:
    """The same step with ``shift`` seconds added to all its stamps."""
    return step._replace(
        began=step.began + shift,
        ended=step.ended + shift,
        marks=[mark._replace(at=mark.at + shift) for mark in step.marks],
        spans=[span._replace(start=span.start + shift, end=span.end + shift) for span in step.spans],
        operations=[op._replace(start=op.start + shift) for op in step.operations],
    )


def pack(step: RankStep, memory: tuple[int, int]) -> bytes:
    data = {"step": step._asdict(), "memory": memory}
    return zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 1)


def unpack(content: bytes) -> tuple[RankStep, tuple[int, int]]:
    data = json.loads(zlib.decompress(content))
    step, memory = data["step"], data["memory"]
    marks = [Mark(*mark) for mark in step.pop("marks")]
    spans = [Span(*each)._replace(operations=tuple(each[5])) for each in step.pop("spans")]
    operations = [Operation(*each)._replace(peers=tuple(each[4])) for each in step.pop("operations")]
    return RankStep(**step, marks=marks, spans=spans, operations=operations), (memory[0], memory[1])


# ---- ranges for other tools ----


class NvtxRanges:
    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()


class TorchRanges:
    """Ranges of the running torch profiler."""

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[object]] = []

    def push(self, name: str) -> None:
        self._open.append(torch.profiler.record_function(name))
        self._open[-1].__enter__()

    def pop(self) -> None:
        self._open.pop().__exit__(None, None, None)


def ranges_named(name: str) -> Ranges | None:
    return {"none": lambda: None, "nvtx": NvtxRanges, "torch": TorchRanges}[name]()


class TorchProfiler:
    """torch's profiler around profiled steps; every rank writes its own trace."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._running: tuple[int, torch.profiler.profile] | None = None

    def start(self, step: int) -> None:
        self._running = step, torch.profiler.profile()
        self._running[1].__enter__()

    def stop(self) -> None:
        if self._running is None:
            return
        (step, profiler), self._running = self._running, None
        profiler.__exit__(None, None, None)
        make_directory(self.folder)
        profiler.export_chrome_trace(str(self.folder / f"torch_step_{step:08d}_rank_{self.rank:05d}.json"))
