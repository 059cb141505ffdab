"""What the model code is handed for this rank: collectives of its groups, kernels and retention, behind interfaces.

Model code never sees a process group. Everything that depends on the layout or the device is decided here, once, from
the run and this rank's groups (``model/build.py::ParallelInterfaces`` lists it).
"""

from __future__ import annotations

import torch

from moefold.attention.core import AttentionCore, LocalCore
from moefold.attention.varlen import VarlenAttention
from moefold.checks.kernels import experts_in_use
from moefold.comm.message_codecs import SumFormat
from moefold.comm.p2p import CommStream
from moefold.comm.process_groups import Groups
from moefold.config.precision_recipes import TP_REDUCE_CASTS
from moefold.config.run import RunConfig
from moefold.model.build import ParallelInterfaces
from moefold.moe.dispatch.base import SplitSizeSource, most_rank_tokens
from moefold.moe.exchange_beside import ExchangesBeside
from moefold.moe.expert_backends import expert_backend
from moefold.moe.moe_kernels import MOE_IN_TORCH, MoEKernels
from moefold.nn.float32_matmul import MULTIPLY
from moefold.nn.matmul_policy import WeightGradQueue, matmul_policy_named
from moefold.nn.paged_stash import PagedStash
from moefold.nn.step_retention import KEEP_ALL, Retention
from moefold.parallel.context_parallel import (
    ChunkedUlyssesCore,
    ContextParallelCore,
    PerLayerCore,
    ring_groups,
    ulysses_groups,
)
from moefold.parallel.dispatchers import dispatcher_for
from moefold.parallel.tensor_parallel import ChunkedTokenShards, TokenShards, VocabShards
from moefold.parallel.ulysses import UlyssesChunks
from moefold.plan.memory.page_pools import page_pools, paged_dims
from moefold.precision.cast_backends import QUANTIZERS
from moefold.precision.dtypes import TORCH_FORMATS
from moefold.precision.row_messages import NarrowPartCodec


def parallel_interfaces_of(
    run: RunConfig,
    groups: Groups,
    weight_grads: WeightGradQueue | None,
    host: SplitSizeSource,
    kernels: MoEKernels = MOE_IN_TORCH,
    device: str = "cpu",
    attention: VarlenAttention | None = None,
    retain: Retention = KEEP_ALL,
    cpu_matmul: str = "compute",
    token_stream: CommStream | None = None,
) -> ParallelInterfaces:
    """``token_stream``: where tokens of tensor or context parallelism go beside computation (`parallel.overlap`)."""
    # Flat buffers are the gradients of all weights already when a step starts.
    in_place = run.parallel.sharding == "flat"
    matmul_policy = matmul_policy_named(run.kernels.linear, weight_grads, in_place, cpu_matmul)
    return ParallelInterfaces(
        tokens=token_shards(run, groups, token_stream),
        vocab=VocabShards(groups["tp"]),
        dispatcher=lambda _: dispatcher_for(run, groups, host),
        matmul_policy=matmul_policy,
        experts=expert_backend(
            experts_in_use(run, device),
            matmul_policy,
            weight_grads,
            kernels,
            run.kernels.permute,
            retain,
            MULTIPLY[cpu_matmul],
        ),
        # The bias of a split expert is added on one rank of its etp group.
        bias_scale=float(groups["etp"].index == 0),
        core=core_for(run, groups, attention, token_stream),
        kernels=kernels,
        recompute=frozenset(run.memory.recompute),
        retain=retain,
    )


def token_shards(run: RunConfig, groups: Groups, stream: CommStream | None) -> TokenShards:
    if stream is None or "tensor_parallel" not in run.parallel.overlap or groups["tp"].alone:
        return TokenShards(groups, *tp_sums(run))
    return ChunkedTokenShards(groups, *tp_sums(run), run.parallel.tp_chunks, stream)


def tp_sums(run: RunConfig) -> tuple[SumFormat, SumFormat]:
    """Of activations, and of gradients."""
    if run.precision.tp_reduce == "fp8_all_to_all":
        casts, quantizers = TP_REDUCE_CASTS[run.precision.tp_reduce], QUANTIZERS[run.kernels.casts]
        return NarrowPartCodec(casts.forward, quantizers), NarrowPartCodec(casts.backward, quantizers)
    return (TORCH_FORMATS[run.precision.tp_reduce_format],) * 2


def core_for(
    run: RunConfig, groups: Groups, attention: VarlenAttention | None = None, stream: CommStream | None = None
) -> AttentionCore:
    """Local without context parallelism, else what the run names for each type of layer."""
    if max(groups.contexts) == 1:
        return LocalCore(attention)
    context = run.parallel.context
    ulysses = ContextParallelCore(ulysses_groups(groups.contexts), attention)
    if stream is not None and "ulysses" in run.parallel.overlap:
        chunks = UlyssesChunks(groups.beside_contexts, run.parallel.ulysses_chunks, ExchangesBeside(stream))
        ulysses = ChunkedUlyssesCore(groups.contexts, chunks, attention)
    cores = {
        "ring": ContextParallelCore(ring_groups(groups.contexts), attention),
        "all_to_all": ulysses,
        "hierarchical": ContextParallelCore(groups.nested_contexts, attention),
    }
    return PerLayerCore(cores[context.full], cores[context.windowed])


def paged_stash(run: RunConfig, groups: Groups, device: torch.device) -> PagedStash | None:
    """Pages of this rank (`memory.retain.STEP: page`); None where no step has any."""
    if not paged_dims(run) or groups["expert_block"].alone:
        return None
    dp = groups.layout.size("dp")
    microbatches = max(1, round(run.data.global_batch / (run.data.micro_batch * dp)))
    sizes = page_pools(run, most_rank_tokens(run, dp), microbatches, groups["pp"].index)
    if not sizes:
        # A rank of the pipeline without experts.
        return None
    return PagedStash(sizes, TORCH_FORMATS[run.precision.compute], device, run.memory.page_rows)
