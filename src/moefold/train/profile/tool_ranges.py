"""Named ranges for other tools: NVTX, which nsys shows, and torch's profiler, which writes a trace per rank and step.

NVTX ranges are named as the spans: `nsys profile --trace cuda,nvtx moefold ...`. (Never run on a GPU.)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch

from moefold.checkpoint.files import make_directory
from moefold.comm.spans import Ranges


class NvtxRanges:
    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()


class TorchRanges:
    """Ranges of the running torch profiler."""

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[object]] = []

    def push(self, name: str) -> None:
        self._open.append(torch.profiler.record_function(name))
        self._open[-1].__enter__()

    def pop(self) -> None:
        self._open.pop().__exit__(None, None, None)


def ranges_named(name: str) -> Ranges | None:
    return {"none": lambda: None, "nvtx": NvtxRanges, "torch": TorchRanges}[name]()


class TorchProfiler:
    """torch's profiler around profiled steps; every rank writes its own trace."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._running: tuple[int, torch.profiler.profile] | None = None

    def start(self, step: int) -> None:
        self._running = step, torch.profiler.profile()
        self._running[1].__enter__()

    def stop(self) -> None:
        if self._running is None:
            return
        (step, profiler), self._running = self._running, None
        profiler.__exit__(None, None, None)
        make_directory(self.folder)
        profiler.export_chrome_trace(str(self.folder / f"torch_step_{step:08d}_rank_{self.rank:05d}.json"))
