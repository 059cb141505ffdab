"""Which shard of each global parameter this rank holds, and the reductions its gradient needs beyond FSDP's.

The blueprint says how tensor and expert parallelism shard a parameter; FSDP then shards the rest along one more dim.
The result is always a box: one slice per dim of the global tensor. Initialisation fills that box, the proof compares
it, a checkpoint writes it.

FSDP sums every gradient over the ranks that hold other batches. Some parameters are also replicated on ranks that did
*different* work with the *same* batch: norms, router and latent projections see only their tensor-parallel rank's
tokens; a head norm sees only its heads; the bias of a split expert is added on one rank only. Each such group is in
``ParamShard.partial_groups``, and ``finish_gradients`` all-reduces them per group, in buckets. Last come parameters on
several pipeline ranks, such as a tied embedding: their gradients are summed over these ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefold.blueprint.flat_layout import fill_buckets
from moefold.blueprint.parameters import ParameterSpec, parameters
from moefold.blueprint.sharding import chunk_box, grid_of, local_slices, partial_axes
from moefold.blueprint.stage_modules import Parts
from moefold.comm.p2p import all_reduce_p2p
from moefold.comm.process_groups import Group, Groups
from moefold.config.model import ModelConfig
from moefold.parallel.gradient_buckets import all_reduce_bucket

Box = tuple[slice, ...]

# The groups that FSDP uses, by the parameter's grid: (replicate, shard).
DATA_GROUPS = {"attention": ("dense_replicate", "dense_shard"), "expert": ("expert_replicate", "expert_shard")}


@dataclass(frozen=True)
class ParamShard:
    """This rank's shard of one parameter."""

    name: str
    # What the tensor is for, as the blueprint says (``ParameterSpec.kind``).
    kind: str
    shape: tuple[int, ...]
    # The rank's shard under tensor and expert parallelism (what FSDP unshards to), and its shard under FSDP as well.
    unsharded_box: Box
    box: Box
    # Groups over which this shard is replicated: exactly one of their ranks is primary, and counts in norms and files.
    replica_groups: tuple[Group, ...]
    # Groups whose ranks hold partial gradients of the same shard, beyond data parallelism: these are all-reduced.
    partial_groups: tuple[Group, ...]
    # The pipeline ranks that have this parameter, and whether this rank is the first of them.
    pp_ranks: tuple[int, ...]
    is_first_pp_rank: bool

    @property
    def is_primary(self) -> bool:
        return self.is_first_pp_rank and all(group.index == 0 for group in self.replica_groups)


@dataclass(frozen=True)
class TrainedPiece:
    """What the optimizer updates of one parameter on this rank, and where its elements lie in the global tensor.

    Under FSDP, ``parameter`` is the model's own, a DTensor or a plain tensor, and holds one box. In flat sharding it is
    a range of this rank's flat main weights: one dim, and several boxes one after the other, each in row-major order.
    """

    parameter: nn.Parameter
    shard: ParamShard
    boxes: tuple[Box, ...]

    @property
    def name(self) -> str:
        return self.shard.name

    @property
    def kind(self) -> str:
        return self.shard.kind

    @property
    def is_primary(self) -> bool:
        return self.shard.is_primary

    @property
    def starts_tensor(self) -> bool:
        """Whether it has the first element of the global tensor; one piece of each parameter does, per replica."""
        first = self.boxes[0]
        return all(part.start == 0 < part.stop for part in first)

    def by_box(self, values: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Each box with its elements in ``values``, a tensor of the parameter's layout; views in the box's shape."""
        local, start = local_part(values), 0
        if len(self.boxes) == 1 and local.dim() == len(self.boxes[0]):
            yield self.boxes[0], local
            return
        for box in self.boxes:
            sizes = [part.stop - part.start for part in box]
            yield box, local[start : start + prod(sizes)].view(sizes)
            start += prod(sizes)


def build_param_shards(model: ModelConfig, groups: Groups, parts_of_rank: Sequence[Parts]) -> dict[str, ParamShard]:
    """This rank's shards by parameter name; ``parts_of_rank`` has the modules of every pipeline rank."""
    param_shards = {}
    for spec in parameters(model):
        pp_ranks = tuple(rank for rank, parts in enumerate(parts_of_rank) if parts.holds(spec.name))
        if groups["pp"].index in pp_ranks:
            param_shards[spec.name] = _param_shard(spec, groups, pp_ranks)
    return param_shards


def _param_shard(spec: ParameterSpec, groups: Groups, pp_ranks: tuple[int, ...]) -> ParamShard:
    unsharded_box = local_slices(spec, groups.layout, groups.rank)
    replicate, shard = (groups[group] for group in DATA_GROUPS[grid_of(spec.name)])
    partial = tuple(groups[axis] for axis in partial_axes(spec))
    return ParamShard(
        spec.name,
        spec.kind,
        spec.shape,
        unsharded_box,
        chunk_box(unsharded_box, shard.index, shard.size),
        replica_groups=(replicate, *partial),
        partial_groups=partial,
        pp_ranks=pp_ranks,
        is_first_pp_rank=groups["pp"].index == pp_ranks[0],
    )


def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def resize_to_local(
    model: nn.Module, param_shards: dict[str, ParamShard], frozen: Mapping[str, torch.dtype] | None = None
) -> None:
    """Replace every parameter of a model on the meta device by one of this rank's size under tp and ep.

    ``frozen``: dtypes of parameters that are not trained.
    """
    frozen = frozen or {}
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        sizes = [part.stop - part.start for part in param_shards[name].unsharded_box]
        empty = torch.empty(sizes, dtype=frozen.get(name, parameter.dtype), device=parameter.device)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(empty, requires_grad=name not in frozen))


@torch.no_grad()
def finish_gradients(gradients: dict[str, Tensor], param_shards: dict[str, ParamShard], pp: Group, bucket: int) -> None:
    """All-reduce partial gradients, in place and in buckets of ``bucket`` bytes. ``gradients`` are this rank's shards.

    Ranks of one partial group, and pipeline ranks that share a parameter, have the same elements of it.
    """
    by_group: dict[str, tuple[Group, dict[str, int]]] = {}
    for name, gradient in gradients.items():
        for group in param_shards[name].partial_groups:
            by_group.setdefault(group.name, (group, {}))[1][name] = gradient.nbytes
    for group, sizes in by_group.values():
        for names in fill_buckets(sizes, bucket):
            all_reduce_bucket([gradients[name] for name in names], group)
    for name, gradient in gradients.items():
        if len(param_shards[name].pp_ranks) > 1:
            gradient.copy_(all_reduce_p2p(gradient, param_shards[name].pp_ranks, pp))


def local_gradient(name: str, parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError(f"{name} has no gradient; every parameter must get one in every step, zeros included")
    return local_part(parameter.grad)
