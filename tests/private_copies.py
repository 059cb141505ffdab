"""A transport that works on copies of its own, for measurements of what the program itself holds.

gloo's threads let go of a collective's tensors some time after the collective is over, and a send holds its tensor
until the peer has read it. Both depend on timing and belong to the transport. Here every collective is carried out on
copies that the measurement does not see, to its end, and results are copied back; a send leaves at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.dryrun.fake_world import completed_work


class PrivateCopies(TorchDispatchMode):
    """Enter it before whatever measures."""

    def __init__(self) -> None:
        super().__init__()
        self._leaving: list[Any] = []

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if op.namespace != "c10d" or op is torch.ops.c10d.recv_.default:
            return op(*args, **(kwargs or {}))
        copies = _copied(args)
        result = op(*copies, **(kwargs or {}))
        if op is torch.ops.c10d.send.default:
            self._leaving.append((copies, dist.Work.unbox(result)))
            return completed_work()
        boxed = result[-1] if isinstance(result, tuple) else result
        dist.Work.unbox(boxed).wait()
        for mine, copy in zip(_tensors(args), _tensors(copies), strict=True):
            mine.copy_(copy)
        return (args[0], completed_work()) if isinstance(result, tuple) else completed_work()

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for _, work in self._leaving:
            work.wait()


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(map(_copied, value)) if isinstance(value, (tuple, list)) else value


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (tuple, list)):
            yield from _tensors(arg)
