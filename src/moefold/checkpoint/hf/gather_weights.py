"""From a sharded model in training to (HF name, full tensor), without disk.

This feeds an inference engine between steps of reinforcement learning. All ranks run the generator, and every rank gets
every tensor, one at a time. Shards are gathered in the reverse order of sharding: first over the data-parallel shards,
then over tensor and expert parallelism, each with one all_gather over its own group. Where HF files have one tensor per
expert, one expert of every rank is gathered at a time, so no rank ever has all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.blueprint.parameters import ParameterSpec, buffers, parameters
from moefold.blueprint.sharding import cuts, grid_of, shard_dim
from moefold.checkpoint.hf.config_maps import family_copies, family_rules
from moefold.checkpoint.hf.hf_config import family_of
from moefold.checkpoint.hf.name_rules import HfTensor, hf_copies, hf_tensors
from moefold.comm.collectives import all_gather_no_grad
from moefold.comm.process_groups import Group
from moefold.errors import ConversionError, Problem
from moefold.parallel.flat_sharding import FlatSharding
from moefold.parallel.parallelize import LocalModel
from moefold.parallel.param_shards import DATA_GROUPS, local_part


class _Gather(NamedTuple):
    """An all_gather along `dim`, with the size of each rank's shard."""

    group: Group
    dim: int
    sizes: tuple[int, ...]


def hf_weights(local_model: LocalModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """All weights by HF name, cast to ``dtype`` if given; collective, every rank must exhaust the generator."""
    model = local_model.run.model
    if local_model.groups.layout.size("pp") > 1:
        fix = "save a checkpoint and convert it"
        raise ConversionError(Problem("parallel.pp", "weights of pipeline stages cannot be gathered yet", fix))
    by_name: dict[str, list[HfTensor]] = {}
    family = family_of(model)
    for hf_tensor in (*hf_tensors(family_rules(family), model), *hf_copies(family_copies(family), model)):
        by_name.setdefault(hf_tensor.moefold_name, []).append(hf_tensor)
    live, sharding = dict(local_model.model.named_parameters()), local_model.sharding
    with torch.no_grad():
        for spec in parameters(model):
            if isinstance(sharding, FlatSharding):
                # Main weights, gathered over data-parallel ranks; the model's own may have a narrower format.
                shard = sharding.whole_main(spec.name)
            else:
                shard = local_part(live[spec.name].detach())
            for hf_tensor, gathered in _gathered(local_model, spec, shard, by_name[spec.name]):
                values = hf_tensor.to_hf(gathered)
                yield hf_tensor.hf_name, values if dtype is None else values.to(dtype)
        # Buffers are replicated.
        state = dict(local_model.model.named_buffers())
        for spec in buffers(model):
            for hf_tensor in by_name[spec.name]:
                yield hf_tensor.hf_name, hf_tensor.to_hf(state[spec.name].detach()[hf_tensor.index])


def _gathered(
    local_model: LocalModel, spec: ParameterSpec, shard: Tensor, tensors: list[HfTensor]
) -> Iterator[tuple[HfTensor, Tensor]]:
    gathers = _gathers(local_model, spec)
    if not all(hf_tensor.index for hf_tensor in tensors) or len(spec.shape) < 3 or grid_of(spec.name) != "expert":
        whole = _all_gather(shard, gathers)
        yield from ((hf_tensor, whole[hf_tensor.index]) for hf_tensor in tensors)
        return
    by_expert: dict[int, list[HfTensor]] = {}
    for hf_tensor in tensors:
        by_expert.setdefault(hf_tensor.index[0], []).append(hf_tensor)
    for experts, stacked in _expert_by_expert(shard, gathers):
        for expert_index, expert in zip(experts, stacked, strict=True):
            yield from ((hf_tensor, expert[hf_tensor.index[1:]]) for hf_tensor in by_expert[expert_index])


def _expert_by_expert(shard: Tensor, gathers: list[_Gather]) -> Iterator[tuple[list[int], Tensor]]:
    """For each j: expert j of every rank's shard, gathered, and their indices in the global tensor."""
    max_experts = next((max(gather.sizes) for gather in gathers if gather.dim == 0), shard.shape[0])
    for j in range(max_experts):
        # Empty on a rank with fewer experts.
        gathered, indices = shard[j : j + 1], [j]
        for gather in gathers:
            if gather.dim:
                gathered = _all_gather(gathered, [gather])
                continue
            counts = tuple(sum(n < size for n in indices) for size in gather.sizes)
            gathered = _all_gather(gathered, [gather._replace(sizes=counts)])
            starts = accumulate(gather.sizes, initial=0)
            indices = [start + n for start, size in zip(starts, gather.sizes) for n in indices if n < size]
        yield indices, gathered


def _gathers(local_model: LocalModel, spec: ParameterSpec) -> list[_Gather]:
    """The all_gathers that make this parameter whole, in order."""
    groups, param_shard = local_model.groups, local_model.param_shards[spec.name]
    sizes = [cut.stop - cut.start for cut in param_shard.unsharded_box]
    fsdp = groups[DATA_GROUPS[grid_of(spec.name)][1]]
    dim = shard_dim(tuple(sizes), fsdp.size)
    chunk = -(-sizes[dim] // fsdp.size)
    shard_sizes = tuple(max(0, min(chunk, sizes[dim] - i * chunk)) for i in range(fsdp.size))
    found = [] if isinstance(local_model.sharding, FlatSharding) else [_Gather(fsdp, dim, shard_sizes)]
    found += [_Gather(groups[cut.axis], cut.dim, (sizes[cut.dim],) * groups[cut.axis].size) for cut in cuts(spec)]
    return [gather for gather in found if not gather.group.alone]


def _all_gather(shard: Tensor, gathers: list[_Gather]) -> Tensor:
    for group, dim, sizes in gathers:
        shard = all_gather_no_grad(shard.movedim(dim, 0).contiguous(), sizes, group).movedim(0, dim)
    return shard
