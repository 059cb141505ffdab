"""From a run and this rank's groups to this rank's share of the model, in one fixed order.

1. Build the whole model on the meta device, with seams that reach this rank's groups: no memory yet.
2. Cut every parameter to this rank's tensor- and expert-parallel part, as the blueprint says.
3. Shard over data parallelism, still without memory.
4. Give the remaining parts memory and first values, which depend on their global place only.

So no rank ever holds more than its own part, and the order in which things happen is this function, not a convention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from moefold.attention.core import AttentionCore, LocalCore
from moefold.blueprint.init_std import init_std
from moefold.blueprint.parameters import ParameterSpec, buffers, parameters
from moefold.blueprint.stages import StageSpec, stages_of
from moefold.comm.comm_stream import CommStream
from moefold.comm.ledger import Ledger
from moefold.comm.process_groups import Groups
from moefold.config.run import RunConfig
from moefold.model.build import Seams, build_decoder
from moefold.model.decoder import Decoder
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, SplitSizeSource
from moefold.moe.expert_backends import expert_backend
from moefold.moe.moe_kernels import MOE_IN_TORCH, MoEKernels, kernels_for
from moefold.nn.init import Box, init_values
from moefold.nn.matmul_policy import NativeMatmul, SplitBackwardMatmul, WeightGradQueue
from moefold.parallel.context_parallel import ContextCore, PerLayerCore, by_heads, by_ring
from moefold.parallel.expert_parallel import dispatcher_for
from moefold.parallel.fsdp import shard_over_data
from moefold.parallel.param_shards import ParamShard, cut_parameters, local_part, param_shards
from moefold.parallel.tensor_parallel import TokenShards, VocabShards
from moefold.plan.stage_placement import parts_by_rank
from moefold.precision.dtypes import TORCH_FORMATS, hold_in
from moefold.schedule.names import schedule_named
from moefold.topology.folded_layout import fold

InitValues = Callable[[str, int, str, tuple[int, ...], Box, float, Tensor], None]


@dataclass(frozen=True)
class LocalModel:
    """One rank's part of a run's model."""

    run: RunConfig
    groups: Groups
    model: Decoder
    held: dict[str, ParamShard]
    # All stages of the pipeline; the model has the parts that this rank's stages need.
    stages: tuple[StageSpec, ...]
    device: torch.device
    # Where weight gradients wait, and where exchanges run beside compute, if the schedule asks for either.
    weight_grads: WeightGradQueue | None = None
    comm_stream: CommStream | None = None

    @property
    def reshard_per_step(self) -> bool:
        return reshard_per_step(self.run)


def reshard_per_step(run: RunConfig) -> bool:
    """Whether parameters stay gathered for a step: with several stages, and where phases run outside of modules."""
    schedule = schedule_named(run.parallel.schedule)
    return run.parallel.pp * run.parallel.vpp > 1 or schedule.overlaps or schedule.splits_backward


def groups_of(run: RunConfig, world: int, rank: int, timeout: timedelta) -> Groups:
    """The groups that a run needs."""
    return Groups(
        fold(run.parallel, world),
        rank,
        Ledger(),
        timeout,
        dynamic_cp=run.parallel.dynamic_cp,
        inner=run.parallel.context.inner,
        ep_inner=run.parallel.ep_inner,
        own_stream=schedule_named(run.parallel.schedule).overlaps,
    )


def build_local_model(
    run: RunConfig, groups: Groups, device: torch.device, start: InitValues = init_values
) -> LocalModel:
    """Build this rank's share; ``start`` decides the first values."""
    local = build_on_meta(run, groups, device)
    local.model.to_empty(device=device)
    fill(run, local.model, local.held, start)
    return local


def build_on_meta(
    run: RunConfig, groups: Groups, device: torch.device, host: SplitSizeSource = SYNC_SPLIT_SIZES
) -> LocalModel:
    """The share without memory: all of it is on the meta device. ``host`` tells dispatchers how many rows travel."""
    everyone = parts_by_rank(run)
    held = param_shards(run.model, groups, everyone)
    schedule = schedule_named(run.parallel.schedule)
    weight_grads = WeightGradQueue() if schedule.splits_backward or schedule.overlaps else None
    kernels = kernels_for(run.precision, device.type)
    seams = seams_of(run, groups, weight_grads, host, kernels)
    with torch.device("meta"):
        model = build_decoder(run.model, TORCH_FORMATS[run.precision.compute], seams, everyone[groups["pp"].index])
    hold_in(model, TORCH_FORMATS[run.precision.params])
    cut_parameters(model, held)
    shard_over_data(model, groups, device.type, reshard_per_step(run))
    stream = CommStream(device) if schedule.overlaps else None
    return LocalModel(run, groups, model, held, stages_of(run.model, run.parallel), device, weight_grads, stream)


def seams_of(
    run: RunConfig,
    groups: Groups,
    weight_grads: WeightGradQueue | None,
    host: SplitSizeSource,
    kernels: MoEKernels = MOE_IN_TORCH,
) -> Seams:
    products = NativeMatmul() if weight_grads is None else SplitBackwardMatmul(weight_grads)
    return Seams(
        tokens=TokenShards(groups),
        vocab=VocabShards(groups["tp"]),
        dispatcher=lambda _: dispatcher_for(run, groups, host),
        products=products,
        experts=expert_backend(run.precision.experts, products, weight_grads, kernels),
        # The bias of a split expert is added on one of the ranks that hold its parts.
        bias_scale=float(groups["etp"].index == 0),
        core=core_for(run, groups),
        kernels=kernels,
        recompute=frozenset(run.memory.recompute),
    )


@torch.no_grad()
def fill(run: RunConfig, model: Decoder, held: dict[str, ParamShard], start: InitValues) -> None:
    """Write first values into every parameter's part and every buffer."""
    tensors = dict(model.named_parameters())
    for spec in parameters(run.model):
        if spec.name not in held:
            continue
        part = local_part(tensors[spec.name])
        values = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        start(spec.kind, run.seed, spec.name, spec.shape, held[spec.name].box, init_std(run.model, spec.name), values)
        part.copy_(values)
    state = dict(model.named_buffers())
    for spec in local_buffers(run, model):
        whole = tuple(slice(0, size) for size in spec.shape)
        start(spec.kind, run.seed, spec.name, spec.shape, whole, run.model.init_std, state[spec.name])


def local_buffers(run: RunConfig, model: Decoder) -> list[ParameterSpec]:
    """The buffers that this rank holds."""
    here = {name for name, _ in model.named_buffers()}
    return [spec for spec in buffers(run.model) if spec.name in here]


def core_for(run: RunConfig, groups: Groups) -> AttentionCore:
    """Local where whole sequences are here, else what the run names for each type of layer."""
    if max(groups.contexts) == 1:
        return LocalCore()
    context = run.parallel.context
    cores = {
        "ring": ContextCore(by_ring(groups.contexts)),
        "all_to_all": ContextCore(by_heads(groups.contexts)),
        "hierarchical": ContextCore(groups.nested_contexts),
    }
    return PerLayerCore(cores[context.full], cores[context.windowed])
