"""A rank's heartbeat, in memory that it shares with its launcher: step, phase, and the last collectives.

The launcher maps the memory before it forks, so it reads a rank that is stopped, that holds the GIL, or that is dead: a
rank writes, and nobody has to answer. Every phase that is entered and every collective that is started is a beat.

Collectives are numbered per communicator (torch's process group), since a communicator runs them in that order and all
its members must start the same ones: the rank with the smallest number has not arrived. Several of our group names may
share one communicator, so both are kept. Sends of a pipeline are in the list of entries, and are not numbered against
the collectives: the two ends of a boundary send different messages.

Times are of ``time.monotonic``, which is one clock for all processes of a host and does not jump.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

ENTRIES = 200
RECENT_STEPS = 16
# In the order in which a rank enters them in a step.
PHASES = (
    *("set-up", "before step", "data", "step", "after backward", "update", "after step", "checkpoint", "commit"),
    *("on save", "validation", "on evaluate", "agreement", "checkpoint at the end"),
)
# Together they are a step, whose time is learned. How long a callback or a disk takes is not known beforehand.
STEP_PHASES = ("data", "step", "update", "commit", "agreement")
P2P = ("send",)
_MAX_GROUPS, _MAX_DIMS, _NAMES_BYTES = 96, 6, 12 << 10

_HEAD = struct.Struct("<6Q")  # process id, beats, phase, step, entries, measured steps
_SECONDS = struct.Struct(f"<{1 + len(PHASES) + RECENT_STEPS}d")  # phase began, longest of each phase, recent steps
_COUNTS = struct.Struct(f"<{_MAX_GROUPS}Q")
_ENTRY = struct.Struct(f"<QQd20s32s12sB{_MAX_DIMS}q")  # number, step, time, operation, group, dtype, dims
_AT_SECONDS = _HEAD.size
_AT_COUNTS = _AT_SECONDS + _SECONDS.size
_AT_ENTRIES = _AT_COUNTS + _COUNTS.size
_AT_NAMES = _AT_ENTRIES + ENTRIES * _ENTRY.size
BYTES = -(-(_AT_NAMES + 8 + _NAMES_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


class Entry(NamedTuple):
    """A collective or a send that this rank started: the ``number``-th over its communicator."""

    number: int
    step: int
    time: float
    operation: str
    group: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.operation} #{self.number} over {self.group}, {self.dtype}{list(self.shape)}"


class Pulse(NamedTuple):
    """The part that is read at every poll. ``longest`` is by phase, of those that have ended at least once."""

    pid: int
    beats: int
    phase: str
    step: int
    longest: dict[str, float]
    recent_steps: tuple[float, ...]

    @property
    def progress(self) -> tuple[int, int]:
        """Of two ranks, the one with the smaller is less advanced."""
        return self.step, PHASES.index(self.phase)


class RankRecord(NamedTuple):
    """All of it. ``communicators`` are by group name; ``counts`` are the collectives started over each of them."""

    pulse: Pulse
    communicators: dict[str, str]
    counts: dict[str, int]
    entries: tuple[Entry, ...]


class Heartbeat:
    """One rank's record. ``enter``, ``attach`` and ``collective`` are for the rank, the rest for who watches it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BYTES)
        self._slots: dict[str, int] = {}
        self._communicators: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._phase, self._beats, self._step, self._entries = 0, 0, 0, 0
        self._in_step, self._phase_began = 0.0, time.monotonic()
        self._longest = [0.0] * len(PHASES)
        self._num_steps = 0
        self._steps: list[float] = []
        # Called with every phase that is entered, while a step is profiled.
        self.on_enter: Callable[[str], None] | None = None
        # Dispatchers may start collectives on a thread of their own.
        self._lock = threading.Lock()

    def reset(self) -> None:
        """By the launcher, before ranks are forked."""
        self._memory[:] = bytes(BYTES)

    # ---- by the rank ----

    def begin(self) -> None:
        """First of all, in the rank."""
        with self._lock:
            self._phase_began = time.monotonic()
            self._publish()

    def attach(self, communicators: Mapping[str, str]) -> None:
        """From the names of groups to torch's names of their communicators, which are the same on all members."""
        self._slots = {name: slot for slot, name in enumerate(dict.fromkeys(communicators.values()))}
        names = json.dumps([list(self._slots), dict(communicators)]).encode()
        # A run has a few dozen names at most.
        assert len(self._slots) <= _MAX_GROUPS and len(names) <= _NAMES_BYTES, f"{len(names)} bytes of group names"
        self._communicators = dict(communicators)
        self._memory[_AT_NAMES : _AT_NAMES + 8 + len(names)] = struct.pack("<Q", len(names)) + names

    def enter(self, phase: str, step: int | None = None) -> None:
        """The rank is in this phase from now on, of this step, or of the one it was in."""
        if self.on_enter is not None:
            self.on_enter(phase)
        with self._lock:
            now = time.monotonic()
            spent = now - self._phase_began
            self._longest[self._phase] = max(self._longest[self._phase], spent)
            if PHASES[self._phase] in STEP_PHASES:
                self._in_step += spent
            if phase == "data" and self._in_step:
                self._measured(self._in_step)
                self._in_step = 0.0
            self._phase, self._phase_began = PHASES.index(phase), now
            self._step = self._step if step is None else step
            self._publish()

    def collective(self, operation: str, group: str, sent: Tensor) -> None:
        """As `Ledger.record`: called before the operation is started."""
        with self._lock:
            name = self._communicators.get(group, "")
            key = f"{operation} {group}" if operation in P2P else name
            number = self._counts[key] = self._counts.get(key, 0) + 1
            shape = tuple(sent.shape)[:_MAX_DIMS]
            at = _AT_ENTRIES + self._entries % ENTRIES * _ENTRY.size
            _ENTRY.pack_into(
                *(self._memory, at, number, self._step, time.monotonic(), operation.encode(), group.encode()),
                *(str(sent.dtype).removeprefix("torch.").encode(), len(shape), *shape, *[0] * (_MAX_DIMS - len(shape))),
            )
            # Written last: who reads in between sees the entry before it.
            self._entries += 1
            if operation not in P2P and name in self._slots:
                struct.pack_into("<Q", self._memory, _AT_COUNTS + 8 * self._slots[name], number)
            self._beats += 1
            _HEAD.pack_into(self._memory, 0, *self._head())

    def _measured(self, seconds: float) -> None:
        """The first step of a start is longer than the others, and is dropped once there is another one."""
        self._num_steps += 1
        if self._num_steps == 2:
            self._steps.clear()
        self._steps.append(seconds)
        del self._steps[:-RECENT_STEPS]

    def _head(self) -> tuple[int, ...]:
        return os.getpid(), self._beats, self._phase, self._step, self._entries, len(self._steps)

    def _publish(self) -> None:
        self._beats += 1
        steps = self._steps + [0.0] * (RECENT_STEPS - len(self._steps))
        _SECONDS.pack_into(self._memory, _AT_SECONDS, self._phase_began, *self._longest, *steps)
        _HEAD.pack_into(self._memory, 0, *self._head())

    # ---- by who watches ----

    def pulse(self) -> Pulse:
        pid, beats, phase, step, _, measured = _HEAD.unpack_from(self._memory, 0)
        _, *seconds = _SECONDS.unpack_from(self._memory, _AT_SECONDS)
        longest = {name: spent for name, spent in zip(PHASES, seconds) if spent > 0}
        return Pulse(pid, beats, PHASES[phase], step, longest, tuple(seconds[len(PHASES) :][:measured]))

    def read(self) -> RankRecord:
        slots, communicators = self._names()
        counts = _COUNTS.unpack_from(self._memory, _AT_COUNTS)
        started = _HEAD.unpack_from(self._memory, 0)[4]
        entries = tuple(self._entry(number) for number in range(max(0, started - ENTRIES), started))
        return RankRecord(self.pulse(), communicators, dict(zip(slots, counts)), entries)

    def _names(self) -> tuple[list[str], dict[str, str]]:
        (size,) = struct.unpack_from("<Q", self._memory, _AT_NAMES)
        if not size:
            return [], {}
        slots, communicators = json.loads(self._memory[_AT_NAMES + 8 : _AT_NAMES + 8 + size])
        return slots, communicators

    def _entry(self, index: int) -> Entry:
        at = _AT_ENTRIES + index % ENTRIES * _ENTRY.size
        number, step, when, operation, group, dtype, dims, *shape = _ENTRY.unpack_from(self._memory, at)
        name, over, kind = (text.rstrip(b"\0").decode() for text in (operation, group, dtype))
        return Entry(number, step, when, name, over, kind, tuple(shape[:dims]))
