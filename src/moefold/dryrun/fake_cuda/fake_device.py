"""torch.cuda's streams, events and devices on top of the fake guard.

`fake_cuda()` replaces the functions of `torch.cuda` that the CPU build cannot offer. Every stream and event is a number
of the guard's, so streams that autograd or FSDP switch to in C++ and in Python are the same ones. There are eight
devices per host; the current one is 0 until `set_device`, as in a new process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch

from moefold.dryrun.fake_cuda.load_guard import load_guard

DEVICES_PER_HOST = 8
# As torch.cuda's functions take it; None is the current one.
Device = torch.device | int | str | None
_STREAMS_PER_DEVICE = 1 << 20
PROPERTIES = SimpleNamespace(
    name="fake H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_multiprocessor=233472,
)


def _index(device: Device) -> int:
    if device is None:
        return int(load_guard().fake_cuda_device())
    index = device if isinstance(device, int) else torch.device(device).index
    return int(load_guard().fake_cuda_device()) if index is None or index < 0 else index


class FakeEvent:
    """An event holds the clock of its stream at the time of `record`."""

    def __init__(self, *_: object, **__: object) -> None:
        self._number: int | None = None

    def record(self, stream: FakeStream | None = None) -> FakeEvent:
        self._number = load_guard().fake_cuda_record((stream or current_stream()).number)
        return self

    def wait(self, stream: FakeStream | None = None) -> None:
        # Waiting for an event that was never recorded returns at once, on a GPU too.
        if self._number is not None:
            load_guard().fake_cuda_wait((stream or current_stream()).number, self._number)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self._number is not None:
            load_guard().fake_cuda_host_wait(self._number)

    def elapsed_time(self, _: FakeEvent) -> float:
        return 0.0


class FakeStream:
    """A stream by its number; `device_index` is the device that its kernels run on."""

    device_type = 1

    def __init__(self, device: Device = None, priority: int = 0, *, number: int | None = None, **_: object) -> None:
        self.number: int = load_guard().fake_cuda_new_stream(_index(device)) if number is None else number
        self.device_index = self.number // _STREAMS_PER_DEVICE
        self.stream_id = self.number % _STREAMS_PER_DEVICE
        self.device = torch.device("cuda", self.device_index)
        self.priority, self.cuda_stream = priority, self.number

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return (event or FakeEvent()).record(self)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __enter__(self) -> FakeStream:
        self._before = current_stream(self.device_index)
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self._before)


def current_stream(device: Device = None) -> FakeStream:
    return FakeStream(number=load_guard().fake_cuda_stream(_index(device)))


def default_stream(device: Device = None) -> FakeStream:
    return FakeStream(number=_index(device) * _STREAMS_PER_DEVICE)


def set_stream(stream: FakeStream) -> None:
    load_guard().fake_cuda_set_stream(stream.number)


@contextmanager
def use_stream(stream: FakeStream | None) -> Iterator[None]:
    """`torch.cuda.stream`: kernels inside go to this stream, and its device is the current one."""
    if stream is None:
        yield
        return
    before, device = current_stream(stream.device_index), load_guard().fake_cuda_device()
    load_guard().fake_cuda_set_device(stream.device_index)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
        load_guard().fake_cuda_set_device(device)


def set_device(device: Device) -> None:
    if (index := _index(device)) >= 0:
        load_guard().fake_cuda_set_device(index)


def _exchange_device(device: int) -> int:
    before = int(load_guard().fake_cuda_device())
    if device >= 0:
        load_guard().fake_cuda_set_device(device)
    return before


def _synchronize(device: Device = None) -> None:
    current_stream(device).synchronize()


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Inside, `torch.cuda` has eight GPUs. The guard must have been loaded before torch (`load_guard`)."""
    load_guard().fake_cuda_reset()
    replaced: dict[str, object] = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "stream": use_stream,
        "current_device": lambda: int(load_guard().fake_cuda_device()),
        "set_device": set_device,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "device_count": lambda: DEVICES_PER_HOST,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "synchronize": _synchronize,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "max_memory_allocated": lambda device=None: 0,
    }
    with patch.multiple(torch.cuda, **replaced):  # type: ignore[call-overload]
        yield
