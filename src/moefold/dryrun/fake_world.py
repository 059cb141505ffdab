"""A rank of a world that does not exist: fake tensors, and a process group that hallucinates its peers.

A fake tensor has a shape, a format and a device, and no memory: every operation runs, nothing is computed. The fake
process group accepts every collective and returns at once. So one process runs the code of rank R of N, whatever N is,
and no other process exists. Whatever would be *read* from a tensor must be known beforehand; torch raises otherwise.
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
from moefold.dryrun.fake_op_cache import Memory
from moefold.errors import MoefoldError
from moefold.parallel.ulysses import document_order

# Asked more often than everything else together.
_DEVICE = torch.ops.prim.device.default


class FakeMemory(FakeTensorMode):
    """Tensors without memory, with two answers that torch's own mode does not have, and a memory for the others."""

    def __init__(self) -> None:
        super().__init__()
        self._remembered = Memory(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and keeping the compiler out of every operation takes time."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: Sequence[Any], args: Any = (), kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        if op is _DEVICE:
            return args[0].fake_device
        if op is torch.ops.c10d.send.default:
            return has_left()
        if op is torch.ops.aten._grouped_mm.default:
            return _grouped_matmul(*args, **kwargs)
        ask = super().__torch_dispatch__
        return self._remembered.result(op, args, kwargs, lambda: ask(op, types, args, kwargs))


def has_left() -> Any:
    """Of the fake group's work nobody can say whether it is complete; a message to nowhere has left at once."""
    done: Future[None] = Future()
    done.set_result(None)
    return _create_work_from_future(done).boxed()


def _grouped_matmul(rows: Tensor, weight: Tensor, offs: Tensor, *rest: Any, **options: Any) -> Tensor:
    """torch's shape function takes bfloat16 only; the CPU's kernel takes more."""
    if weight.dim() == 3:
        return rows.new_empty(rows.shape[0], weight.shape[2])
    return rows.new_empty(offs.shape[0], rows.shape[0], weight.shape[1])


@contextmanager
def fake_world(world: int, rank: int) -> Iterator[None]:
    """Inside, this process is rank ``rank`` of ``world``, and the only one."""
    if dist.is_initialized():
        raise MoefoldError("a dry run plays a rank of its own, but this process is a rank of a real job already")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        _forget()
        yield
    finally:
        _forget()
        dist.destroy_process_group()


def _forget() -> None:
    """Functions that keep tensors from call to call must not carry them from one world into another."""
    for cached in (row_index, document_order):
        cached.cache_clear()


@torch.no_grad()
def give_fake_memory(model: nn.Module, device: torch.device) -> None:
    """What ``to_empty`` does for a model on the meta device; inside a fake mode."""
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
