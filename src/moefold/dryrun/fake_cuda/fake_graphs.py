"""CUDA graphs on fake GPUs: what is captured is watched, and a replay is one launch on the same memory.

`fake_graphs()` replaces `torch.cuda.CUDAGraph`, `torch.cuda.graph` and `torch.cuda.graph_pool_handle`, so that the
code that captures on a GPU runs as it is. While a graph is captured every operation is held against
`nn/capture_rules.py`, and waits of the host are findings. What the graph reads and did not allocate itself is noted:

    capture         a host read, a random number, a collective, a wait of the host inside of a graph
    freed memory    a graph is replayed, and what it reads has been freed or resized since its capture
    another pool    a graph reads or writes memory of another slot's graphs, which may hold another microbatch
    replay order    graphs of one pool are replayed in another order than they were captured: memory that one has freed
                    may be another's

A replay runs no operation. For the streams it is one kernel that reads and writes what was captured.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moefold.dryrun.fake_cuda.fake_device import FakeEvent, FakeStream, current_stream, use_stream
from moefold.dryrun.fake_cuda.stream_hazards import StreamHazards, launched_from
from moefold.nn.capture_rules import why_refused

Pool = tuple[int, int]


class _Memory(NamedTuple):
    """A storage in the place of a tensor: the graph keeps none alive."""

    storage: torch.UntypedStorage
    device: torch.device

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.storage


@dataclass
class _Outside:
    """Memory that a graph uses and did not allocate."""

    alive: weakref.ref[torch.UntypedStorage]
    size: int
    operation: str
    where: str
    written: bool = False


@dataclass
class GraphLog:
    """All graphs, by pool in the order of their capture, and how often graphs were replayed."""

    hazards: StreamHazards
    pools: dict[Pool, list[FakeGraph]] = field(default_factory=dict)
    num_replays: int = 0
    # The pool of each storage that a graph allocated, by address; and the graph that was replayed last in each pool.
    pool_of: dict[int, Pool] = field(default_factory=dict)
    last: dict[Pool, int] = field(default_factory=dict)
    streams: dict[int, FakeStream] = field(default_factory=dict)


class FakeGraph:
    def __init__(self, log: GraphLog) -> None:
        self.log = log
        self.pool: Pool = (0, 0)
        self.number = 0
        # Operations with the shapes of their results.
        self.trace: list[str] = []
        self.outside: dict[int, _Outside] = {}
        self.own: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.device = torch.device("cuda")
        self.where = ""

    def add(self, storage: torch.UntypedStorage) -> None:
        """Memory of the graph's pool, for as long as a tensor has it."""
        key = storage._cdata

        def freed(_: object) -> None:
            self.own.pop(key, None)
            self.log.pool_of.pop(key, None)

        self.own[key], self.log.pool_of[key] = weakref.ref(storage, freed), self.pool

    def replay(self) -> None:
        self.log.num_replays += 1
        report, before = self.log.hazards.report, self.log.last.get(self.pool)
        graphs = self.log.pools[self.pool]
        # Forward and backward of a microbatch, then of the next.
        if before is not None and self.number != (before + 1) % len(graphs):
            words = f"graph {self.number} of a pool is replayed after graph {before}, and was captured after another"
            report("replay order", words, self.where)
        self.log.last[self.pool] = self.number
        reads: list[_Memory] = []
        writes: list[_Memory] = []
        for outside in self.outside.values():
            storage = outside.alive()
            if storage is None or storage.nbytes() != outside.size:
                report("freed memory", f"{outside.operation} reads what was freed after the capture", outside.where)
                continue
            (writes if outside.written else reads).append(_Memory(storage, self.device))
        writes += [_Memory(storage, self.device) for alive in self.own.values() if (storage := alive()) is not None]
        self.log.hazards.launch("graph", cast("list[Tensor]", reads), cast("list[Tensor]", writes))


class _Capture(TorchDispatchMode):
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self.graph = graph

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        op: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs, graph, where = kwargs or {}, self.graph, launched_from()
        if op.namespace == "prim":
            # A question, and no kernel.
            return op(*args, **kwargs)
        if reason := why_refused(op, args, kwargs):
            graph.log.hazards.report("capture", f"{op} {reason}", where)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.device.type == "cuda"]
        result = op(*args, **kwargs)
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.device.type == "cuda"]
        for tensor in given:
            self._use(tensor, str(op), where, op._schema.is_mutable and tensor is given[0])
        known = {x.untyped_storage()._cdata for x in given}
        for tensor in results:
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage._cdata not in graph.own:
                graph.add(storage)
        if not op.is_view:
            graph.trace.append(f"{op} {[tuple(x.shape) for x in results]}")
        return result

    def kernel(self, name: str, tensors: Sequence[Tensor]) -> None:
        """A kernel that is no operation of torch; which of its tensors it writes is not known."""
        for tensor in tensors:
            self._use(tensor, name, launched_from(), True)
        self.graph.trace.append(f"{name} {[tuple(x.shape) for x in tensors]}")

    def _use(self, tensor: Tensor, operation: str, where: str, written: bool) -> None:
        graph, storage = self.graph, tensor.untyped_storage()
        graph.device = tensor.device
        if storage._cdata in graph.own:
            return
        pool = graph.log.pool_of.get(storage._cdata)
        if pool == graph.pool:
            # Memory that an earlier graph of the pool has written; when it is freed it is the pool's.
            return
        if pool is not None:
            graph.log.hazards.report("another pool", f"{operation} uses memory of another slot's graphs", where)
        known = graph.outside.get(storage._cdata)
        if known is None or known.alive() is not storage:
            graph.outside[storage._cdata] = _Outside(weakref.ref(storage), storage.nbytes(), operation, where, written)
        else:
            known.written |= written


@contextmanager
def fake_graphs(hazards: StreamHazards) -> Iterator[GraphLog]:
    log, numbers = GraphLog(hazards), count(1)

    @contextmanager
    def capture(graph: FakeGraph, pool: Pool | None = None, **_: object) -> Iterator[None]:
        graph.pool, graph.where = pool or (next(numbers), 0), launched_from()
        graph.number = len(log.pools.setdefault(graph.pool, []))
        log.pools[graph.pool].append(graph)
        main = current_stream()
        side = log.streams.setdefault(main.device_index, FakeStream())
        # torch waits for the device before it captures.
        side.wait_stream(main)

        def wait(_: FakeEvent) -> None:
            hazards.report("capture", "the host waits for the device", launched_from())

        watch, launch = _Capture(graph), hazards.launch

        def launch_and_watch(
            name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], stream: int | None = None
        ) -> None:
            if name.startswith("triton"):
                watch.kernel(name, writes)
            launch(name, reads, writes, stream)

        with (
            use_stream(side),
            patch.object(FakeEvent, "synchronize", wait),
            patch.object(hazards, "launch", launch_and_watch),
            watch,
        ):
            yield
        main.wait_stream(side)

    replaced: dict[str, object] = {
        "CUDAGraph": lambda: FakeGraph(log),
        "graph": capture,
        "graph_pool_handle": lambda: (next(numbers), 0),
    }
    with patch.multiple(torch.cuda, **replaced):  # type: ignore[call-overload]
        yield log
