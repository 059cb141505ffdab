"""One rank of a fake world: fake tensors and torch's fake process group.

A fake tensor has a shape, a dtype and a device, and no memory: every operation runs, nothing is computed. The fake
process group accepts every collective and returns at once. So one process runs the code of rank R of N, whatever N is.
Values that training would *read* from a tensor must be known beforehand; torch raises otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefold.attention.mask_blocks import row_index
from moefold.dryrun.fake_op_cache import FakeOpCache
from moefold.errors import MoefoldError
from moefold.parallel.ulysses import document_order

# Called more often than all other operations together.
_DEVICE = torch.ops.prim.device.default


class CachedFakeMode(FakeTensorMode):
    """torch's fake mode with results for two more operations, and a cache for the others."""

    def __init__(self) -> None:
        super().__init__()
        self._cache = FakeOpCache(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and disabling dynamo for every operation takes time."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: Sequence[Any], args: Any = (), kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        if op is _DEVICE:
            return args[0].fake_device
        if op is torch.ops.c10d.send.default:
            return completed_work()
        if op is torch.ops.aten._grouped_mm.default:
            return _grouped_matmul(*args, **kwargs)
        infer = super().__torch_dispatch__
        return self._cache.result(op, args, kwargs, lambda: infer(op, types, args, kwargs))


def completed_work() -> Any:
    """A handle that is complete; that of the fake group's ``send`` does not support ``is_completed``."""
    done: Future[None] = Future()
    done.set_result(None)
    return _create_work_from_future(done).boxed()


def _grouped_matmul(rows: Tensor, weight: Tensor, offs: Tensor, *rest: Any, **options: Any) -> Tensor:
    """torch's meta function takes bfloat16 only; the CPU kernel takes more dtypes."""
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
    for cached in (row_index, document_order):
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
