"""From a run and this rank's groups to this rank's shard of the model, in one fixed order.

1. Build the modules of this rank's stages on the meta device, with parallel interfaces on its groups: no memory yet.
2. Resize every parameter to this rank's tensor- and expert-parallel shard, as the blueprint says.
3. Apply FSDP, still without memory.
4. Allocate and initialise the shards; an element's value depends only on its index in the global tensor.

So no rank ever allocates more than its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from moefold.attention.max_logits import LogitMaxima
from moefold.attention.varlen_backends import attention_for
from moefold.blueprint.flat_layout import MEBIBYTE, weight_format
from moefold.blueprint.narrow_matmuls import gather_casts
from moefold.blueprint.param_groups import is_trained
from moefold.blueprint.parameters import ParameterSpec, buffers, init_std, parameters
from moefold.blueprint.row_bounds import bounds_rows
from moefold.blueprint.stages import StageSpec, stages_of
from moefold.comm.p2p import CommStream, TimedCommStream, comm_stream
from moefold.comm.process_groups import Groups, Ledger
from moefold.comm.spans import SpanRecorder
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.model.build import build_decoder
from moefold.model.decoder import Decoder
from moefold.model.narrow_modules import narrow_modules
from moefold.moe.dispatch.all_to_all_bounded import BoundedAllToAllDispatcher, lifted
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, SplitSizeSource
from moefold.moe.layer import MoELayer
from moefold.moe.moe_kernels import kernels_for
from moefold.moe.routing_policies import PolicyOrName, policy_maker
from moefold.nn.cuda_graphs import engine_for
from moefold.nn.float32_matmul import cpu_matmul_here
from moefold.nn.init import Box, init_values
from moefold.nn.matmul_policy import WeightGradQueue
from moefold.nn.phase_graphs import PhaseGraphs
from moefold.nn.step_retention import KEEP_ALL, StepRetention, retention_for
from moefold.ops.backends import resolve
from moefold.ops.host_probe import probe_host
from moefold.optim.trained_pieces import SavingOptimizer
from moefold.parallel.data_sharding import DataSharding, to_empty
from moefold.parallel.dispatchers import ENGINE_DISPATCHERS, layer_overlap, overlaps_itself
from moefold.parallel.flat_sharding import FlatSharding, flat_dtypes
from moefold.parallel.fsdp import FsdpSharding, MessageDtypes, message_dtypes, shard_over_data
from moefold.parallel.fsdp_codes import coded_shards
from moefold.parallel.maxima_over_ranks import observer, over_axis, push_amaxes
from moefold.parallel.param_shards import ParamShard, TrainedPiece, build_param_shards, local_part, resize_to_local
from moefold.parallel.rank_interfaces import paged_stash, parallel_interfaces_of
from moefold.plan.dispatch_choice import dispatcher_in_use
from moefold.plan.stage_contents import flat_layout_of, parts_by_rank
from moefold.precision.amax_history import AmaxHistory
from moefold.precision.dtypes import TORCH_FORMATS, set_param_dtype
from moefold.precision.operands import NarrowWeights
from moefold.schedule.graph_regions import captured_phases
from moefold.schedule.names import run_reshards_per_step, schedule_named
from moefold.topology.folded_layout import fold

InitValues = Callable[[str, int, str, tuple[int, ...], Box, float, Tensor], None]


@dataclass(frozen=True)
class LocalModel:
    """One rank's shard of a run's model."""

    run: RunConfig
    groups: Groups
    model: Decoder
    param_shards: dict[str, ParamShard]
    # All stages of the pipeline; the model has the modules of this rank's stages.
    stages: tuple[StageSpec, ...]
    device: torch.device
    # How weights, gradients and optimizer states are divided over data-parallel ranks.
    sharding: DataSharding
    # The queue of deferred weight gradients, and the stream for all-to-alls, if the schedule uses them.
    weight_grads: WeightGradQueue | None = None
    comm_stream: CommStream | None = None
    # Where attention notes its largest logits, with `optim.qk_clip`.
    maxima: LogitMaxima | None = None
    # What is kept of the steps of blocks, if not everything is.
    retention: StepRetention | None = None
    # Weights as narrowed by `precision.recipe`, if the run has one.
    narrow_weights: NarrowWeights | None = None
    # Where counts are read.
    host: SplitSizeSource = SYNC_SPLIT_SIZES
    # Captured phases, with `kernels.graphs`.
    graphs: PhaseGraphs | None = None

    def weights_changed(self, trained_only: bool = False) -> None:
        """After every update, and after weights were initialised or loaded."""
        self.sharding.weights_changed(trained_only)
        if self.narrow_weights is not None:
            self.narrow_weights.forget()

    @property
    def amax_histories(self) -> dict[str, AmaxHistory]:
        """By module name; with `precision.recipe: fp8_delayed`."""
        return {name: module for name, module in self.model.named_modules() if isinstance(module, AmaxHistory)}

    def start_amaxes(self) -> None:
        """Before a step: what forwards outside of steps have noted is forgotten."""
        if histories := self.amax_histories:
            assert self.narrow_weights is not None
            # A weight's amax is noted when it is narrowed.
            self.narrow_weights.forget()
            for history in histories.values():
                history.start_step()

    def push_amaxes(self) -> None:
        """After a step that was not skipped."""
        if histories := self.amax_histories:
            push_amaxes(histories, self.run, self.groups, self.device)

    @property
    def has_row_bounds(self) -> bool:
        """Whether rows may not fit into a dispatcher's buffers; the same on all ranks, with and without MoE layers."""
        return bounds_rows(self.run) and not self.groups["expert_block"].alone

    @contextmanager
    def exact_rows(self) -> Iterator[None]:
        """Without bounds: dispatchers read counts on the host, and no phase is a graph."""
        layers = [module for module in self.model.modules() if isinstance(module, MoELayer)]
        bounded = [
            each for layer in layers for each in layer.dispatchers if isinstance(each, BoundedAllToAllDispatcher)
        ]
        with lifted(bounded), nullcontext() if self.graphs is None else self.graphs.paused():
            yield

    def pieces(self) -> tuple[TrainedPiece, ...]:
        """What this rank updates and saves."""
        return self.sharding.pieces()

    @property
    def spans(self) -> SpanRecorder | None:
        """Stamps what this rank does, while a step is profiled."""
        return self.groups["world"].ledger.spans

    @property
    def reshard_per_step(self) -> bool:
        return run_reshards_per_step(self.run.parallel)

    @property
    def message_dtypes(self) -> MessageDtypes:
        return message_dtypes(self.run.precision)

    @property
    def bucket_bytes(self) -> int:
        return int(self.run.parallel.bucket_mb * MEBIBYTE)


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
        ranks_per_host=run.parallel.ranks_per_host,
        own_stream=uses_comm_stream(run.parallel),
        beside_tp="tensor_parallel" in run.parallel.overlap,
        beside_contexts="ulysses" in run.parallel.overlap,
        share_memory=run.parallel.cpu_exchange == "shared_memory",
    )


