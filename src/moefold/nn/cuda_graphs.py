"""CUDA graphs: kernels captured once and launched as one, from a pool of memory that graphs of a slot share.

A captured graph has the addresses of its memory in it. Graphs that share a pool may use the same memory one after the
other, as long as they are replayed in the order of their capture. Those of one slot are: its regions forward, from the
first layer to the last, then backward, and nothing else between; two slots alternate in any order, so each has a pool
of its own.

Capture happens on a side stream (torch's), in the step after the first that used a slot: that one runs as it is, so
that libraries have their workspaces, Triton its kernels, and a batch what it caches. A backward is captured inside of
autograd's own thread, hence ``thread_local``: what other threads do, such as NCCL's watchdog, does not end the capture.

This file has never run on a GPU. Fake CUDA runs it (`dryrun/fake_cuda/fake_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from moefold.nn.graph_tape import TapeEngine

T = TypeVar("T")


class CapturedGraph(Protocol):
    def replay(self) -> None:
        """Do the captured work again, on the same memory."""
        ...


class GraphEngine(Protocol):
    @property
    def needs_warmup(self) -> bool:
        """Whether a slot runs a step as it is before it is captured."""
        ...

    def new_pool(self) -> object:
        """Of memory that graphs share which are replayed in the order of their capture."""
        ...

    def capture(self, work: Callable[[], T], pool: object) -> tuple[T, CapturedGraph]:
        """What ``work`` returned, whose memory replays write to; the work has been done once."""
        ...


class CudaGraphEngine:
    needs_warmup = True

    def new_pool(self) -> object:
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], T], pool: object) -> tuple[T, CapturedGraph]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
            result = work()
        # Capturing computes nothing.
        graph.replay()
        return result, graph


def engine_for(device: torch.device) -> GraphEngine:
    return CudaGraphEngine() if device.type == "cuda" else TapeEngine()
