"""`metrics.jsonl` in the run's directory: one JSON object per line, and every step exactly once.

    {"kind": "start", "step": 0, ...}
    {"kind": "step", "step": 1, ...}
    {"kind": "validation" | "save" | "save_failed" | "roll_back" | "straggler" | "stop", "step": ..., ...}

Lines are written whole and flushed, so a killed run loses at most the line it was writing. A run that resumes from step
N first removes the lines of later steps, which it will write again, reading backwards from the end: the cost is in
proportion to what is repeated and not to the length of the run. Metrics that callbacks added are under `metrics`.

Tokens per expert are summed over the steps of an interval and written at its end: `counts`, over `counts_steps` steps.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from moefold.checkpoint.files import make_directory, naming
from moefold.checks.kernels import experts_in_use
from moefold.config.loading import plain_data
from moefold.private_files import open_own
from moefold.train.callback import Callback, Control, Evaluation, RunInfo, StepRecord
from moefold.train.metrics import Meter, as_data, device_name, finite, router_stats

FILE_NAME = "metrics.jsonl"
_BLOCK = 1 << 16


class JsonLines(Callback):
    """Always on: `moefold report` and everything else about a run can be made from this file."""

    def __init__(self, device: str | None = None) -> None:
        self._device = device
        self._file: IO[bytes] | None = None
        self._path = Path(FILE_NAME)
        self._meter: Meter | None = None
        self._every = 1
        self._last_step = 0
        self._counts: npt.NDArray[np.int64] | None = None
        self._counts_steps = 0

    def on_start(self, info: RunInfo) -> None:
        make_directory(info.directory)
        self._path = info.directory / FILE_NAME
        self._last_step = info.resumed_from or 0
        with naming(self._path):
            forget_after(self._path, self._last_step)
            self._file = os.fdopen(open_own(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
        self._meter = Meter(info, self._device or device_name(info.device))
        self._every = max(info.run.train.log_every, 1)
        self._write("start", self._last_step, **_about(info, self._meter))

    def after_step(self, record: StepRecord, control: Control) -> None:
        assert self._meter is not None, "on_start comes first"
        self._last_step = record.step
        data = as_data(record, self._meter.speed([record]))
        counts = data.pop("counts")
        if not record.metrics:
            del data["metrics"]
        if record.state_hash is None:
            del data["state_hash"]
        if counts:
            data["load"] = round(router_stats(record.counts or ()).max_load, 4)
            self._add(np.asarray(counts, dtype=np.int64))
        if self._counts is not None and (record.step % self._every == 0 or record.step == record.steps):
            data["counts"], data["counts_steps"] = self._counts.tolist(), self._counts_steps
            self._counts, self._counts_steps = None, 0
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
        self._last_step, self._counts, self._counts_steps = step, None, 0
        forget_after(self._path, step)
        self._write("roll_back", step, reason=reason)

    def on_straggler(self, step: int, rank: int, slow: bool, seconds: Mapping[str, float]) -> None:
        self._write("straggler", step, rank=rank, slow=slow, seconds=dict(seconds))

    def on_end(self, reason: str) -> None:
        if self._file is None:
            return
        self._write("stop", self._last_step, reason=reason)
        self._file.close()
        self._file = None

    def _add(self, counts_ME: npt.NDArray[np.int64]) -> None:
        self._counts = counts_ME if self._counts is None else self._counts + counts_ME
        self._counts_steps += 1

    def _write(self, kind: str, step: int, **more: object) -> None:
        self._line({"kind": kind, "time": round(time.time(), 3), "step": step, **more})

    def _line(self, data: dict[str, object]) -> None:
        assert self._file is not None, "on_start comes first"
        self._file.write(json.dumps(data, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()


def forget_after(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`, and an incomplete last line."""
    if not path.exists():
        return
    kept: list[bytes] = []
    with os.fdopen(open_own(path, os.O_RDWR), "r+b") as file:
        end = 0
        for start, line in _lines_backwards(file):
            about = _read(line)
            if about is not None and about[1] <= step:
                if about[0] == "step":
                    end = start + len(line)
                    break
                # The line of an earlier checkpoint or start may stand after lines of later steps.
                kept.append(line)
        file.seek(end)
        file.truncate()
        file.write(b"".join(reversed(kept)))
        file.flush()
        os.fsync(file.fileno())


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
    return {
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
        "mfu_note": meter.mfu_note,
        "config": plain_data(info.run),
    }
