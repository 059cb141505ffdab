"""`metrics.jsonl` in the run's directory: one JSON object per line, and every step exactly once.

    {"kind": "start", "step": 0, ...}
    {"kind": "step", "step": 1, ...}
    {"kind": "validation" | "save" | "save_failed" | "roll_back" | "straggler" | "stop", "step": ..., ...}

Lines are written whole and flushed, so a killed run loses at most the line it was writing. A run that resumes from step
N first removes the lines of later steps, which it will write again, reading backwards from the end: the cost is in
proportion to what is repeated and not to the length of the run. Metrics that callbacks added are under `metrics`.

Writing never stops training. Lines that the disk refuses are kept in memory, up to a bound, and written when it has
room again; half a line is cut off. The first refusal is a warning, and lines that are lost are counted.

Tokens per expert are summed over the steps of an interval and written at its end: `counts`, over `counts_steps` steps.
With them comes `layers`, a number per MoE layer for each name: the load of its busiest expert, its entropy, and what it
adds to each balance loss in the mean step.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from moefold.checkpoint.files import make_directory, naming
from moefold.checks.kernels import experts_in_use
from moefold.config.loading import plain_data
from moefold.nn.float32_matmul import cpu_matmul_here
from moefold.private_files import open_own
from moefold.train.callback import Callback, Control, Evaluation, RunInfo, StepRecord
from moefold.train.fault_tolerance.signals import print_stderr
from moefold.train.metrics import Meter, as_data, device_name, finite, router_stats

FILE_NAME = "metrics.jsonl"
_BLOCK = 1 << 16


class JsonLines(Callback):
    """Always on: `moefold report` and everything else about a run can be made from this file."""

    def __init__(self, device: str | None = None) -> None:
        self._device = device
        self._file: LineFile | None = None
        self._meter: Meter | None = None
        self._every = 1
        self._last_step = 0
        self._counts: npt.NDArray[np.int64] | None = None
        self._counts_steps = 0
        # Sums over the same steps, by the name of the loss.
        self._balance: dict[str, npt.NDArray[np.float64]] = {}

    def on_start(self, info: RunInfo) -> None:
        make_directory(info.directory)
        self._last_step = info.resumed_from or 0
        self._file = LineFile(info.directory / FILE_NAME)
        self._file.forget_after(self._last_step)
        self._meter = Meter(info, self._device or device_name(info.device))
        self._every = max(info.run.train.log_every, 1)
        self._write("start", self._last_step, **_about(info, self._meter))

    def after_step(self, record: StepRecord, control: Control) -> None:
        assert self._meter is not None, "on_start comes first"
        self._last_step = record.step
        data = as_data(record, self._meter.speed([record]))
        counts = data.pop("counts")
        del data["layer_balance"]
        if not record.metrics:
            del data["metrics"]
        if record.state_hash is None:
            del data["state_hash"]
        if counts:
            data["load"] = round(router_stats(record.counts or ()).max_load, 4)
            self._add(np.asarray(counts, dtype=np.int64), record.layer_balance)
        if self._counts is not None and (record.step % self._every == 0 or record.step == record.steps):
            data["counts"], data["counts_steps"] = self._counts.tolist(), self._counts_steps
            data["layers"] = self._layers(self._counts)
            self._forget_counts()
        self._line(data)

    def on_evaluate(self, evaluation: Evaluation, control: Control) -> None:
        more = {"metrics": finite(evaluation.metrics)} if evaluation.metrics else {}
        self._write("validation", evaluation.step, **finite({"loss": evaluation.loss}), **more)

    def on_save(self, step: int, path: Path) -> None:
        self._write("save", step, path=path.name)

    def on_save_failed(self, step: int, reason: str, retries_left: int) -> None:
        self._write("save_failed", step, reason=reason, retries_left=retries_left)

    def on_roll_back(self, step: int, reason: str) -> None:
        """Lines of later steps are written again."""
        self._last_step = step
        self._forget_counts()
        assert self._file is not None, "on_start comes first"
        self._file.forget_after(step)
        self._write("roll_back", step, reason=reason)

    def on_straggler(self, step: int, rank: int, slow: bool, seconds: Mapping[str, float]) -> None:
        self._write("straggler", step, rank=rank, slow=slow, seconds=dict(seconds))

    def on_end(self, reason: str) -> None:
        if self._file is None:
            return
        self._write("stop", self._last_step, reason=reason)
        self._file.close()
        self._file = None

    def _add(self, counts_ME: npt.NDArray[np.int64], balance: Mapping[str, list[float]]) -> None:
        self._counts = counts_ME if self._counts is None else self._counts + counts_ME
        self._counts_steps += 1
        for name, values in balance.items():
            self._balance[name] = self._balance.get(name, np.zeros(len(values))) + np.asarray(values, np.float64)

    def _forget_counts(self) -> None:
        self._counts, self._counts_steps, self._balance = None, 0, {}

    def _layers(self, counts_ME: npt.NDArray[np.int64]) -> dict[str, object]:
        stats = router_stats(counts_ME).layers
        means = {name: _digits(values / self._counts_steps) for name, values in self._balance.items()}
        return {
            "max_load": _digits(layer.max_load for layer in stats),
            "entropy": _digits(layer.entropy for layer in stats),
            "balance": means,
        }

    def _write(self, kind: str, step: int, **more: object) -> None:
        self._line({"kind": kind, "time": round(time.time(), 3), "step": step, **more})

    def _line(self, data: dict[str, object]) -> None:
        assert self._file is not None, "on_start comes first"
        self._file.add(json.dumps(data, allow_nan=False, separators=(",", ":")).encode() + b"\n")


def _digits(values: Iterable[float]) -> list[float | None]:
    """Six of them; null for what is not finite, which is all that JSON has for it."""
    return [float(f"{value:.6g}") if isfinite(value) else None for value in values]


# What a disk says that is full, damaged or gone for a while. Another error of the first attempt is the user's to mend.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
MAX_PENDING_BYTES = 16 << 20


class LineFile:
    """Appends whole lines; those that the disk refuses wait in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        # Where the last whole line ends.
        self._end = 0
        self._forget: int | None = None
        self._pending: deque[bytes] = deque()
        self._bytes = self.lost = 0
        self._refused: OSError | None = None

    def forget_after(self, step: int) -> None:
        """Remove the lines of steps after `step`, and an incomplete last line."""
        kept = [line for line in self._pending if (about := _read(line)) is not None and about[1] <= step]
        self._pending, self._bytes = deque(kept), sum(map(len, kept))
        self._forget = step
        self._flush()

    def add(self, line: bytes) -> None:
        self._append(line)
        self._flush()

    def close(self) -> None:
        self._flush()
        lost = self.lost + len(self._pending)
        if lost:
            print_stderr(f"warning: {lost} lines of {self.path} are lost: {self._refused or 'the disk was full'}")
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, line: bytes) -> None:
        self._pending.append(line)
        self._bytes += len(line)
        while self._bytes > MAX_PENDING_BYTES:
            self._bytes -= len(self._pending.popleft())
            self.lost += 1

    def _flush(self) -> None:
        try:
            self._write_pending()
        except OSError as error:
            if self._refused is None:
                if self._descriptor is None and error.errno not in _DISK:
                    with naming(self.path):
                        raise
                print_stderr(f"warning: {self.path}: {error.strerror or error}; lines are kept in memory meanwhile")
            self._refused = error
            return
        if self._refused is not None:
            self._refused = None
            print_stderr(f"{self.path} is written again" + (f"; {self.lost} lines are lost" if self.lost else ""))

    def _write_pending(self) -> None:
        if self._forget is not None:
            # To make a file shorter needs no room; what stood after the cut is written like any other line.
            kept = cut_after(self.path, self._forget)
            self._pending.extendleft(reversed(kept))
            self._bytes += sum(map(len, kept))
            self._forget = None
            if self._descriptor is not None:
                self._end = os.fstat(self._descriptor).st_size
        if self._descriptor is None:
            self._descriptor = open_own(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._end = os.fstat(self._descriptor).st_size
        if self._refused is not None:
            os.ftruncate(self._descriptor, self._end)
        while self._pending:
            rest = memoryview(self._pending[0])
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                # A process that ends now must not leave half a line; if this fails, the next attempt begins with it.
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._end)
                raise
            line = self._pending.popleft()
            self._end += len(line)
            self._bytes -= len(line)


