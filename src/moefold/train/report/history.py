"""Read `metrics.jsonl` into columns, line by line, with bounded memory.

Numbers per step are kept in full: a million steps are a few hundred megabytes at most. Tokens per expert are kept as at
most `MAX_BINS` bins over time; when there are more, neighbours are summed.

A line that cannot be read is counted and left out: the file of a killed run may end in the middle of one.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moefold.errors import MoefoldError
from moefold.train.callbacks.jsonl import FILE_NAME
from moefold.train.profile.step_account import StepAccount, read_profile

# As Path.open with "rb".
Opener = Callable[[Path, str], AbstractContextManager[IO[bytes]]]
Column = npt.NDArray[np.float64]

MAX_BINS = 120
# Balance losses, and metrics of callbacks: a damaged file may have any number of names.
MAX_NAMES = 64
# Reasons are kept for this many skipped steps; all are counted.
_MAX_REASONS = 200
_MAX_HANG_BYTES = 16 << 20
# Of faults, this many are kept; all are counted.
MAX_FAULTS = 200
# Kinds of lines that tell of a fault; a start after the first is one too, and hangs have files of their own.
RESTART, HANG = "restart", "hang"
_FAULTS = ("save_failed", "roll_back", "straggler")
# Column name -> where a step's line has it.
_COLUMNS: dict[str, tuple[str, ...]] = {
    "loss": ("loss",),
    "grad_norm": ("grad_norm",),
    "lr": ("lr",),
    "tokens": ("tokens",),
    "dropped": ("dropped",),
    "memory": ("memory_bytes",),
    "load": ("load",),
    "tokens_per_s": ("speed", "tokens_per_s"),
    "tflops": ("speed", "tflops"),
    "mfu": ("speed", "mfu"),
    "data": ("seconds", "data"),
    "step_seconds": ("seconds", "step"),
    "save": ("seconds", "save"),
    "total": ("seconds", "total"),
}


@dataclass
class Bin:
    """Tokens per MoE layer and expert over the steps from `first` to `last`; `balance`: by the name of a balance loss,
    what each layer adds to it in the mean step, NaN where that is not known."""

    first: int
    last: int
    counts: npt.NDArray[np.int64]
    balance: dict[str, Column] = field(default_factory=dict)


class Fault(NamedTuple):
    """What went wrong, after which step; None if that is not known."""

    kind: str
    step: int | None
    what: str


@dataclass
class History:
    """A run as recorded. Columns are as long as `steps`; missing entries are NaN."""

    start: dict[str, Any] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    steps: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    columns: dict[str, Column] = field(default_factory=dict)
    balance: dict[str, Column] = field(default_factory=dict)
    # Added by callbacks.
    metrics: dict[str, Column] = field(default_factory=dict)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    num_skipped: int = 0
    validation: list[tuple[int, float]] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    num_faults: Counter[str] = field(default_factory=Counter)
    stopped: str | None = None
    bins: list[Bin] = field(default_factory=list)
    last_bin: Bin | None = None
    times: tuple[float, float] | None = None
    unreadable: int = 0
    # Of `profile.jsonl`, with `train.profile.every`.
    profile: list[StepAccount] = field(default_factory=list)

    def column(self, name: str) -> Column:
        return self.columns.get(name, np.full(len(self.steps), np.nan))

    def has(self, name: str) -> bool:
        return bool(np.isfinite(self.column(name)).any())


def read_history(directory: Path, opened: Opener = Path.open) -> History:
    """`opened` opens the file for reading bytes; a caller may use it to show progress."""
    path = directory / FILE_NAME
    if not path.is_file():
        raise MoefoldError(f"{path}: no such file; a report needs the directory of a run, such as runs/NAME")
    reader = _Reader()
    for data in _objects(path, opened, reader.history):
        reader.take(data)
    for hang in _hangs(directory):
        reader.add_fault(hang)
    reader.history.profile = read_profile(directory)
    return reader.finish()


def _hangs(directory: Path) -> Iterator[Fault]:
    """From the files that a watchdog wrote."""
    for path in sorted((directory / "hangs").glob("hang_*.json"))[-MAX_FAULTS:]:
        try:
            found = json.loads(path.read_bytes() if path.stat().st_size <= _MAX_HANG_BYTES else b"")
            sentence, what = (str(found[name]) for name in ("sentence", "what"))
            steps = [rank["step"] for rank in found["ranks"]]
        except (OSError, ValueError, RecursionError, TypeError, KeyError):
            yield Fault(HANG, None, f"{path.name} cannot be read")
            continue
        known = [step for step in steps if isinstance(step, int) and 0 <= step < 1 << 53]
        yield Fault(HANG, min(known, default=None), f"{sentence}; {what}")


def _objects(path: Path, opened: Opener, history: History) -> Iterator[dict[str, Any]]:
    with opened(path, "rb") as file:
        for line in file:
            try:
                data = json.loads(line)
            except (ValueError, RecursionError):
                data = None
            if isinstance(data, dict):
                yield data
            else:
                history.unreadable += 1


class _Reader:
    def __init__(self) -> None:
        self.history = History()
        self._steps = array("q")
        self._columns = {name: array("d") for name in _COLUMNS}
        self._balance: dict[str, array[float]] = {}
        self._metrics: dict[str, array[float]] = {}

    def take(self, data: dict[str, Any]) -> None:
        history, kind, step = self.history, data.get("kind"), data.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
            history.unreadable += 1
            return
        if (time := number(data.get("time"))) == time:
            history.times = (time if history.times is None else history.times[0], time)
        if kind == "step":
            self._take_step(step, data)
            history.stopped = None
        elif kind == "start":
            history.start = data
            if history.starts:
                self.add_fault(
                    Fault(RESTART, step, f"started again from step {step:,}" if step else "from the beginning")
                )
            history.starts.append(step)
            history.stopped = None
        elif kind == "validation":
            if math.isfinite(loss := number(data.get("loss"))):
                history.validation.append((step, loss))
        elif kind == "save":
            history.saves.append(step)
        elif kind in _FAULTS:
            self.add_fault(Fault(kind, step, _what(kind, data)))
        elif kind == "stop":
            history.stopped = str(data.get("reason"))

    def add_fault(self, fault: Fault) -> None:
        self.history.num_faults[fault.kind] += 1
        if len(self.history.faults) < MAX_FAULTS:
            self.history.faults.append(fault)

    def _take_step(self, step: int, data: dict[str, Any]) -> None:
        for name, place in _COLUMNS.items():
            self._columns[name].append(_at(data, place))
        self._take_named(self._balance, data.get("balance"))
        self._take_named(self._metrics, data.get("metrics"))
        self._steps.append(step)
        if (reason := data.get("skipped")) is not None:
            self.history.num_skipped += 1
            if len(self.history.skipped) < _MAX_REASONS:
                self.history.skipped.append((step, str(reason)))
        self._take_counts(step, data.get("counts"), data.get("counts_steps"), data.get("layers"))

    def _take_named(self, columns: dict[str, array[float]], found: object) -> None:
        for name, value in found.items() if isinstance(found, dict) else ():
            if name in columns or len(columns) < MAX_NAMES:
                column = columns.setdefault(name, array("d"))
                column.extend([math.nan] * (len(self._steps) - len(column)))
                column.append(number(value))

    def _take_counts(self, step: int, counts: object, over: object, layers: object) -> None:
        if counts is None:
            return
        try:
            counts_ME = np.asarray(counts, dtype=np.int64)
        except (ValueError, TypeError, OverflowError):
            counts_ME = np.zeros(0, np.int64)
        if counts_ME.ndim != 2 or counts_ME.size == 0 or counts_ME.min() < 0:
            self.history.unreadable += 1
            return
        bins = self.history.bins
        if bins and bins[-1].counts.shape != counts_ME.shape:
            bins.clear()
        steps = over if isinstance(over, int) and 0 < over <= step else 1
        bins.append(Bin(step - steps + 1, step, counts_ME, _balance_of(layers, len(counts_ME))))
        self.history.last_bin = bins[-1]
        if len(bins) > 2 * MAX_BINS:
            self.history.bins = [_merged(a, b) for a, b in zip(bins[::2], bins[1::2])] + bins[len(bins) & ~1 :]

    def finish(self) -> History:
        history, count = self.history, len(self._steps)
        steps = np.frombuffer(self._steps, dtype=np.int64) if count else np.zeros(0, np.int64)
        # A step has one line; should a file have two, the later one is used.
        _, last_first = np.unique(steps[::-1], return_index=True)
        order = count - 1 - last_first
        history.steps = steps[order]
        history.columns = {name: _in_order(column, count, order) for name, column in self._columns.items()}
        history.balance = {name: _in_order(column, count, order) for name, column in self._balance.items()}
        history.metrics = {name: _in_order(column, count, order) for name, column in self._metrics.items()}
        if len(history.bins) > MAX_BINS:
            bins = history.bins
            history.bins = [_merged(a, b) for a, b in zip(bins[::2], bins[1::2])] + bins[len(bins) & ~1 :]
        return history


def _what(kind: str, data: Mapping[str, object]) -> str:
    if kind == "straggler":
        return f"rank {data.get('rank')} is {'slow' if data.get('slow') else 'no longer slow'}"
    left = data.get("retries_left")
    more = "" if kind != "save_failed" else f"; {left} retries left" if left else "; skipped"
    return f"{data.get('reason')}{more}"


def number(value: object) -> float:
    """As a float; NaN for everything that is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan


def _at(data: dict[str, Any], place: tuple[str, ...]) -> float:
    found: object = data
    for name in place:
        found = found.get(name) if isinstance(found, dict) else None
    return number(found)


def _in_order(column: array[float], count: int, order: npt.NDArray[np.int64]) -> Column:
    column.extend([math.nan] * (count - len(column)))
    return np.array(column, dtype=np.float64)[order]


def _balance_of(layers: object, count: int) -> dict[str, Column]:
    """By the name of a loss, a number per layer; what is not that is left out."""
    found = layers.get("balance") if isinstance(layers, dict) else None
    if not isinstance(found, dict):
        return {}
    sound = [(name, row) for name, row in found.items() if isinstance(row, list) and len(row) == count]
    return {name: np.array([number(value) for value in row]) for name, row in sound[:MAX_NAMES]}


def _merged(early: Bin, late: Bin) -> Bin:
    """Means weigh as many steps as they are of."""
    weights = [each.last - each.first + 1 for each in (early, late)]
    balance = {
        name: (early.balance[name] * weights[0] + late.balance[name] * weights[1]) / sum(weights)
        for name in early.balance.keys() & late.balance.keys()
    }
    return Bin(early.first, late.last, early.counts + late.counts, balance)
