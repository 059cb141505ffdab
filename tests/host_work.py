"""What the host does for the device: operations it starts, and places where it would have to wait.

A GPU is fed by the host, one kernel launch after the other; a layer of many small operations is bound by that, not by
arithmetic. And where a shape depends on data, the host stops until the device has caught up. A CPU never waits for
itself, so a clock on one sees neither. A dispatch mode sees both: every operation that computes, and every operation
that would make the host wait: reading a value (``item``, ``tolist``, ``bool``), results whose shape is only known from
the data (``nonzero``, boolean indexing), and blocking copies between devices. Backward passes are seen too.

An operation counts as one launch; some, such as a sort, are several kernels on a device. A collective is one too. A
Triton kernel and a call of another library are one launch each, whatever the interpreter or the fake that stands in for
them does (``counted_once``).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.nn.capture_rules import HOST_READS, why_it_waits

ATEN = torch.ops.aten
# Memory without contents, and other names for what is there.
FREE = {
    ATEN.empty,
    ATEN.empty_like,
    ATEN.empty_strided,
    ATEN.new_empty,
    ATEN.new_empty_strided,
    ATEN.detach,
    ATEN.alias,
    ATEN.lift_fresh,
    ATEN._unsafe_view,
    ATEN.promote_types,
}


@dataclass
class HostWork:
    """How often each operation was started, and each wait with what caused it."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: list[str] = field(default_factory=list)
    # Inside of ``counted_once``.
    paused: bool = False

    @property
    def num_launches(self) -> int:
        return self.launches.total()


# Of each thread, because ranks may be threads.
_CURRENT = threading.local()


def count_host_work(work: Callable[[], object]) -> HostWork:
    seen = _CURRENT.seen = HostWork()
    try:
        with _Methods(seen), _Operations(seen):
            work()
    finally:
        _CURRENT.seen = None
    return seen


@contextmanager
def counted_once(name: str, launches: int = 1) -> Iterator[None]:
    """What runs inside is so many launches of that name, and its waits are not the layer's."""
    seen: HostWork | None = getattr(_CURRENT, "seen", None)
    if seen is None or seen.paused:
        yield
        return
    seen.launches[name] += launches
    seen.paused = True
    try:
        yield
    finally:
        seen.paused = False


class _Operations(TorchDispatchMode):
    def __init__(self, seen: HostWork) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.seen.paused:
            return op(*args, **(kwargs or {}))
        if reason := why_it_waits(op, args, kwargs or {}):
            self.seen.waits.append(f"{op} {reason}")
        if launches(op):
            self.seen.launches[str(op.overloadpacket)] += 1
        return op(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, seen: HostWork) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in HOST_READS and not self.seen.paused:
            self.seen.waits.append(f"Tensor.{func.__name__} reads values on the host")
        return func(*args, **(kwargs or {}))


def launches(op: Any) -> bool:
    """Whether it computes anything: views and empty memory do not."""
    if op.overloadpacket in FREE:
        return False
    returns = op._schema.returns
    views = [result for result in returns if result.alias_info is not None and not result.alias_info.is_write]
    return not (returns and len(views) == len(returns))