def uses_comm_stream(parallel: ParallelConfig) -> bool:
    """Whether exchanges of rows run beside computation: of another microbatch, or of the same one."""
    return schedule_named(parallel.schedule).overlaps or overlaps_itself(parallel)


def build_local_model(
    run: RunConfig,
    groups: Groups,
    device: torch.device,
    init: InitValues = init_values,
    routing_policy: PolicyOrName | None = None,
) -> LocalModel:
    """Build this rank's shard; ``init`` computes the initial values, and ``routing_policy`` replaces the config's."""
    if uses_comm_stream(run.parallel):
        groups.refuse_shared_threads()
    cpu_matmul = cpu_matmul_here(run, device.type)
    local = build_on_meta(run, groups, device, routing_policy=routing_policy, cpu_matmul=cpu_matmul)
    local.sharding.allocate(device, to_empty)
    init_local_model(local, init)
    return local


def build_on_meta(
    run: RunConfig,
    groups: Groups,
    device: torch.device,
    host: SplitSizeSource = SYNC_SPLIT_SIZES,
    routing_policy: PolicyOrName | None = None,
    cpu_matmul: str = "compute",
    make_stream: Callable[[torch.device], CommStream] = comm_stream,
) -> LocalModel:
    """This rank's shard on the meta device, without memory. ``host`` supplies dispatchers' split sizes; ``cpu_matmul``
    says how a CPU multiplies: a dry run does not depend on the CPU it is made on."""
    parts_of_rank = parts_by_rank(run)
    param_shards = build_param_shards(run.model, groups, parts_of_rank)
    schedule = schedule_named(run.parallel.schedule)
    weight_grads = WeightGradQueue() if schedule.splits_backward or schedule.overlaps else None
    kernels = kernels_for(run, device.type)
    if not groups["expert_block"].alone and dispatcher_in_use(run) in ENGINE_DISPATCHERS:
        resolve("dispatch", dispatcher_in_use(run), device.type, probe_host(), run.precision.compute)
    resolve("linear", run.kernels.linear, device.type, probe_host(), run.precision.compute)
    if run.precision.recipe is not None:
        resolve("narrow_gemm", run.kernels.narrow_gemm, device.type, probe_host(), run.precision.recipe)
    attention = attention_for(run, device.type)
    retention = retention_for(run.memory, device, paged_stash(run, groups, device))
    retain = KEEP_ALL if retention is None else retention
    ledger = groups["world"].ledger
    token_stream = None
    if not {"tensor_parallel", "ulysses"}.isdisjoint(run.parallel.overlap):
        token_stream = TimedCommStream(make_stream(device), ledger)
    interfaces = parallel_interfaces_of(
        run, groups, weight_grads, host, kernels, device.type, attention, retain, cpu_matmul, token_stream
    )
    maxima = None if run.optim.qk_clip is None else LogitMaxima()
    observe = None if maxima is None else observer(groups, maxima)
    stream = None
    if uses_comm_stream(run.parallel):
        stream = TimedCommStream(make_stream(device), ledger)
    own = stream if overlaps_itself(run.parallel) else None
    overlap = None if own is None else partial(layer_overlap, run, groups, host, own)
    graphs = None
    if run.kernels.graphs != "none":
        graphs = PhaseGraphs(captured_phases(run.kernels.graph_scope), engine_for(device))
    interfaces = replace(
        interfaces, routing_policy=policy_maker(routing_policy), observe=observe, overlap=overlap, graphs=graphs
    )
    with torch.device("meta"):
        dtype = TORCH_FORMATS[run.precision.compute]
        model = build_decoder(run.model, dtype, interfaces, parts_of_rank[groups["pp"].index])
    narrow_weights = narrow_modules(model, run, partial(over_axis, groups), experts_here(run, groups))
    set_param_dtype(model, TORCH_FORMATS[run.precision.params])
    resize_to_local(model, param_shards, frozen_dtypes(run))
    sharding = SHARDINGS[run.parallel.sharding](run, groups, model, param_shards, device, weight_grads, narrow_weights)
    stages = stages_of(run.model, run.parallel)
    return LocalModel(
        run,
        groups,
        model,
        param_shards,
        stages,
        device,
        sharding,
        weight_grads,
        stream,
        maxima,
        retention,
        narrow_weights,
        host,
        graphs,
    )


