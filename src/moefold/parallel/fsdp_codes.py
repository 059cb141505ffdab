"""Weights that FSDP2 gathers as codes of one byte (``precision.gather: narrow``), through its all-gather extensions.

FSDP asks the local tensor of a sharded parameter what to send (``fsdp_pre_all_gather``) and what the gathered bytes are
(``fsdp_post_all_gather``). ``CodedShard`` is a local tensor that sends codes; the gathered parameter is FP8.

A shard may end inside of a block. So once per update, before the first gather, the largest magnitudes of all blocks are
maximised over the ranks that share the weights (one all-reduce for dense weights, one for experts), every rank computes
the same scales, and each narrows its shards. All gathers until the next update send these codes; scales are not sent.

Codes and scales are those of the whole weight narrowed in one process, and go to matmuls as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from moefold.blueprint.sharding import grid_of, shard_dim
from moefold.comm.collectives import all_reduce_max
from moefold.comm.process_groups import Group, Groups
from moefold.config.casts import Cast
from moefold.parallel.param_shards import DATA_GROUPS, Box, ParamShard, local_part
from moefold.precision.operands import NarrowWeights
from moefold.precision.quantize import FLOAT8, Quantized
from moefold.precision.quantize_parts import codes_of, merge_amax, scales_of


@dataclass(eq=False)
class ShardCodes:
    """Of one parameter: ``box`` is this rank's part of what a gather gives, which has ``shape``."""

    name: str
    owner: nn.Module
    leaf: str
    cast: Cast
    shape: tuple[int, ...]
    box: Box
    # Scales of all blocks, and codes of this rank's part, as bytes; None until they were narrowed.
    scale: Tensor | None = None
    codes: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return any(part.start == part.stop for part in self.box)


class CodedShard(Tensor):
    """A shard that FSDP gathers as codes. Operations by which FSDP and modules replace it keep the class; others give
    plain tensors."""

    shard: ShardCodes

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, values: Tensor, shard: ShardCodes) -> CodedShard:
        made = values.as_subclass(cls)
        made.shard = shard
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        with torch._C._DisableTorchDispatch():
            found = func(*args, **(kwargs or {}))
            if func in _KEPT and isinstance(args[0], cls) and isinstance(found, Tensor):
                return cls.of(found, args[0].shard)
        return found

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: object,
    ) -> tuple[tuple[Tensor, ...], None]:
        """FSDP pads the shards of the last ranks along the first dim."""
        shard = self.shard
        if shard.codes is None:
            raise RuntimeError(f"{shard.name} is gathered as codes, but was not narrowed since it changed")
        dim, ways = shard_dim(shard.shape, mesh.size()), mesh.size()
        missing = -(-shard.shape[dim] // ways) - shard.codes.shape[dim]
        if not missing:
            return (shard.codes,), None
        return (F.pad(shard.codes, (0, 0) * (len(shard.shape) - 1) + (0, missing)),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The first time; later FSDP fills the same memory, which the parameter is a view of."""
        if out is not None:
            return None
        shape = self.shard.shape
        codes = outputs[0].view(-1)[: prod(shape)].view(FLOAT8[self.shard.cast.element])
        return codes.view(shape), ()


_KEPT = {
    torch.ops.aten.detach.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.slice.Tensor,
}


@dataclass
class CodedShards:
    """All of a rank, by the group that shares their blocks."""

    by_group: dict[str, tuple[Group, list[ShardCodes]]]
    narrow_weights: NarrowWeights
    stale: bool = True
    # Sharded parameters, by name.
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    def allocated(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())

    def weights_changed(self) -> None:
        self.stale = True
        for _, shards in self.by_group.values():
            for shard in shards:
                shard.codes = None

    @torch.no_grad()
    def narrow(self) -> None:
        """What has changed; all ranks of a group must call it."""
        if not self.stale:
            return
        for group, shards in self.by_group.values():
            self._narrow(group, shards)
        self.stale = False

    def _narrow(self, group: Group, shards: Sequence[ShardCodes]) -> None:
        values = {shard.name: local_part(self.parameters[shard.name]) for shard in shards}
        shapes = [shard.cast.scale_shape(shard.shape) for shard in shards]
        sizes = [prod(shape) for shape in shapes]
        flat = torch.zeros(sum(sizes), device=next(iter(values.values())).device)
        parts = zip(shards, flat.split(sizes), shapes, strict=True)
        for shard, amax, shape in parts:
            merge_amax(amax.view(shape), values[shard.name], shard.box, shard.cast)
        flat = all_reduce_max(flat, group)
        for shard, amax, shape in zip(shards, flat.split(sizes), shapes, strict=True):
            scale, encode = scales_of(amax.view(shape), shard.cast)
            # In place, because matmuls have it.
            shard.scale = scale if shard.scale is None else shard.scale.copy_(scale)
            mine = values[shard.name]
            if shard.is_empty:
                shard.codes = torch.empty(mine.shape, dtype=torch.uint8, device=mine.device)
            else:
                shard.codes = codes_of(mine, shard.box, encode, shard.cast).view(torch.uint8).contiguous()

    def inside(self, module: nn.Module) -> list[ShardCodes]:
        owners = set(module.modules())
        return [shard for _, shards in self.by_group.values() for shard in shards if shard.owner in owners]

    def offer(self, shards: Sequence[ShardCodes], module: object = None, inputs: object = None) -> None:
        """Gathered codes to the matmuls; also a hook of modules, called after FSDP's own."""
        for shard in shards:
            parameter = shard.owner._parameters[shard.leaf]
            if parameter is not None and not isinstance(parameter, DTensor):
                assert shard.scale is not None
                self.narrow_weights.gathered(parameter, Quantized(parameter.detach(), shard.scale, None, shard.cast))


def coded_shards(
    model: nn.Module,
    groups: Groups,
    param_shards: Mapping[str, ParamShard],
    casts: Mapping[str, Cast],
    narrow_weights: NarrowWeights | None,
) -> CodedShards | None:
    """Replaces the parameters of a model on the meta device that FSDP is to gather as codes."""
    by_group: dict[str, tuple[Group, list[ShardCodes]]] = {}
    for name, cast in casts.items():
        if name not in param_shards:
            continue
        replicate, shard = (groups[each] for each in DATA_GROUPS[grid_of(name)])
        # FSDP leaves these alone; they are narrowed where they are used.
        if replicate.alone and shard.alone:
            continue
        path, _, leaf = name.rpartition(".")
        owner, here = model.get_submodule(path), param_shards[name]
        corner = here.unsharded_box
        box = tuple(
            slice(part.start - first.start, part.stop - first.start)
            for part, first in zip(here.box, corner, strict=True)
        )
        parameter = owner.get_parameter(leaf)
        codes = ShardCodes(name, owner, leaf, cast, tuple(parameter.shape), box)
        setattr(owner, leaf, nn.Parameter(CodedShard.of(parameter.detach(), codes)))
        by_group.setdefault(shard.name, (shard, []))[1].append(codes)
    if not by_group:
        return None
    assert narrow_weights is not None
    return CodedShards(by_group, narrow_weights)
