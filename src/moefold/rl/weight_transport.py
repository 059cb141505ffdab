"""Buckets of weights to other processes: over a process group, or through shared memory on one host.

A message is a header and the bytes of a bucket. The header is JSON: name, dtype, shape and place of each part, and the
number of bytes; an empty list of parts ends the stream. Nothing is pickled, and the receiver checks every place against
the bytes before it makes a view.

``GroupChannel`` broadcasts from one rank of any process group, which need not be one of the run's: usually that rank
and those of the inference engine. ``SharedChannel`` is a file in memory with two counters, of messages written and of
messages read: the writer waits until its last message was read, so that one bucket is in it at a time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.checkpoint.hf.gather_weights import WeightBucket
from moefold.checkpoint.tensor_spec import DTYPES
from moefold.errors import ExchangeError
from moefold.private_files import open_own, who_else

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NUMBERS, _MAX_HEADER = 4, 4 << 20
_KEYS = {"name", "dtype", "shape", "offset", "first_row", "full_shape"}


class ReceivedPart(NamedTuple):
    """An HF tensor, or the rows from ``first_row`` on of a tensor of ``full_shape``; a view of the channel's memory."""

    name: str
    values: Tensor
    first_row: int
    full_shape: tuple[int, ...]


class Channel(Protocol):
    def send(self, header: bytes, payload: Tensor) -> None: ...

    def receive(self) -> tuple[bytes, Tensor]:
        """The next message; its bytes are valid until the next call."""
        ...


def send_weights(buckets: Iterable[WeightBucket], channel: Channel) -> int:
    """All buckets, then the end; returns the number of bytes."""
    total, nothing = 0, torch.empty(0, dtype=torch.uint8)
    for bucket in buckets:
        parts = [
            {
                "name": part.hf_name,
                "dtype": _NAMES[part.dtype],
                "shape": list(part.shape),
                "offset": part.offset,
                "first_row": part.rows.start,
                "full_shape": list(part.hf_shape),
            }
            for part in bucket.parts
        ]
        channel.send(json.dumps({"parts": parts, "bytes": bucket.bytes.numel()}).encode(), bucket.bytes)
        total += bucket.bytes.numel()
    channel.send(json.dumps({"parts": [], "bytes": 0}).encode(), nothing)
    return total


def receive_weights(channel: Channel) -> Iterator[ReceivedPart]:
    """Every part of every bucket; a view, to be copied before the next one is asked for."""
    while True:
        header, payload = channel.receive()
        if not (parts := _parts(header)):
            return
        yield from (_received(part, payload) for part in parts)


def _parts(header: bytes) -> list[dict[str, object]]:
    try:
        message = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ExchangeError(f"the header of a bucket is not JSON: {str(error)[:100]}") from None
    parts = message.get("parts") if isinstance(message, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) and set(part) >= _KEYS for part in parts):
        raise ExchangeError(f"the header of a bucket does not list parts with {', '.join(sorted(_KEYS))}")
    return parts


def _received(part: dict[str, object], payload: Tensor) -> ReceivedPart:
    name, dtype = str(part["name"]), DTYPES.get(str(part["dtype"]))
    shape, full = (_sizes(part[key]) for key in ("shape", "full_shape"))
    (offset, first_row) = _sizes([part["offset"], part["first_row"]])
    nbytes = prod(shape) * dtype.itemsize if dtype is not None else 0
    aligned = dtype is not None and offset % dtype.itemsize == 0
    fits = aligned and offset + nbytes <= payload.numel() and shape[1:] == full[1:] and len(shape) == len(full)
    if dtype is None or not fits or (full and first_row + shape[0] > full[0]):
        raise ExchangeError(f"{name}: {part} is not inside of a bucket of {payload.numel():,} bytes")
    return ReceivedPart(name, payload[offset : offset + nbytes].view(dtype).view(shape), first_row, full)


