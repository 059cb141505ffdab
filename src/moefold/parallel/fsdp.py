"""FSDP on two grids: dense parameters over (dp, cp), experts over edp.

Gradients are sums. The loss was divided once, by the global number of labels, so every reduction here is a plain sum:
divide factor 1, forced sum. Groups of one rank are left out: a parameter with no peers stays a plain tensor.

FSDP by default unshards a layer for every microbatch, forward and backward, and reduces its gradients every time. A
pipeline runs many microbatches through few layers and defers weight gradients. It therefore unshards all parameters
before the first microbatch (``unshard_for_step``), accumulates full gradients, and reduces once per parameter at the
end of the step (``reduce_for_step``). Between steps parameters and optimizer states are sharded as usual.

Only torch's public interface is used: unshard, reshard, and assign the sharded parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from moefold.blueprint.sharding import grid_of, shard_dim
from moefold.comm.collectives import all_reduce_no_grad, reduce_scatter_no_grad
from moefold.comm.process_groups import Group, Groups
from moefold.model.decoder import Decoder
from moefold.parallel.param_shards import DATA_GROUPS


def shard_over_data(model: Decoder, groups: Groups, device_type: str, once: bool) -> None:
    """Wrap experts, then blocks, then the rest; an outer wrap skips parameters that an inner one has.

    With ``once``, FSDP neither reshards nor reduces by itself: ``unshard_for_step`` and ``reduce_for_step`` do.
    """
    dense = groups.device_mesh(device_type, *DATA_GROUPS["attention"])
    expert = groups.device_mesh(device_type, *DATA_GROUPS["expert"])
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    for module in experts:
        _shard(module, expert, groups["expert_shard"].size, set(), once)
    unsharded = {parameter for module in experts for parameter in module.parameters()} if expert is None else set()
    for module in (*model.layers.values(), *model.mtp.values(), model):
        _shard(module, dense, groups["dense_shard"].size, unsharded, once)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if once:
                module.set_requires_gradient_sync(False, recurse=False)
                module.set_reshard_after_backward(False, recurse=False)


def _shard(module: nn.Module, mesh: DeviceMesh | None, shard_size: int, ignored: set[nn.Parameter], once: bool) -> None:
    if mesh is not None:
        placement = _placement(shard_size)
        fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=placement,
            ignored_params=ignored,
            reshard_after_forward=False if once else None,
        )


def _placement(shard_size: int) -> Callable[[nn.Parameter], Shard]:
    return lambda parameter: Shard(shard_dim(tuple(parameter.shape), shard_size))


def reshard_all(model: nn.Module) -> None:
    """Reshard after a forward without backward; FSDP's backward reshards by itself."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def unshard_for_step(model: Decoder) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


@torch.no_grad()
def reduce_for_step(model: Decoder, groups: Groups) -> None:
    """Reshard, and set each sharded parameter's ``.grad`` to its shard of the summed gradient."""
    full: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            raise RuntimeError(f"{name} has no gradient; every parameter must get one in every step, zeros included")
        full[name], parameter.grad = parameter.grad, None
    reshard_all(model)
    for name, parameter in model.named_parameters():
        gradient = _reduced(full.pop(name), *(groups[group] for group in DATA_GROUPS[grid_of(name)]))
        if isinstance(parameter, DTensor):
            gradient = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = gradient


def _reduced(gradient: Tensor, replicate: Group, shard: Group) -> Tensor:
    if not shard.alone:
        dim = shard_dim(tuple(gradient.shape), shard.size)
        chunk = -(-gradient.shape[dim] // shard.size)
        sizes = tuple(max(0, min(chunk, gradient.shape[dim] - chunk * index)) for index in range(shard.size))
        gradient = reduce_scatter_no_grad(gradient.movedim(dim, 0), sizes, shard).movedim(0, dim).contiguous()
    return all_reduce_no_grad(gradient, replicate)
