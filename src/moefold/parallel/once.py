"""Parameters gathered once per step, and gradients reduced once, for pipelines.

Sharded data parallelism on its own gathers a layer's parameters for every microbatch, forward and backward, and reduces
its gradients every time. A pipeline runs many microbatches through few layers, and puts weight gradients off, so here
everything is gathered before the first microbatch, gradients add up in full, and one reduction per parameter ends the
step. At rest, parameters and optimizer states are cut as ever.

Only torch's public interface is used: gather, give back, and hand the sharded parameter its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moefold.blueprint.sharding import grid_of, shard_dim
from moefold.comm.collectives import reduce_plain, sum_plain
from moefold.comm.process_groups import Group, Groups
from moefold.model.decoder import Decoder
from moefold.parallel.placements import DATA_GROUPS


def gather_once(model: Decoder) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


@torch.no_grad()
def reduce_once(model: Decoder, groups: Groups) -> None:
    """Give the gathered parameters back, and leave on each sharded one its part of the summed gradient."""
    full: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            raise RuntimeError(f"{name} got no gradient; every parameter takes part in every step, if only with zeros")
        full[name], parameter.grad = parameter.grad, None
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, parameter in model.named_parameters():
        part = _reduced(full.pop(name), *(groups[group] for group in DATA_GROUPS[grid_of(name)]))
        if isinstance(parameter, DTensor):
            part = DTensor.from_local(
                part,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = part


def _reduced(gradient: Tensor, replicate: Group, shard: Group) -> Tensor:
    if not shard.alone:
        dim = shard_dim(tuple(gradient.shape), shard.size)
        chunk = -(-gradient.shape[dim] // shard.size)
        sizes = tuple(max(0, min(chunk, gradient.shape[dim] - chunk * index)) for index in range(shard.size))
        gradient = reduce_plain(gradient.movedim(dim, 0), sizes, shard).movedim(0, dim).contiguous()
    return sum_plain(gradient, replicate)
