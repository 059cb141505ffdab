"""Sharded data parallelism on two grids: dense parameters over (dp, cp), experts over edp.

Gradients are sums. The loss was divided once, by the global number of labels, so every reduction here is a plain sum:
divide factor 1, forced sum. Groups of one rank are left out: a parameter with no peers stays a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from moefold.blueprint.sharding import shard_dim
from moefold.comm.process_groups import Groups
from moefold.model.decoder import Decoder
from moefold.parallel.placements import DATA_GROUPS


def shard_over_data(model: Decoder, groups: Groups, device_type: str, once: bool) -> None:
    """Wrap experts, then blocks, then the rest; outer wraps leave alone what inner ones took.

    ``once`` leaves gathering and reducing to whoever runs the step (`once.py`).
    """
    dense = groups.device_mesh(device_type, *DATA_GROUPS["attention"])
    expert = groups.device_mesh(device_type, *DATA_GROUPS["expert"])
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    for module in experts:
        _shard(module, expert, groups["expert_shard"].size, set(), once)
    loose = {parameter for module in experts for parameter in module.parameters()} if expert is None else set()
    for module in (*model.layers.values(), *model.mtp.values(), model):
        _shard(module, dense, groups["dense_shard"].size, loose, once)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if once:
                module.set_requires_gradient_sync(False, recurse=False)
                module.set_reshard_after_backward(False, recurse=False)


def _shard(module: nn.Module, mesh: DeviceMesh | None, ways: int, loose: set[nn.Parameter], once: bool) -> None:
    if mesh is not None:
        placement = _placement(ways)
        fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=placement,
            ignored_params=loose,
            reshard_after_forward=False if once else None,
        )


def _placement(ways: int) -> Callable[[nn.Parameter], Shard]:
    return lambda parameter: Shard(shard_dim(tuple(parameter.shape), ways))


def put_to_rest(model: nn.Module) -> None:
    """Give back gathered parameters after a forward that no backward follows; backward does it by itself."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
