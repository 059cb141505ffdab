"""One rank of a fake world: fake tensors and torch's fake process group.

A fake tensor has a shape, a dtype and a device, and no memory: every operation runs, nothing is computed. The fake
process group accepts every collective and returns at once. So one process runs the code of rank R of N, whatever N is.
Values that training would *read* from a tensor must be known beforehand; torch raises otherwise.

A step repeats the same few hundred operations for every layer and microbatch, and torch infers their results each time,
at a quarter of a millisecond each. A result's metadata follows from the operation, the shapes, strides and dtypes of
its tensors, and its other arguments. So it is inferred once and then built from a cache: a new tensor, a view of an
argument, or the argument itself. Results of any other form are not cached.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefold.attention.mask_blocks import row_index
from moefold.errors import MoefoldError
from moefold.parallel.ulysses import chunk_order, document_order

# Called more often than all other operations together.
_DEVICE = torch.ops.prim.device.default


class CachedFakeMode(FakeTensorMode):
    """torch's fake mode with results for two more operations, and a cache for the others."""

    def __init__(self) -> None:
        super().__init__()
        self._cache = FakeOpCache(self)

    @property
    def avoid_device_init(self) -> bool:
        """No real memory on a GPU, even where torch believes that there is one."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and disabling dynamo for every operation takes time."""
        return False

    def __torch_dispatch__(
        self, op: OpOverload, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> object:
        if op is _DEVICE:
            return args[0].fake_device
        if op is torch.ops.c10d.send.default:
            return completed_work()
        if op is torch.ops.aten._grouped_mm.default and args[0].device.type == "cpu":
            return _grouped_matmul(*args, **kwargs)
        infer = super().__torch_dispatch__
        return self._cache.result(op, args, kwargs, lambda: infer(op, types, args, kwargs))


def completed_work() -> Any:
    """A handle that is complete; that of the fake group's ``send`` does not support ``is_completed``."""
    done: Future[None] = Future()
    done.set_result(None)
    return _create_work_from_future(done).boxed()


def _grouped_matmul(rows: Tensor, weight: Tensor, offs: Tensor, *rest: object, **options: object) -> Tensor:
    """On a CPU. torch's meta function is that of GPUs and takes bfloat16 only; the CPU kernel takes more dtypes."""
    if weight.dim() == 3:
        return rows.new_empty(rows.shape[0], weight.shape[2])
    return rows.new_empty(offs.shape[0], rows.shape[0], weight.shape[1])


@contextmanager
def fake_world(world: int, rank: int) -> Iterator[None]:
    """Inside, this process is rank ``rank`` of ``world``, and the only one."""
    if dist.is_initialized():
        raise MoefoldError("a dry run needs a process group of its own, but this process is a rank of a job already")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        _clear_caches()
        yield
    finally:
        _clear_caches()
        dist.destroy_process_group()


def _clear_caches() -> None:
    """Cached functions must not return tensors of another world."""
    for cached in (row_index, document_order, chunk_order):
        cached.cache_clear()


@torch.no_grad()
def materialize_fake(model: nn.Module, device: torch.device) -> None:
    """`Module.to_empty` for a model on the meta device, inside a fake mode."""
    for name, parameter in list(model.named_parameters()):
        owner, leaf = _owner(model, name)
        setattr(owner, leaf, nn.Parameter(_empty_as(parameter, device), parameter.requires_grad))
    for name, buffer in list(model.named_buffers()):
        owner, leaf = _owner(model, name)
        setattr(owner, leaf, _empty_as(buffer, device))


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf


def _empty_as(tensor: Tensor, device: torch.device) -> Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return DTensor.from_local(
        _empty_as(tensor._local_tensor, device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


# ---- results of operations, cached ----

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
    device: torch.device
    offset: int
    source: int | None


class FakeOpCache:
    """Results by operation and arguments."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._results: dict[Hashable, tuple[type | None, list[_Same | _Made]] | None] = {}

    def result(
        self, op: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], infer: Callable[[], object]
    ) -> object:
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
        self, kind: type | None, parts: list[_Same | _Made], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
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
        return FakeTensor(self.mode, bare, part.device)


def _key(value: object) -> Hashable:
    if isinstance(value, Tensor):
        # torch propagates constant values itself.
        if not isinstance(value, FakeTensor) or value.constant is not None:
            raise Unhashable
        return value.shape, value.stride(), value.dtype, value.fake_device, value.storage_offset()
    if isinstance(value, (tuple, list)):
        return tuple([_key(part) for part in value])
    if isinstance(value, _PLAIN):
        # 1, 1.0 and True are equal as keys but different as arguments.
        return type(value), value
    raise Unhashable


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _described(result: object, given: list[Tensor]) -> tuple[type | None, list[_Same | _Made]] | None:
    """None if it cannot be rebuilt from metadata."""
    kind: type | None = None
    if isinstance(result, (tuple, list)) and type(result) in (tuple, list):
        kind, parts = type(result), [part for part in result if isinstance(part, Tensor)]
        if not parts or len(parts) < len(result):
            return None
    elif isinstance(result, Tensor):
        parts = [result]
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
    if type(part) is not FakeTensor or part.constant is not None:
        return None
    address = part.untyped_storage()._cdata
    for number, tensor in enumerate(given):
        if tensor is part:
            return _Same(number)
        if tensor.untyped_storage()._cdata == address:
            return _Made(part.shape, part.stride(), part.dtype, part.fake_device, int(part.storage_offset()), number)
    spans = 1 + sum((size - 1) * step for size, step in zip(part.shape, part.stride())) if part.numel() else 0
    whole = part.storage_offset() == 0 and part.untyped_storage().nbytes() == spans * part.element_size()
    return _Made(part.shape, part.stride(), part.dtype, part.fake_device, 0, None) if whole else None
