"""A cache of the results of operations on fake tensors.

A step repeats the same few hundred operations for every layer and microbatch, and torch infers their results each time,
at a quarter of a millisecond each. A result's metadata follows from the operation, the shapes, strides and dtypes of
its tensors, and its other arguments. So it is inferred once and then built from the cache: a new tensor, a view of an
argument, or the argument itself. Results of any other form are not cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Unhashable(Exception):
    """Arguments that cannot be a cache key."""


class _Same(NamedTuple):
    """The argument with this index."""

    source: int


class _Made(NamedTuple):
    """A tensor with this metadata, in the storage of argument ``source``, or in a new one."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    source: int | None


class FakeOpCache:
    """Results by operation and arguments."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._results: dict[Any, tuple[type | None, list[_Same | _Made]] | None] = {}

    def result(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], infer: Callable[[], Any]) -> Any:
        """From the cache, or else by ``infer``."""
        if op.namespace != "aten":
            return infer()
        try:
            key = (op, _key(args), _key(tuple(kwargs.items())) if kwargs else None)
        except Unhashable:
            return infer()
        if key not in self._results:
            result = infer()
            # An operation that reshapes its argument in place has an effect beyond its result: not cached.
            unchanged = key[1] == _key(args)
            given = [*_tensors(args), *_tensors(kwargs.values())]
            self._results[key] = _described(result, given) if unchanged else None
            return result
        found = self._results[key]
        return infer() if found is None else self._rebuild(*found, args, kwargs)

    def _rebuild(
        self, kind: type | None, parts: list[_Same | _Made], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if any(part.source is not None for part in parts):
            given = [*_tensors(args), *_tensors(kwargs.values())]
        else:
            given = []
        made = [given[part.source] if isinstance(part, _Same) else self._make(part, given) for part in parts]
        return made[0] if kind is None else kind(made)

    def _make(self, part: _Made, given: list[Tensor]) -> Tensor:
        if part.source is None:
            bare = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="meta")
        else:
            bare = torch.empty(0, dtype=part.dtype, device="meta")
            bare.set_(given[part.source].untyped_storage(), part.offset, part.shape, part.stride)  # type: ignore[call-overload]
        return FakeTensor(self.mode, bare, torch.device("cpu"))


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        # torch propagates constant values itself.
        if not isinstance(value, FakeTensor) or value.constant is not None:
            raise Unhashable
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if isinstance(value, (tuple, list)):
        return tuple([_key(part) for part in value])
    if isinstance(value, _PLAIN):
        # 1, 1.0 and True are equal as keys but different as arguments.
        return type(value), value
    raise Unhashable


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _described(result: Any, given: list[Tensor]) -> tuple[type | None, list[_Same | _Made]] | None:
    """None if it cannot be rebuilt from metadata."""
    if isinstance(result, Tensor):
        kind, parts = None, [result]
    elif type(result) in (tuple, list) and result and all(isinstance(part, Tensor) for part in result):
        kind, parts = type(result), list(result)
    else:
        return None
    described = [_describe(part, given) for part in parts]
    own = [part.untyped_storage()._cdata for part, made in zip(parts, described) if not _borrows(made)]
    if None in described or len(set(own)) < len(own):
        return None
    return kind, [made for made in described if made is not None]


def _borrows(made: _Same | _Made | None) -> bool:
    return made is not None and made.source is not None


def _describe(part: Tensor, given: list[Tensor]) -> _Same | _Made | None:
    if type(part) is not FakeTensor or part.constant is not None or part.fake_device.type != "cpu":
        return None
    address = part.untyped_storage()._cdata
    for number, tensor in enumerate(given):
        if tensor is part:
            return _Same(number)
        if tensor.untyped_storage()._cdata == address:
            return _Made(part.shape, part.stride(), part.dtype, int(part.storage_offset()), number)
    spans = 1 + sum((size - 1) * step for size, step in zip(part.shape, part.stride())) if part.numel() else 0
    whole = part.storage_offset() == 0 and part.untyped_storage().nbytes() == spans * part.element_size()
    return _Made(part.shape, part.stride(), part.dtype, 0, None) if whole else None
