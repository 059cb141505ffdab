"""Finds what two CUDA streams do to one storage without waiting for each other.

Each operation runs on the current stream of its device and reads or writes storages. Three orders must hold in every
execution, and the guard's vector clocks say whether they do:

    read after write, write after write   the writer has finished before this operation starts
    write after read                      all readers have finished before this operation starts
    reuse                                 the allocator hands a freed block to the next allocation on the stream that it
                                          was allocated on; uses on other streams must have finished by then, unless
                                          `record_stream` told the allocator of them

Two kinds of findings are not about streams: an operation whose tensors are on several devices (fake tensors raise), and
one that runs while another device than its own is current, as happens where nobody called `set_device`.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from sys import _getframe

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.dryrun.fake_cuda.fake_device import FakeStream
from moefold.dryrun.fake_cuda.load_guard import load_guard

_PACKAGE = Path(__file__).parents[2]
# Views and bookkeeping launch no kernel.
_NO_KERNEL = {
    "aten::detach",
    "aten::view",
    "aten::_unsafe_view",
    "aten::alias",
    "aten::record_stream",
    "prim::device",
}


@dataclass(frozen=True)
class Finding:
    """What is wrong, and where in this package the operation was launched."""

    kind: str
    message: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message} ({self.where})"


@dataclass
class _Use:
    """The last operation of a stream that used a storage."""

    count: int
    operation: str
    where: str


@dataclass
class _Storage:
    """Who wrote a storage last, who has read it since, and which streams the allocator knows about."""

    stream: int
    allocated: str
    writer: tuple[int, _Use] | None = None
    readers: dict[int, _Use] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    alive: weakref.ref[torch.UntypedStorage] | None = None

    def uses(self) -> dict[int, _Use]:
        """The last use by each stream."""
        found = dict(self.readers)
        if self.writer is not None:
            stream, use = self.writer
            if stream not in found or found[stream].count < use.count:
                found[stream] = use
        return found


class StreamHazards(TorchDispatchMode):
    """A dispatch mode above the fake mode; ``findings`` so far, each place once."""

    def __init__(self) -> None:
        super().__init__()
        self.findings: dict[tuple[str, str], Finding] = {}
        self.num_launches = 0
        self._guard = load_guard()
        self._known: dict[int, _Storage] = {}
        # Freed blocks by the stream that may reuse them, with the uses that had not finished.
        self._freed: dict[int, list[tuple[_Storage, dict[int, _Use]]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and disabling dynamo for every operation takes time."""
        return False

    def __torch_dispatch__(
        self,
        op: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        name = op._schema.name
        if name == "aten::record_stream":
            tensor, stream = args
            assert isinstance(tensor, Tensor) and isinstance(stream, FakeStream)
            self.record_stream(tensor, stream)
        elif op.namespace != "c10d" and name not in _NO_KERNEL and not op.is_view:
            reads, writes = _split(op, args, kwargs)
            outputs = [x for x in _tensors((result,)) if x.device.type == "cuda"]
            if name.startswith("aten::empty") or name.startswith("aten::new_empty"):
                self._allocate(outputs, name)
            else:
                self.launch(name.removeprefix("aten::"), reads, [*writes, *outputs])
        return result

    # ---- called by the mode, and for collectives by their log ----

    def launch(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], stream: int | None = None) -> None:
        """A kernel on ``stream``, by default the current one of its tensors' device."""
        on_gpu = [x for x in (*reads, *writes) if x.device.type == "cuda"]
        if not on_gpu:
            return
        where, device = launched_from(), on_gpu[0].device.index
        if device != self._guard.fake_cuda_device():
            now = self._guard.fake_cuda_device()
            self.report("device", f"{name} on cuda:{device} while cuda:{now} is the current device", where)
        stream = self._guard.fake_cuda_stream(device) if stream is None else stream
        self._allocate(writes, name, stream)
        use = _Use(self._guard.fake_cuda_launch(stream), name, where)
        self.num_launches += 1
        for tensor in reads:
            self._read(tensor, stream, use)
        for tensor in writes:
            self._write(tensor, stream, use)

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        self._storage(tensor).recorded.add(stream.number)

    def report(self, kind: str, message: str, where: str) -> None:
        self.findings.setdefault((kind, where + message[:60]), Finding(kind, message, where))

    @contextmanager
    def errors(self) -> Iterator[None]:
        """An exception inside is a finding, named by the innermost line of this package."""
        try:
            yield
        except Exception as error:
            lines = [f for f in traceback.extract_tb(error.__traceback__) if str(_PACKAGE) in f.filename]
            ours = [f for f in lines if "dryrun" not in Path(f.filename).parts]
            where = f"{Path(ours[-1].filename).relative_to(_PACKAGE)}:{ours[-1].lineno}" if ours else "torch"
            said = str(error).strip().splitlines()
            self.report("error", f"{type(error).__name__}: {said[0][:200] if said else ''}", where)

    # ---- storages ----

    def _read(self, tensor: Tensor, stream: int, use: _Use) -> None:
        if tensor.device.type != "cuda":
            return
        storage = self._storage(tensor)
        self._after_writer(storage, stream, use, "reads")
        storage.readers[stream] = use

    def _write(self, tensor: Tensor, stream: int, use: _Use) -> None:
        if tensor.device.type != "cuda":
            return
        storage = self._storage(tensor)
        self._after_writer(storage, stream, use, "overwrites")
        for reader, read in storage.readers.items():
            if reader != stream and self._guard.fake_cuda_finished(stream, reader) < read.count:
                message = f"{use.operation} overwrites what {read.operation} ({read.where}) may still read"
                self.report("write after read", message, use.where)
        storage.writer, storage.readers = (stream, use), {}

    def _after_writer(self, storage: _Storage, stream: int, use: _Use, verb: str) -> None:
        if storage.writer is None:
            return
        writer, written = storage.writer
        if writer != stream and self._guard.fake_cuda_finished(stream, writer) < written.count:
            message = f"{use.operation} {verb} what {written.operation} ({written.where}) may not have written yet"
            self.report("no wait between streams", message, use.where)

    def _storage(self, tensor: Tensor) -> _Storage:
        held = tensor.untyped_storage()
        known = self._known.get(held._cdata)
        if known is None:
            # It existed before the first operation that this mode saw.
            known = self._add(held, self._guard.fake_cuda_stream(tensor.device.index), "before")
        return known

    def _add(self, held: torch.UntypedStorage, stream: int, name: str) -> _Storage:
        key = held._cdata
        storage = _Storage(stream, name)
        storage.alive = weakref.ref(held, lambda _: self._free(key))
        self._known[key] = storage
        return storage

    def _allocate(self, tensors: Sequence[Tensor], name: str, stream: int | None = None) -> None:
        for tensor in tensors:
            held = tensor.untyped_storage()
            if tensor.device.type == "cuda" and held._cdata not in self._known:
                # The allocator takes the block of the stream that is current, whichever stream will use it.
                current = self._guard.fake_cuda_stream(tensor.device.index)
                self._reuse(current)
                self._add(held, current, name)

    def _free(self, key: int) -> None:
        storage = self._known.pop(key)
        left = self._unfinished(storage, storage.uses())
        if left:
            self._freed.setdefault(storage.stream, []).append((storage, left))

    def _unfinished(self, storage: _Storage, uses: dict[int, _Use]) -> dict[int, _Use]:
        return {
            stream: use
            for stream, use in uses.items()
            if stream != storage.stream
            and stream not in storage.recorded
            and self._guard.fake_cuda_finished(storage.stream, stream) < use.count
        }

    def _reuse(self, stream: int) -> None:
        """An allocation on this stream may get any block that was freed to it."""
        for storage, uses in self._freed.pop(stream, []):
            for use in self._unfinished(storage, uses).values():
                message = f"freed memory may be reused while {use.operation} on another stream still uses it"
                self.report("no record_stream", message, use.where)


def launched_from() -> str:
    """The innermost line of this package, outside of the dry run, that led here; torch's own if there is none."""
    frame, torch_line = _getframe(1), ""
    while frame is not None:
        ours, theirs = _short_path(frame.f_code.co_filename)
        if ours:
            return f"{ours}:{frame.f_lineno}"
        if theirs and not torch_line:
            torch_line = f"{theirs}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return torch_line or "torch"


@cache
def _short_path(filename: str) -> tuple[str, str]:
    """The path of a file of this package, or of torch.distributed; each empty if it is none."""
    path = Path(filename)
    if _PACKAGE in path.parents:
        return ("" if "dryrun" in path.parts else str(path.relative_to(_PACKAGE))), ""
    return "", f"torch{filename.rpartition('/torch')[2]}" if "/torch/distributed/" in filename else ""


def _split(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that the operation reads, and those that it writes in place."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for position, argument in enumerate(op._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        target = writes if argument.alias_info is not None and argument.alias_info.is_write else reads
        target.extend(x for x in _tensors((value,)) if x.device.type == "cuda")
    return reads, writes


def _tensors(values: Sequence[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