def experts_here(run: RunConfig, groups: Groups) -> slice | None:
    """The numbers of this rank's experts."""
    if run.model.moe is None:
        return None
    each, index = run.model.moe.num_experts // groups["ep"].size, groups["ep"].index
    return slice(index * each, (index + 1) * each)


def frozen_dtypes(run: RunConfig) -> dict[str, torch.dtype]:
    """By name of the parameters that are not updated: the format in which weights are gathered, and no wider one."""
    return {
        spec.name: TORCH_FORMATS[weight_format(spec, run.precision)]
        for spec in parameters(run.model)
        if not is_trained(spec.name, run.optim)
    }


def fsdp_sharding(
    run: RunConfig,
    groups: Groups,
    model: Decoder,
    param_shards: dict[str, ParamShard],
    device: torch.device,
    weight_grads: WeightGradQueue | None,
    narrow_weights: NarrowWeights | None,
) -> DataSharding:
    once, dtypes = run_reshards_per_step(run.parallel), message_dtypes(run.precision)
    coded = coded_shards(model, groups, param_shards, gather_casts(run), narrow_weights)
    shard_over_data(model, groups, device.type, once, dtypes, coded)
    return FsdpSharding(model, groups, param_shards, dtypes, once, int(run.parallel.bucket_mb * MEBIBYTE), coded)


def flat_sharding(
    run: RunConfig,
    groups: Groups,
    model: Decoder,
    param_shards: dict[str, ParamShard],
    device: torch.device,
    weight_grads: WeightGradQueue | None,
    narrow_weights: NarrowWeights | None,
) -> DataSharding:
    layout = flat_layout_of(run, groups.layout, groups["pp"].index)
    dtypes = flat_dtypes(run.precision)
    return FlatSharding(model, groups, param_shards, layout, dtypes, weight_grads, narrow_weights)


# By ``parallel.sharding``: from a model on the meta device.
SHARDINGS = {"fsdp": fsdp_sharding, "flat": flat_sharding}


@torch.no_grad()
def init_local_model(local_model: LocalModel, init: InitValues) -> None:
    """Initialise every parameter's shard and every buffer."""
    run = local_model.run
    for piece in local_model.pieces():
        std = init_std(run.model, piece.name)
        for box, shard in piece.by_box(piece.parameter):
            values = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
            init(piece.kind, run.seed, piece.name, piece.shard.shape, box, std, values)
            shard.copy_(values)
    local_model.weights_changed()
    for history in local_model.amax_histories.values():
        history.load({})
    state = dict(local_model.model.named_buffers())
    for spec in local_buffers(run, local_model.model):
        whole = tuple(slice(0, size) for size in spec.shape)
        init(spec.kind, run.seed, spec.name, spec.shape, whole, run.model.init_std, state[spec.name])


@torch.no_grad()
def init_main_weights(local_model: LocalModel, optimizer: SavingOptimizer, init: InitValues = init_values) -> None:
    """Where states of the optimizer complete weights (``precision.master: remainder``): all bits of initial values."""
    run = local_model.run
    for piece in local_model.pieces():
        dtype = optimizer.main_dtype(piece.parameter)
        if dtype != piece.parameter.dtype:
            values = torch.empty_like(local_part(piece.parameter), dtype=dtype)
            for box, part in piece.by_box(values):
                init(piece.kind, run.seed, piece.name, piece.shard.shape, box, init_std(run.model, piece.name), part)
            optimizer.set_main_weight(piece.parameter, values)
    local_model.weights_changed()


def local_buffers(run: RunConfig, model: Decoder) -> list[ParameterSpec]:
    """The buffers of this rank's modules."""
    names = {name for name, _ in model.named_buffers()}
    return [spec for spec in buffers(run.model) if spec.name in names]