def _sizes(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ExchangeError(f"{values!r} are not sizes")
    return tuple(values)


class GroupChannel:
    """Broadcasts from ``source``, a global rank, to the other ranks of ``group``, which all call `receive`."""

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device | str = "cpu") -> None:
        self.group, self.source, self.device = group, source, torch.device(device)
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)

    def send(self, header: bytes, payload: Tensor) -> None:
        sizes = torch.tensor([len(header), payload.numel()], device=self.device)
        dist.broadcast(sizes, self.source, group=self.group)
        dist.broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self.device), self.source, self.group)
        if payload.numel():
            dist.broadcast(payload, self.source, group=self.group)

    def receive(self) -> tuple[bytes, Tensor]:
        sizes = torch.zeros(2, dtype=torch.int64, device=self.device)
        dist.broadcast(sizes, self.source, group=self.group)
        header_bytes, payload_bytes = (int(size) for size in sizes.tolist())
        if not 0 < header_bytes <= _MAX_HEADER or payload_bytes < 0:
            raise ExchangeError(f"a header of {header_bytes:,} bytes before {payload_bytes:,} bytes of weights")
        header = torch.empty(header_bytes, dtype=torch.uint8, device=self.device)
        dist.broadcast(header, self.source, group=self.group)
        if self._memory.numel() < payload_bytes:
            self._memory = torch.empty(payload_bytes, dtype=torch.uint8, device=self.device)
        payload = self._memory[:payload_bytes]
        if payload_bytes:
            dist.broadcast(payload, self.source, group=self.group)
        return header.cpu().numpy().tobytes(), payload


class SharedChannel:
    """A file in memory (of /dev/shm, say) that one process makes and another opens. One writer, one reader.

    The writer gives ``bucket_bytes``, and makes the file so that only this user can open it. The layout: messages
    written, messages read, bytes of the header and of the payload; the header; the payload.
    """

    def __init__(self, path: Path, bucket_bytes: int | None = None, seconds: float = 600.0) -> None:
        self.path, self.seconds, self.ahead = path, seconds, 8 * _NUMBERS + _MAX_HEADER
        if bucket_bytes is not None:
            with open(open_own(path, os.O_CREAT | os.O_EXCL | os.O_RDWR), "wb") as file:
                file.truncate(self.ahead + bucket_bytes)
        with open(open_own(path, os.O_RDONLY), "rb") as file:
            # Whoever made the file sends the weights.
            status = os.fstat(file.fileno())
            if (who := who_else(status)) is not None or status.st_size < self.ahead:
                raise ExchangeError(f"{path}: {who or 'is too short for a channel'}; make a new channel")
            memory = torch.from_file(str(path), shared=True, size=status.st_size, dtype=torch.uint8)
        self._numbers = memory[: 8 * _NUMBERS].view(torch.int64)
        self._header, self._payload = memory[8 * _NUMBERS : self.ahead], memory[self.ahead :]
        self._in_use = False

    def send(self, header: bytes, payload: Tensor) -> None:
        if len(header) > _MAX_HEADER or payload.numel() > self._payload.numel():
            raise ExchangeError(f"{self.path}: {payload.numel():,} bytes, there is room for {self._payload.numel():,}")
        self._wait(lambda: self._written == self._read, "nobody read the last message")
        self._header[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._payload[: payload.numel()].copy_(payload)
        self._numbers[2:] = torch.tensor([len(header), payload.numel()])
        self._numbers[0] += 1

    def receive(self) -> tuple[bytes, Tensor]:
        if self._in_use:
            self._numbers[1] += 1
        self._wait(lambda: self._written > self._read, "no message came")
        self._in_use = True
        header_bytes, payload_bytes = (int(size) for size in self._numbers[2:].tolist())
        if not (0 < header_bytes <= _MAX_HEADER and 0 <= payload_bytes <= self._payload.numel()):
            raise ExchangeError(f"{self.path}: a header of {header_bytes:,} and a payload of {payload_bytes:,} bytes")
        header = self._header[:header_bytes].numpy().tobytes()
        if not payload_bytes:
            # The last message: there is no next call that would say that it was read.
            self._numbers[1] += 1
            self._in_use = False
        return header, self._payload[:payload_bytes]

    @property
    def _written(self) -> int:
        return int(self._numbers[0])

    @property
    def _read(self) -> int:
        return int(self._numbers[1])

    def _wait(self, ready: Callable[[], bool], problem: str) -> None:
        last = time.monotonic() + self.seconds
        while not ready():
            if time.monotonic() > last:
                raise ExchangeError(f"{self.path}: {problem} within {self.seconds:.0f} s; is the other process alive?")
            time.sleep(0.001)
