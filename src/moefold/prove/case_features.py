"""Which features a case has, and which a set of cases covered: so that a proof says what it has not tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from moefold.blueprint.stages import stages_of
from moefold.checks.context import modes_in_use
from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.moe import MoEConfig
from moefold.config.precision import PrecisionConfig
from moefold.plan.dispatch_choice import dispatcher_in_use
from moefold.prove.cases import Case
from moefold.prove.verdict import Verdict
from moefold.schedule.names import schedule_named
from moefold.topology.folded_layout import FoldedLayout


def features_of(case: Case) -> Iterator[tuple[str, str]]:
    """(group, feature) pairs of one case."""
    model = case.run.model
    yield from _layout_features(case)
    yield from _pipeline_features(case)
    yield from _context_features(case)
    yield from _attention_features(case)
    if model.moe is not None:
        yield from _moe_features(model.moe)
    yield "documents", case.run.data.packing
    yield "batch", "several waves" if case.num_waves > 1 else "one wave"
    if model.tied_embeddings:
        yield "model", "tied embeddings" if case.run.parallel.pp == 1 else "tied embeddings over stages"
    if model.num_dense_layers:
        yield "model", "dense layers first"
    if model.moe_every > 1:
        yield "model", "MoE and dense layers in turn"
    yield "MTP modules", str(model.num_mtp)
    if model.num_mtp:
        yield "MTP loss divided by", model.mtp_divisor
    for phase in case.run.memory.recompute or ("nothing",):
        yield "recompute", phase
    yield from _saving_features(case)
    yield from _precision_features(case)


def _saving_features(case: Case) -> Iterator[tuple[str, str]]:
    """The form of sharding, steps that are not kept, the optimizer, and what its states are and where."""
    memory, precision, optim = case.run.memory, case.run.precision, case.run.optim
    yield "sharding", case.run.parallel.sharding
    if case.run.parallel.param_sync == "hierarchical":
        yield "sharding", "flat, in four steps"
    if case.run.parallel.bucket_mb < 1:
        yield "sharding", "flat, in small buckets"
    yield "optimizer states", f"on the {memory.optimizer}"
    if precision.moments is not None:
        yield "optimizer states", f"moments in {precision.moments}, rounded {precision.moments_rounding}"
    if precision.master is not None:
        yield "optimizer states", f"main weights by {precision.master}"
    yield "optimizer", optim.algorithm
    if optim.algorithm == "muon":
        yield "optimizer", f"muon, {case.run.parallel.sharding}"
    if optim.qk_clip is not None:
        yield "optimizer", "QK-clip"
    if case.run.model.lora is not None:
        yield "fine-tuning", f"adapters, {case.run.parallel.sharding}, {optim.trained} trained"
    if optim.frozen:
        yield "fine-tuning", f"frozen parameters, {case.run.parallel.sharding}"
    for step, choice in memory.retained().items():
        if choice != "keep":
            yield "retained steps", f"{step}: {choice}"


def _precision_features(case: Case) -> Iterator[tuple[str, str]]:
    precision, parallel = case.run.precision, case.run.parallel
    yield "precision recipe", precision.recipe or "none"
    if precision.dispatch is not None:
        yield "precision recipe", f"rows sent as {precision.dispatch}"
    if precision.recipe is None:
        return
    yield "precision recipe", f"casts by {case.run.kernels.casts}"
    if parallel.tp * parallel.etp > 1:
        yield "precision recipe", "matrices cut over tp or etp"
    if precision.wide != PrecisionConfig().wide:
        yield "precision recipe", "modules that stay wide"
    if precision.gather == "narrow":
        yield "precision recipe", f"weights gathered as codes, {parallel.sharding}"
    if precision.down_input != PrecisionConfig().down_input:
        yield "precision recipe", f"down projections' inputs: {precision.down_input}"
    yield "precision recipe", f"rows padded by {case.run.kernels.row_padding}"
    if schedule_named(parallel.schedule).splits_backward:
        yield "precision recipe", "deferred weight gradients"


def _layout_features(case: Case) -> Iterator[tuple[str, str]]:
    parallel, layout = case.run.parallel, case.layout
    sizes = {axis: layout.size(axis) for axis in ("pp", "cp", "tp", "dp", "ep", "etp", "edp")}
    for axis, size in sizes.items():
        yield f"{axis} =", str(size)
    yield from _order_features(layout)
    if sizes["tp"] > 1:
        chunks = parallel.tp_chunks if "tensor_parallel" in parallel.overlap else 1
        yield "chunks of tp", str(chunks)
    if sizes["cp"] > 1 and "all_to_all" in (parallel.context.full, parallel.context.windowed):
        yield "chunks of ulysses", str(parallel.ulysses_chunks if "ulysses" in parallel.overlap else 1)
    alone = sizes["ep"] * sizes["etp"] == 1
    yield "experts", case.run.kernels.experts
    yield from (("graphs of", scope) for scope in case.run.kernels.graph_scope if case.run.kernels.graphs != "none")
    yield "dispatcher", "local" if alone else parallel.dispatcher
    if not alone and "shared_experts" in parallel.overlap:
        yield "dispatcher", "beside the shared expert"
    if not alone:
        yield "chunks", str(parallel.exchange_chunks)
        yield "exchanged by", f"{parallel.cpu_exchange}: {parallel.dispatcher}"
    if not alone and sizes["etp"] > 1:
        yield "dispatcher", f"{parallel.dispatcher} with etp"
    if not alone and 1 < parallel.ep_inner < sizes["ep"]:
        yield "dispatcher", "two_level over hosts"
    if parallel.echo is not None:
        deferred = ", deferred weight gradients" if schedule_named(parallel.schedule).splits_backward else ""
        yield "dispatcher", f"clones, {parallel.sharding}{deferred}"
    if not alone and parallel.dispatcher == "adaptive":
        yield "dispatcher", f"adaptive: {dispatcher_in_use(case.run)}"
    if not alone:
        yield "folding", _folding(case)
    if sizes["etp"] != sizes["tp"]:
        yield "folding", "etp != tp"
    for what, replicas, ways in (
        ("dense", parallel.dp_replicate, sizes["dp"]),
        ("experts", parallel.edp_replicate, sizes["edp"]),
    ):
        if replicas > 1:
            yield "hybrid sharding", f"{what}: " + ("replicated" if replicas == ways else "replicated shards")


def _order_features(layout: FoldedLayout) -> Iterator[tuple[str, str]]:
    """Of the axes of more than one rank inside of a stage, where there are several, which has neighbouring ranks."""
    for what, grid in (("dense", layout.attention), ("experts", layout.expert)):
        axes = [axis.removesuffix("_shard").removesuffix("_replicate") for axis, size in grid.axes[1:] if size > 1]
        if len(set(axes)) > 1:
            yield "rank order", f"{what}: {axes[-1]} innermost"


def _folding(case: Case) -> str:
    """Which axes of the attention grid one full set of experts spans."""
    layout = case.layout
    block = layout.ranks("expert_block", 0)
    spanned = [axis for axis in ("dp", "cp", "tp") if len({layout.index(axis, rank) for rank in block}) > 1]
    return f"experts over {' x '.join(spanned)}" + (" inside a stage" if case.run.parallel.pp > 1 else "")


def _pipeline_features(case: Case) -> Iterator[tuple[str, str]]:
    """Also for one rank: a schedule may have several stages there, defer weight gradients, or overlap."""
    parallel = case.run.parallel
    schedule = schedule_named(parallel.schedule)
    if parallel.pp * parallel.vpp == 1 and not (schedule.splits_backward or schedule.overlaps):
        return
    yield "schedule", schedule.name if parallel.pp > 1 else f"{schedule.name} on one rank"
    yield "vpp =", str(parallel.vpp)
    stages = stages_of(case.run.model, parallel)
    if len(stages) == 1:
        return
    yield "stages", "balanced" if parallel.stages is None else "by string"
    if len({len(stage.layers) for stage in stages}) > 1:
        yield "stages", "of unequal numbers of layers"
    if any(stage.empty for stage in stages):
        yield "stages", "an empty one"
    if any(stage.loss and not (stage.layers or stage.mtp) for stage in stages):
        yield "stages", "the loss alone"
    if any(stage.mtp and not stage.loss for stage in stages):
        yield "stages", "an MTP module before the loss"


def _context_features(case: Case) -> Iterator[tuple[str, str]]:
    parallel = case.run.parallel
    if max(case.layout.context_sizes(parallel.dynamic_cp)) == 1:
        return
    for layers, mode in modes_in_use(case.run).items():
        yield "context", f"{mode} in {layers} layers"
        if mode == "hierarchical":
            yield "context", f"hierarchical in sets of {parallel.context.inner}"
    if parallel.dynamic_cp:
        yield "context", "dynamic"


def _attention_features(case: Case) -> Iterator[tuple[str, str]]:
    attention, rope = case.run.model.attention, case.run.model.rope
    yield "attention", attention.kind
    if isinstance(attention, MLAConfig):
        yield "attention", "mla with query latent" if attention.q_latent else "mla without query latent"
    if isinstance(attention, GQAConfig):
        yield "attention", f"qk norm: {attention.qk_norm}"
        if attention.qk_norm_when == "after_rope":
            yield "attention", "qk norm after rope"
        if attention.rope_dim is not None:
            yield "attention", "partial rope"
        if attention.nope_every is not None:
            yield "attention", "layers without rope"
        if attention.nope_temperature:
            yield "attention", "queries scaled by position"
        for name in ("qkv_bias", "out_bias", "sinks", "window", "chunk", "output_gate"):
            if getattr(attention, name):
                yield "attention", name
    if case.run.model.linear_attention is not None:
        yield "attention", "linear: gated delta net" + (" over tp" if case.run.parallel.tp > 1 else "")
    if case.run.model.norm_scale == "one_plus_weight":
        yield "attention", "norms centred at zero"
    if rope.yarn is not None:
        yield "attention", "yarn"
    if rope.llama3 is not None:
        yield "attention", "llama3 rope"
    if rope.interleaved:
        yield "attention", "interleaved rope"


def _moe_features(moe: MoEConfig) -> Iterator[tuple[str, str]]:
    router = moe.router
    yield "routing", router.kind
    yield "routing", f"{router.score} {router.score_when}"
    if router.num_groups > 1:
        yield "routing", f"group-limited ({router.group_score})"
    if router.expert_bias:
        yield "routing", "loss-free bias"
    for name in ("microbatch", "sequence", "global_batch", "device", "z"):
        if getattr(moe.balance, name):
            yield "balance", f"sequence, mean over {moe.balance.sequence_mean}" if name == "sequence" else name
    if moe.capacity is None:
        yield "capacity", "dropless"
    else:
        yield "capacity", f"per {moe.capacity.per}"
        yield "capacity", f"drop by {moe.capacity.drop}"
        yield "capacity", f"{moe.capacity.scope} scope"
        if moe.capacity.pad:
            yield "capacity", "padded"
    if moe.shared_hidden_dim:
        yield "experts", "shared, gated" if moe.shared_gate else "shared"
    if moe.latent_dim is not None:
        yield "experts", "latent"
    if moe.expert_mlp_bias:
        yield "experts", "biases"
    yield "experts", f"prob applied at {moe.weight_at}"
    yield "experts", moe.activation


def coverage(verdicts: Iterable[Verdict]) -> dict[str, Counter[str]]:
    """Number of cases with each feature, by group; special situations that occurred come last."""
    table: dict[str, Counter[str]] = {}
    occurred: Counter[str] = Counter()
    for verdict in verdicts:
        for group, feature in dict.fromkeys(features_of(verdict.case)):
            table.setdefault(group, Counter())[feature] += 1
        occurred.update(verdict.observations)
    return table | {"occurred": occurred} if occurred else table