def cut_after(path: Path, step: int) -> list[bytes]:
    """Cut a file before the lines of steps after `step`, and before an incomplete last line.

    Returns lines of earlier steps that stood behind the cut, to be written again.
    """
    if not path.exists():
        return []
    kept: list[bytes] = []
    with os.fdopen(open_own(path, os.O_RDWR), "r+b") as file:
        end, removed = 0, False
        for start, line in _lines_backwards(file):
            about = _read(line)
            if about is None or about[1] > step:
                removed = True
            elif about[0] == "step":
                end = start + len(line)
                break
            else:
                # The line of an earlier checkpoint or start may stand after lines of later steps.
                kept.append(line)
        if not removed:
            return []
        os.ftruncate(file.fileno(), end)
    return kept[::-1]


def _read(line: bytes) -> tuple[str, int] | None:
    """A line's kind and step; None for an incomplete line."""
    try:
        data = json.loads(line) if line.endswith(b"\n") else None
        return (str(data["kind"]), int(data["step"])) if isinstance(data, dict) else None
    except (ValueError, KeyError, TypeError):
        return None


def _lines_backwards(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The last line first, each with the offset at which it starts and its line end, if it has one."""
    start, rest = file.seek(0, os.SEEK_END), b""
    while start > 0:
        size = min(_BLOCK, start)
        start -= size
        file.seek(start)
        lines = (file.read(size) + rest).splitlines(keepends=True)
        # The first of these lines may begin before this block.
        whole, rest = (lines[1:], lines[0]) if start > 0 else (lines, b"")
        place = start + len(rest) + sum(map(len, whole))
        for line in reversed(whole):
            place -= len(line)
            yield place, line


def _about(info: RunInfo, meter: Meter) -> dict[str, object]:
    asked = info.asked
    changed = {} if asked is None else {"asked": {"world": asked.world, "parallel": plain_data(asked.run)["parallel"]}}
    return changed | {
        "run": info.run.name,
        "world": info.world,
        "resumed_from": info.resumed_from,
        "steps": info.run.train.steps,
        "parameters": info.parameters.total,
        "active_parameters": info.parameters.active,
        "flops_per_token": meter.flops_per_token,
        "flops_convention": "3 x forward; causal attention as half; head and shared experts counted, router not",
        "device": meter.device,
        "experts": None if info.run.model.moe is None else experts_in_use(info.run, info.device),
        "cpu_matmul": cpu_matmul_here(info.run, info.device),
        "mfu_note": meter.mfu_note,
        "config": plain_data(info.run),
    }
