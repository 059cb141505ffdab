"""A launch under watch: no program may touch memory that is not an argument's, or what another program writes.

On a card the programs of a launch run in no order. The interpreter runs them one after the other and would hide it if
one needed another's result, or if two wrote to the same place. It would also read past the end of a tensor, whatever is
there. So every access is looked at: the address must lie in a tensor of the launch, a place has at most one writer, and
who reads a place that is written is its writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from triton.runtime import interpreter

from moefold.ops.kernels.interpret import interpreting

Program = tuple[int, int, int]
MANY: Program = (-1, -1, -1)


class Watch:
    """What the programs of one launch did; ``launches`` counts those that were looked at."""

    def __init__(self) -> None:
        self.launches = 0
        self.start([])

    def start(self, extents: list[tuple[int, int]]) -> None:
        self.extents = extents
        self.readers: dict[int, Program] = {}
        self.writers: dict[int, Program] = {}

    def look(self, pointers: Any, mask: Any, me: Program, writes: bool) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        for address in pointers.data[mask.data].tolist():
            inside = any(low <= address and address + size <= high for low, high in self.extents)
            assert inside, f"program {me} {'writes' if writes else 'reads'} outside of every tensor of the launch"
            writer, reader = self.writers.get(address, me), self.readers.get(address, me)
            assert writer == me, f"programs {writer} and {me} meet at a place that the first one writes"
            if writes:
                assert reader == me, f"program {me} writes where {reader} reads"
                self.writers[address] = me
            else:
                self.readers[address] = me if reader == me else MANY


def extent(tensor: Tensor) -> tuple[int, int]:
    """From its first entry to behind its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@contextmanager
def watching() -> Iterator[Watch]:
    """Interpreted, and slower still: for small shapes."""
    watch, builder = Watch(), interpreter.InterpreterBuilder
    load, store, run = builder.create_masked_load, builder.create_masked_store, interpreter.GridExecutor.__call__

    def watched_run(executor: Any, *args: Any, **kwargs: Any) -> Any:
        watch.launches += 1
        watch.start([extent(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)])
        return run(executor, *args, **kwargs)

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        watch.look(pointers, mask, self.grid_idx, writes=False)
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.look(pointers, mask, self.grid_idx, writes=True)
        return store(self, pointers, value, mask, *rest)

    with (
        interpreting(),
        patch.object(interpreter.GridExecutor, "__call__", watched_run),
        patch.object(builder, "create_masked_load", watched_load),
        patch.object(builder, "create_masked_store", watched_store),
    ):
        yield watch
