"""Refuses, on any device, what would make the host wait for the device, or would make a shape depend on data.

A CPU never waits for itself, so a test on one cannot see a wait. It can see the operations that would cause one:
reading a value on the host (``item``, ``tolist``, ``bool``), results whose shape is only known from the data
(``nonzero``, boolean indexing, ``unique``), and blocking copies between devices. Backward passes are watched too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from traceback import extract_stack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.nn.capture_rules import HOST_READS, why_it_waits


class HostSyncError(AssertionError):
    """The host would have had to wait here."""


class _WatchOperations(TorchDispatchMode):
    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reason = why_it_waits(op, args, kwargs or {})
        if reason:
            raise HostSyncError(f"{op} {reason}, at {_where()}")
        return op(*args, **(kwargs or {}))


class _WatchMethods(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in HOST_READS:
            raise HostSyncError(f"Tensor.{func.__name__} reads values on the host, at {_where()}")
        return func(*args, **(kwargs or {}))


def _where() -> str:
    """The innermost line that is neither torch's nor this file's."""
    frames = [f for f in extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
    return f"{frames[-1].filename}:{frames[-1].lineno} `{frames[-1].line}`"


@contextmanager
def sync_free() -> Iterator[None]:
    with _WatchMethods(), _WatchOperations():
        yield


class _RecordShapes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = op(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(out)
        self.steps.append(f"{op} {[tuple(x.shape) for x in leaves if isinstance(x, Tensor)]}")
        return out


def shapes_of(work: Callable[[], object]) -> list[str]:
    """Every operation with the shapes it returned; equal lists for different data are what a graph capture needs."""
    with _RecordShapes() as recorded:
        work()
    return recorded.steps
