"""Sees every storage come and go while a step runs, with real tensors or with fake ones.

Every operation passes by here. A storage counts once, however many views it has, from when it is first seen until it is
freed. What a kernel or a transport allocates for itself is not seen, nor is what was there before and was not met.
Sharded data parallelism empties storages and fills them again, so growing and shrinking is seen too. Operations on
sharded tensors are let through until they arrive as operations on this rank's parts: a wrapper has the size of the
whole and holds no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.dryrun.memory_timeline import Event, Mark

# Told of each collective: its name among torch's operations, and its arguments.
Overhear = Callable[[str, tuple[Any, ...]], None]

_CAST = torch.ops.aten._to_copy.default


class Watch(TorchDispatchMode):
    """``events`` and ``marks`` so far, and what is known about storages, by their number."""

    def __init__(self, overhear: Overhear = lambda name, args: None) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.marks: list[Mark] = []
        self.category: dict[int, str] = {}
        # Storages that were handed to a collective, and of casts the storage that was cast.
        self.travelled: set[int] = set()
        self.cast_of: dict[int, int] = {}
        self.num_seen = 0
        self._overhear = overhear
        # By the storage's address: its number, its bytes, and what tells us that it is gone.
        self._known: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and keeping the compiler out of every operation takes time."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        result = op(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._made(op, result, args)
        elif isinstance(result, (tuple, list)):
            for part in result:
                if isinstance(part, Tensor):
                    self._made(op, part, args)
        if op.namespace == "c10d":
            self._overhear(op._opname, args)
            self.travelled.update(self._known[key][0] for key in _addresses(args) if key in self._known)
        return result

    def _made(self, op: Any, result: Tensor, args: tuple[Any, ...]) -> None:
        """A result is new if no argument has its storage; an argument that was never met was there before us."""
        storage = result.untyped_storage()
        if storage._cdata in self._known or storage._cdata not in _addresses(args):
            number = self._meet(storage)
            if op is _CAST and (source := args[0].untyped_storage()._cdata) in self._known:
                self.cast_of[number] = self._known[source][0]

    def meet(self, tensor: Tensor, category: str | None = None) -> int:
        """The number of this tensor's storage, which counts from now on if it did not before."""
        number = self._meet((tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage())
        if category is not None:
            self.category[number] = category
        return number

    def _meet(self, storage: torch.UntypedStorage) -> int:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            number = self.num_seen
            self.num_seen += 1
            self._known[key] = (number, size, weakref.ref(storage, lambda _: self._part(key)))
            self.events.append(Event(number, size))
            return number
        number, before, gone = self._known[key]
        if size != before:
            self._known[key] = (number, size, gone)
            self.events.append(Event(number, size - before))
        return number

    def mark(self, what: str) -> None:
        """Say what has just ended."""
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

    def _part(self, key: int) -> None:
        number, size, _ = self._known.pop(key)
        self.events.append(Event(number, -size))

    def __enter__(self) -> Watch:
        # Resizing a storage is no operation on tensors, so it is met at the method itself.
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._meet(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]


def _addresses(args: Iterable[Any]) -> Iterator[int]:
    """Of the storages of all tensors among the arguments."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg.untyped_storage()._cdata
        elif isinstance(arg, (tuple, list)):
            yield from _addresses(arg)
