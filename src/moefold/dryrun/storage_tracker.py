"""Tracks every storage that is allocated and freed while a step runs, real or fake, and finds the peak.

A dispatch mode sees the result of every operation. A storage counts once, however many views it has, from its first
appearance until it is freed. Memory that a kernel or a transport allocates itself is not seen, nor are storages that
existed before and were not added. FSDP resizes storages to 0 and back, so changes of size are tracked too. Operations
on DTensors are passed on until they arrive as operations on local shards: a DTensor has the size of the whole tensor,
and no memory.

Storages are numbered in order of appearance, and an event says by how many bytes one of them grew or shrank. The
category of a storage is often known only later (whether a tensor is saved for backward is known after its forward), so
events are stored and summed at the end, when every storage has its category.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Called for each collective: its name among torch's operations, and its arguments.
OnCollective = Callable[[str, tuple[Any, ...]], None]

_CAST = torch.ops.aten._to_copy.default
# `torch.tensor` of numbers: the first that a mode sees of it.
_CONSTANT = torch.ops.aten.lift_fresh.default


# In the order of reports.
CATEGORIES = (
    "parameters",
    "gathered parameters",
    "weight copies",
    "gradients",
    "optimizer state",
    "activations",
    "communication",
    "other",
)


# Of storages in the host's memory, which are not part of the device's peak.
HOST = "host"


class Event(NamedTuple):
    """A storage grew by so many bytes; negative when it shrank or was freed."""

    storage: int
    change: int


class Mark(NamedTuple):
    """``what`` ended just before this event."""

    event: int
    what: str


@dataclass(frozen=True)
class Peak:
    """The first moment with the most bytes."""

    total: int
    # By category: at that moment, and each category's own peak.
    by_category: dict[str, int]
    category_peaks: dict[str, int]
    when: str
    # Bytes of the storages that were alive at that moment.
    alive: dict[int, int]
    # The most bytes in the host's memory.
    host: int = 0


def peak_of(events: Sequence[Event], category: Mapping[int, str], marks: Sequence[Mark]) -> Peak:
    """Sums events; a storage without a category counts as "other"."""
    held: Counter[str] = Counter()
    category_peaks: Counter[str] = Counter()
    total, highest, at = 0, -1, 0
    for number, (storage, change) in enumerate(events):
        kind = category.get(storage, "other")
        held[kind] += change
        if kind != HOST:
            total += change
        if change > 0 and held[kind] > category_peaks[kind]:
            category_peaks[kind] = held[kind]
        if total > highest:
            highest, at = total, number
    alive = {storage: size for storage, size in alive_after(events[: at + 1]).items() if category.get(storage) != HOST}
    by_category: Counter[str] = Counter()
    for storage, size in alive.items():
        by_category[category.get(storage, "other")] += size
    return Peak(
        max(highest, 0),
        {kind: by_category[kind] for kind in CATEGORIES},
        {kind: category_peaks[kind] for kind in CATEGORIES},
        in_progress_at(at, marks),
        alive,
        category_peaks[HOST],
    )


def alive_after(events: Sequence[Event]) -> dict[int, int]:
    """Bytes of every storage that is alive after these events."""
    sizes: Counter[int] = Counter()
    for storage, change in events:
        sizes[storage] += change
    return {storage: size for storage, size in sizes.items() if size}


def in_progress_at(event: int, marks: Sequence[Mark]) -> str:
    """What was running then: what ended next."""
    following = bisect_right([mark.event for mark in marks], event)
    return marks[following].what if following < len(marks) else "after the step"


class StorageTracker(TorchDispatchMode):
    """``events`` and ``marks`` so far, and what is known about storages, by number."""

    def __init__(self, on_collective: OnCollective | None = None) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.marks: list[Mark] = []
        self.category: dict[int, str] = {}
        # Storages that were arguments of a collective; and for results of casts, the storage that was cast.
        self.communicated: set[int] = set()
        self.cast_of: dict[int, int] = {}
        self.num_seen = 0
        self._on_collective = on_collective
        # By the storage's address: its number, its bytes, and a weak reference that reports when it is freed.
        self._known: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and disabling dynamo for every operation takes time."""
        return False

    def __torch_dispatch__(
        self, op: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if DTensor in types:
            return NotImplemented
        result = op(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._add_result(op, result, args)
        elif isinstance(result, (tuple, list)):
            for part in result:
                if isinstance(part, Tensor):
                    self._add_result(op, part, args)
        if op.namespace == "c10d":
            if self._on_collective is not None:
                self._on_collective(op._opname, args)
            self.communicated.update(self._known[key][0] for key in _addresses(args) if key in self._known)
        return result

    def _add_result(self, op: OpOverload, result: Tensor, args: tuple[Any, ...]) -> None:
        """A result is new if no argument has its storage, or if it is a constant; an unknown storage of an argument
        existed before."""
        storage = result.untyped_storage()
        if op is _CONSTANT or storage._cdata in self._known or storage._cdata not in _addresses(args):
            number = self._add_storage(storage)
            if op is _CAST and (source := args[0].untyped_storage()._cdata) in self._known:
                self.cast_of[number] = self._known[source][0]

    def add(self, tensor: Tensor, category: str | None = None) -> int:
        """The number of this tensor's storage, which is tracked from now on."""
        number = self._add_storage((tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage())
        if category is not None:
            self.category[number] = category
        return number

    def _add_storage(self, storage: torch.UntypedStorage) -> int:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            number = self.num_seen
            self.num_seen += 1
            self._known[key] = (number, size, weakref.ref(storage, lambda _: self._freed(key)))
            self.events.append(Event(number, size))
            return number
        number, before, gone = self._known[key]
        if size != before:
            self._known[key] = (number, size, gone)
            self.events.append(Event(number, size - before))
        return number

    def mark(self, what: str) -> None:
        """``what`` has just ended."""
        self.marks.append(Mark(len(self.events), what))

    def alive_since(self, number: int) -> Iterator[tuple[int, int]]:
        """Storages with at least this number that are not freed yet, and their bytes; the newest first."""
        for found, size, _ in reversed(list(self._known.values())):
            if found < number:
                return
            if size:
                yield found, size

    def size_of(self, tensor: Tensor) -> int:
        return tensor.untyped_storage().nbytes()

    def _freed(self, key: int) -> None:
        number, size, _ = self._known.pop(key)
        self.events.append(Event(number, -size))

    def __enter__(self) -> StorageTracker:
        # Resizing a storage is not dispatched, so the method itself is patched.
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_and_track(storage: torch.UntypedStorage, size: int) -> object:
            result = resize(storage, size)
            self._add_storage(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_track  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]


def _addresses(args: Iterable[object]) -> Iterator[int]:
    """Of the storages of all tensors among the arguments."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg.untyped_storage()._cdata
        elif isinstance(arg, (tuple, list)):
            yield from _addresses(arg)
