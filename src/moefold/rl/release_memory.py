"""Give the memory of a model back while another engine needs it, and take it again.

Parameters, optimizer states and buffers are copied to the host (pinned memory where the device is a GPU), and their
storages are resized to 0 bytes. Views, DTensors and optimizers keep pointing at the same storages, so nothing has to be
rebuilt: `restore` resizes them again and copies the bytes back. Gradients are not kept. Optimizer states may be dropped
instead of copied: then the optimizer starts again as before its first update.

A storage is released once, however many tensors are views of it: flat sharding has all weights of a bucket in one.

A `Snapshot` is a copy of the same bytes of weights that stays on the host, and can be put in their place for a while:
log-probs of a reference policy, without a second model on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.flat_sharding import FlatSharding
from moefold.parallel.fsdp import reshard_all
from moefold.parallel.parallelize import LocalModel
from moefold.parallel.param_shards import local_part

Kind = Literal["parameters", "optimizer", "gradients", "buffers"]
KINDS: tuple[Kind, ...] = ("parameters", "optimizer", "gradients", "buffers")
# What a forward needs.
WEIGHTS: tuple[Kind, ...] = ("parameters", "buffers")


@dataclass(frozen=True)
class Saved:
    """A storage of 0 bytes, the bytes that it had, and their copy on the host; None where they were dropped."""

    storage: torch.UntypedStorage
    nbytes: int
    copy: Tensor | None


@dataclass(frozen=True)
class Released:
    """The storages of one kind, and the bytes of tensors that were freed as a whole."""

    kind: Kind
    saved: tuple[Saved, ...]
    freed: int = 0

    @property
    def nbytes(self) -> int:
        """Given back on the device."""
        return self.freed + sum(each.nbytes for each in self.saved)

    @torch.no_grad()
    def restore(self) -> None:
        for storage, nbytes, copy in ((each.storage, each.nbytes, each.copy) for each in self.saved):
            storage.resize_(nbytes)
            if copy is not None:
                _bytes_of(storage).copy_(copy)
            else:
                _bytes_of(storage).zero_()


@dataclass(frozen=True)
class Snapshot:
    """Storages of weights, and bytes on the host that they can have instead."""

    storages: tuple[torch.UntypedStorage, ...]
    copies: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(copy.numel() for copy in self.copies)

    @contextmanager
    def in_place(self, model: torch.nn.Module) -> Iterator[None]:
        """Inside, the weights are these; then again those that they were before."""
        reshard_all(model)
        own = tuple(map(_copied, self.storages))
        self._write(self.copies)
        try:
            yield
        finally:
            reshard_all(model)
            self._write(own)

    @torch.no_grad()
    def _write(self, copies: Iterable[Tensor]) -> None:
        for storage, copy in zip(self.storages, copies, strict=True):
            _bytes_of(storage).copy_(copy)


@torch.no_grad()
def take_snapshot(local_model: LocalModel, optimizer: ModelOptimizer) -> Snapshot:
    """Of parameters and buffers."""
    reshard_all(local_model.model)
    tensors = [tensor for kind in WEIGHTS for tensor in tensors_of_kind(local_model, optimizer, kind)]
    storages = tuple(_storages(tensors))
    return Snapshot(storages, tuple(map(_copied, storages)))


@torch.no_grad()
def release(local_model: LocalModel, optimizer: ModelOptimizer, kind: Kind, *, drop: bool = False) -> Released:
    """Of one kind. ``drop``: without a copy, for the optimizer's states only; gradients never have one."""
    reshard_all(local_model.model)
    freed = 0
    if kind == "gradients":
        members = list(_without_flat_gradients(local_model))
        gradients = [local_part(member.grad) for member in members if member.grad is not None]
        freed = sum(storage.nbytes() for storage in _storages(gradients))
        for member in members:
            member.grad = None
    elif kind == "optimizer" and drop:
        freed = sum(storage.nbytes() for storage in _storages(tensors_of_kind(local_model, optimizer, kind)))
        for piece in local_model.pieces():
            optimizer.forget(piece.parameter)
    saved = tuple(_release(storage, kind) for storage in _storages(tensors_of_kind(local_model, optimizer, kind)))
    if local_model.device.type == "cuda":
        # Else the allocator would keep the blocks for this process.
        torch.cuda.empty_cache()
    return Released(kind, saved, freed)


def tensors_of_kind(local_model: LocalModel, optimizer: ModelOptimizer, kind: Kind) -> Iterator[Tensor]:
    """On the device; states in the host's memory are not on it."""
    sharding, model = local_model.sharding, local_model.model
    if kind == "parameters":
        yield from (local_part(parameter.detach()) for parameter in model.parameters())
        yield from (local_part(piece.parameter.detach()) for piece in local_model.pieces())
    elif kind == "buffers":
        yield from model.buffers()
    elif kind == "optimizer":
        for state in optimizer.state.values():
            values = (local_part(value) for value in state.values() if isinstance(value, Tensor))
            yield from (value for value in values if value.device == local_model.device or value.is_meta)
    elif isinstance(sharding, FlatSharding):
        yield from (bucket.gradients for bucket in sharding.buckets)


def _without_flat_gradients(local_model: LocalModel) -> Iterator[torch.nn.Parameter]:
    """Gradients of flat sharding are views of its buckets, and stay there."""
    if not isinstance(local_model.sharding, FlatSharding):
        yield from local_model.model.parameters()
    yield from (piece.parameter for piece in local_model.pieces())


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def _release(storage: torch.UntypedStorage, kind: Kind) -> Saved:
    nbytes, copy = storage.nbytes(), None
    if kind != "gradients":
        copy = _copied(storage)
    storage.resize_(0)
    return Saved(storage, nbytes, copy)


def _copied(storage: torch.UntypedStorage) -> Tensor:
    """Its bytes, on the host."""
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return copy.copy_(_bytes_of(storage))


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
