"""Where optimizer states live between updates, and how a chunk of them comes to where the update runs.

    device   states are on the device, and are updated in place
    host     states are in pinned memory of the host; a chunk is copied to the device, updated, and copied back
    cpu      states are in the host's memory, and the update runs there: gradients and weights are copied down, and
             the new weights up

Copies run on a stream of their own, one chunk ahead: while a chunk is updated, the next one arrives and the one before
leaves. So two chunks at a time are on the device, whatever the states' size. On a CPU there is no second memory, and
the same copies are made all the same, in order, so that what is tested there is what a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor

StatesOn = Literal["device", "host", "cpu"]


class Staged(NamedTuple):
    """The tensors of a chunk, by name: where they live, and those among them that the update changes."""

    tensors: Mapping[str, Tensor]
    changed: frozenset[str]
    # Those that are copied to where the update runs; the others are there.
    moved: frozenset[str]


# Called with the number of a chunk.
Chunks = Callable[[int], Staged]


class Arrived(NamedTuple):
    """Copies of a chunk's moved tensors, and the event after they were made; None without streams."""

    copies: dict[str, Tensor]
    event: torch.cuda.Event | None


class Staging:
    """Brings chunks to where the update runs, and takes changes back."""

    def __init__(self, on: StatesOn, device: torch.device) -> None:
        self.on, self.device = on, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and on != "device" else None

    @property
    def update_device(self) -> torch.device:
        return torch.device("cpu") if self.on == "cpu" else self.device

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """For states."""
        if self.on == "device":
            return torch.zeros(size, dtype=dtype, device=self.device)
        zeros = torch.zeros(size, dtype=dtype, device="cpu")
        return zeros if self._stream is None else zeros.pin_memory()

    def over(self, sizes: Sequence[object], chunk: Chunks) -> Iterator[Mapping[str, Tensor]]:
        """For each of as many chunks as ``sizes`` has, in turn: its tensors, where the update runs."""
        if self.on == "device":
            yield from (chunk(number).tensors for number in range(len(sizes)))
            return
        if self._stream is not None:
            # Gradients and weights were last written by the step.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        ahead = self._arrive(chunk(0)) if sizes else None
        for number in range(len(sizes)):
            assert ahead is not None
            staged, here = chunk(number), ahead
            ahead = self._arrive(chunk(number + 1)) if number + 1 < len(sizes) else None
            self._wait(here)
            yield {**staged.tensors, **here.copies}
            self._leave(staged, here)
            del here
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def finish(self) -> None:
        """Wait until changes are in the host's memory, before the host reads them."""
        if self._stream is not None:
            self._stream.synchronize()

    def _arrive(self, staged: Staged) -> Arrived:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            copies = {name: self._copied(staged.tensors[name]) for name in sorted(staged.moved)}
            return Arrived(copies, None if self._stream is None else self._stream.record_event())

    def _copied(self, tensor: Tensor) -> Tensor:
        copy = torch.empty_like(tensor, device=self.update_device)
        if self._stream is not None and self.on == "cpu":
            copy = copy.pin_memory()
        return copy.copy_(tensor, non_blocking=True)

    def _wait(self, arrived: Arrived) -> None:
        if arrived.event is None:
            return
        if self.on == "cpu":
            arrived.event.synchronize()
            return
        # The copies belong to the copying stream, which waits for the update before it takes them back and before it
        # can reuse their memory: the allocator need not be told of this use.
        torch.cuda.current_stream(self.device).wait_event(arrived.event)

    def _leave(self, staged: Staged, arrived: Arrived) -> None:
        if self._stream is not None and self.on == "host":
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for name in sorted(staged.moved & staged.changed):
                staged.tensors[name].copy_(arrived.copies[name], non_blocking=True)
