"""Which region of each global parameter this rank holds, once every cut has been made.

The blueprint says how tensor and expert parallelism cut a parameter; sharded data parallelism then cuts what is left
along one more dim. The result is always a box: one slice per dim of the global tensor. Initialisation fills that box,
the proof compares it, a checkpoint writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefold.blueprint.parameters import ParameterSpec, parameters
from moefold.blueprint.parts import Parts
from moefold.blueprint.sharding import grid_of, local_slices, partial_axes, shard_dim
from moefold.comm.process_groups import Group, Groups
from moefold.config.model import ModelConfig

Box = tuple[slice, ...]

# The groups that sharded data parallelism uses, by the grid a parameter lives on: (copies, shards).
DATA_GROUPS = {"attention": ("dense_replicate", "dense_shard"), "expert": ("expert_replicate", "expert_shard")}


@dataclass(frozen=True)
class Held:
    """This rank's part of one parameter."""

    name: str
    shape: tuple[int, ...]
    # The part that tensor and expert parallelism leave to this rank, and the part of that which it keeps at rest.
    cut: Box
    box: Box
    # Groups over which this part is repeated: exactly one of their ranks speaks for it when things are added up.
    copies: tuple[Group, ...]
    # Groups whose ranks feed the same parameter with different work, beyond data parallelism: gradients must be summed.
    partial: tuple[Group, ...]
    # The pipeline ranks that hold this parameter, and whether this rank is the first of them.
    stages: tuple[int, ...]
    is_first_stage: bool

    @property
    def speaks(self) -> bool:
        return self.is_first_stage and all(group.index == 0 for group in self.copies)


def held_parameters(model: ModelConfig, groups: Groups, parts_of_rank: Sequence[Parts]) -> dict[str, Held]:
    """What this rank holds; ``parts_of_rank`` has the parts of every pipeline rank."""
    here = groups["pp"].index
    held = {}
    for spec in parameters(model):
        holders = tuple(rank for rank, parts in enumerate(parts_of_rank) if parts.holds(spec.name))
        if here in holders:
            held[spec.name] = _held(spec, groups, holders)
    return held


def _held(spec: ParameterSpec, groups: Groups, holders: tuple[int, ...]) -> Held:
    cut = local_slices(spec, groups.layout, groups.rank)
    replicate, shard = (groups[group] for group in DATA_GROUPS[grid_of(spec.name)])
    partial = tuple(groups[axis] for axis in partial_axes(spec))
    is_first = groups["pp"].index == holders[0]
    return Held(spec.name, spec.shape, cut, _shard(cut, shard), (replicate, *partial), partial, holders, is_first)


def _shard(cut: Box, shard: Group) -> Box:
    """Cut the box along the dim the blueprint picks, in chunks as torch cuts them: full ones first, then the rest."""
    sizes = tuple(part.stop - part.start for part in cut)
    dim = shard_dim(sizes, shard.size)
    chunk = -(-sizes[dim] // shard.size)
    start = min(chunk * shard.index, sizes[dim])
    stop = min(start + chunk, sizes[dim])
    first = cut[dim].start
    return (*cut[:dim], slice(first + start, first + stop), *cut[dim + 1 :])


def local_part(tensor: Tensor) -> Tensor:
    """The numbers this rank really has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_parameters(model: nn.Module, held: dict[str, Held]) -> None:
    """Replace every parameter of a model on the meta device by one of this rank's size."""
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        sizes = [part.stop - part.start for part in held[name].cut]
        empty = torch.empty(sizes, dtype=parameter.dtype, device=parameter.device)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(empty))
