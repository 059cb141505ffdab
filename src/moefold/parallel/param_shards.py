"""Which region of each global parameter this rank holds, once every cut has been made.

The blueprint says how tensor and expert parallelism cut a parameter; sharded data parallelism then cuts what is left
along one more dim. The result is always a box: one slice per dim of the global tensor. Initialisation fills that box,
the proof compares it, a checkpoint writes it.

What is left to add up after backward.

Sharded data parallelism has summed every gradient over the ranks that hold other batches. Some parameters are also
repeated on ranks that did *different* work with the *same* batch: norms, router and latent projections see only their
tensor-parallel rank's tokens; a head norm sees only its heads; the bias of a split expert is added on one rank only.
Each such repetition is listed in ``ParamShard.partial``, and one sum per group settles them all. A parameter that
several pipeline ranks hold, a tied embedding for one, is last: its holders add up what each of their stages asked of
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefold.blueprint.parameters import ParameterSpec, parameters
from moefold.blueprint.sharding import grid_of, local_slices, partial_axes, shard_dim
from moefold.blueprint.stage_modules import Parts
from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.p2p import all_reduce_p2p
from moefold.comm.process_groups import Group, Groups
from moefold.config.model import ModelConfig

Box = tuple[slice, ...]

# The groups that sharded data parallelism uses, by the grid a parameter lives on: (copies, shards).
DATA_GROUPS = {"attention": ("dense_replicate", "dense_shard"), "expert": ("expert_replicate", "expert_shard")}


@dataclass(frozen=True)
class ParamShard:
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
    def is_primary(self) -> bool:
        return self.is_first_stage and all(group.index == 0 for group in self.copies)


def param_shards(model: ModelConfig, groups: Groups, parts_of_rank: Sequence[Parts]) -> dict[str, ParamShard]:
    """What this rank holds; ``parts_of_rank`` has the parts of every pipeline rank."""
    here = groups["pp"].index
    held = {}
    for spec in parameters(model):
        holders = tuple(rank for rank, parts in enumerate(parts_of_rank) if parts.holds(spec.name))
        if here in holders:
            held[spec.name] = _held(spec, groups, holders)
    return held


def _held(spec: ParameterSpec, groups: Groups, holders: tuple[int, ...]) -> ParamShard:
    cut = local_slices(spec, groups.layout, groups.rank)
    replicate, shard = (groups[group] for group in DATA_GROUPS[grid_of(spec.name)])
    partial = tuple(groups[axis] for axis in partial_axes(spec))
    is_first = groups["pp"].index == holders[0]
    return ParamShard(spec.name, spec.shape, cut, _shard(cut, shard), (replicate, *partial), partial, holders, is_first)


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


def cut_parameters(model: nn.Module, held: dict[str, ParamShard]) -> None:
    """Replace every parameter of a model on the meta device by one of this rank's size."""
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        sizes = [part.stop - part.start for part in held[name].cut]
        empty = torch.empty(sizes, dtype=parameter.dtype, device=parameter.device)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(empty))


@torch.no_grad()
def finish_gradients(model: nn.Module, held: dict[str, ParamShard], pp: Group) -> dict[str, Tensor]:
    """Sum partial gradients; returns this rank's part of every gradient by name."""
    gradients = {name: local_gradient(name, parameter) for name, parameter in model.named_parameters()}
    waiting: dict[str, tuple[Group, list[Tensor]]] = {}
    for name, gradient in gradients.items():
        for group in held[name].partial:
            waiting.setdefault(group.name, (group, []))[1].append(gradient)
    for group, parts in waiting.values():
        _sum_in_place(parts, group)
    for name, gradient in gradients.items():
        if len(held[name].stages) > 1:
            gradient.copy_(all_reduce_p2p(gradient, held[name].stages, pp))
    return gradients


def local_gradient(name: str, parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError(f"{name} got no gradient; every parameter takes part in every step, if only with zeros")
    return local_part(parameter.grad)


def _sum_in_place(parts: list[Tensor], group: Group) -> None:
    """One message for many small tensors."""
    if group.alone:
        return
    total = all_reduce_no_grad(torch.cat([part.flatten() for part in parts]), group)
    for part, summed in zip(parts, total.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed.view_as(part))
