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

ATEN = torch.ops.aten
# bincount and histc find their size or their range on the host, though no tag says so.
READS_DATA = {ATEN._local_scalar_dense, ATEN.is_nonzero, ATEN.equal, ATEN.bincount, ATEN.histc}
TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
# These carry a tag for only one of their uses, which is looked at separately.
INDEXING = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_}
ESCAPES = {
    getattr(Tensor, name)
    for name in ("numpy", "__array__", "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")
}


class HostSyncError(AssertionError):
    """The host would have had to wait here."""


class _WatchOperations(TorchDispatchMode):
    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reason = _why_not(op, args, kwargs or {})
        if reason:
            raise HostSyncError(f"{op} {reason}, at {_where()}")
        return op(*args, **(kwargs or {}))


class _WatchMethods(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ESCAPES:
            raise HostSyncError(f"Tensor.{func.__name__} reads values on the host, at {_where()}")
        return func(*args, **(kwargs or {}))


def _why_not(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    packet = op.overloadpacket
    if packet in INDEXING:
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        return "with a boolean mask has as many rows as the mask has hits" if masks else None
    if packet is ATEN.repeat_interleave:
        return "without output_size asks for the sum" if kwargs.get("output_size") is None else None
    if packet in (ATEN._to_copy, ATEN.copy_):
        return _blocking_copy(packet, args, kwargs)
    if packet in READS_DATA or TAGS & set(op.tags):
        return "reads data on the host"
    return None


def _blocking_copy(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    source = args[0] if packet is ATEN._to_copy else args[1]
    target = kwargs.get("device") if packet is ATEN._to_copy else args[0].device
    if target is None or torch.device(target) == source.device or kwargs.get("non_blocking"):
        return None
    return f"waits for a copy from {source.device} to {target}"


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
