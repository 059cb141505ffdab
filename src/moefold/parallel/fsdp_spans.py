"""Stamps on FSDP's own collectives, which torch starts: all-gathers and reduce-scatters per layer and microbatch.

torch lets a module have its own callables for both. These time torch's calls while a step is profiled, and only run
them otherwise. An all-reduce over replicas cannot be replaced: it lies between the end of the reduce-scatter and the
hook that torch calls after it, so these two are its stamps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from moefold.comm.process_groups import Group
from moefold.comm.spans import Stamp
from moefold.parallel.fsdp import AllToAllReduceScatter, FsdpSharding
from moefold.parallel.param_shards import DATA_GROUPS


def stamp_fsdp(sharding: FsdpSharding, device: str) -> None:
    """From now on the ledger's recorder, if there is one, sees FSDP's collectives.

    On a GPU the all-reduce over replicas is on a stream of its own, and is not stamped.
    """
    groups, once = sharding.groups, sharding.once
    experts = {id(module) for name, module in sharding.model.named_modules() if name.endswith(".experts")}
    for module in sharding.model.modules():
        if not isinstance(module, FSDPModule):
            continue
        replicate, shard = (groups[name] for name in DATA_GROUPS["expert" if id(module) in experts else "attention"])
        if not shard.alone:
            module.set_custom_all_gather(StampedAllGather(shard))  # type: ignore[arg-type]
        if not once and not (shard.alone and replicate.alone):
            stamped = StampedReduceScatter(shard, replicate, sharding.dtypes.parts is not None)
            module.set_custom_reduce_scatter(stamped)  # type: ignore[arg-type]
            if not replicate.alone and device == "cpu":
                module.set_all_reduce_hook(stamped.after_all_reduce)


def _all_gather(*given: object, **named: object) -> object:
    """torch 2.13 has another name for it, and warns about the old one."""
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(*given, **named)


def _reduce_scatter(*given: object, **named: object) -> object:
    return getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(*given, **named)


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class StampedAllGather(_Allocates):
    """It has the interface of torch's ``AllGather``, which has no public name."""

    def __init__(self, shard: Group) -> None:
        self.shard = shard

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> object:
        if self.shard.ledger.spans is None or async_op:
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        with self.shard.stamped("all_gather", input_tensor):
            return _all_gather(output_tensor, input_tensor, group=group)


class StampedReduceScatter(_Allocates):
    """``in_parts``: parts are sent in bfloat16 by an all-to-all (`fsdp.AllToAllReduceScatter`)."""

    def __init__(self, shard: Group, replicate: Group, in_parts: bool) -> None:
        self.shard, self.replicate = shard, replicate
        self.run: Callable[..., object] = AllToAllReduceScatter() if in_parts else _reduce_scatter
        self._stamp: tuple[int, Stamp] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Of a shard of one rank nothing is scattered: the all-reduce follows the allocation of its buffer."""
        buffer = super().allocate(size, dtype=dtype, device=device)
        spans = self.shard.ledger.spans
        if self.shard.alone and spans is not None:
            self._stamp = self.replicate.stamp(spans, "all_reduce", buffer), spans.clock.now()
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> object:
        spans = self.shard.ledger.spans
        if spans is None or async_op:
            return self.run(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        with self.shard.stamped("reduce_scatter", input_tensor):
            done = self.run(output_tensor, input_tensor, group=group, op=op)
        if not self.replicate.alone:
            self._stamp = self.replicate.stamp(spans, "all_reduce", output_tensor), spans.clock.now()
        return done

    def after_all_reduce(self, summed: Tensor) -> None:
        spans = self.shard.ledger.spans
        if spans is not None and self._stamp is not None:
            spans.add("comm", f"all_reduce {self.replicate.name}", self._stamp[1], (self._stamp[0],))
        self._stamp = None
