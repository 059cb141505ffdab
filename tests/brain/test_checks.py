"""Every rule has an example that passes and one that fails, at the expected path, with numbers and a fix."""

from __future__ import annotations

import time
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from moefold.checks import (
    context,
    engine_limits,
    finetune,
    graphs,
    kernels,
    messages,
    model,
    narrow_recipes,
    parallel,
    planned_only,
    precision,
    retained_steps,
    train,
)
from moefold.checks.run_all import RULES, RULES_TO_TRAIN, problems, problems_to_train
from moefold.checks.sizes import divisors
from moefold.config.attention import (
    GatedDeltaNetConfig,
    GQAConfig,
    Llama3RopeConfig,
    MLAConfig,
    RopeConfig,
    YarnConfig,
)
from moefold.config.data import DataConfig, SourceConfig
from moefold.config.memory import MemoryConfig, RetainConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig
from moefold.config.optim import LRPhaseConfig, LRScheduleConfig, MuonConfig, OptimConfig
from moefold.config.parallel import ContextConfig, EchoConfig, ParallelConfig, RankOrderConfig
from moefold.config.precision import KernelsConfig, LossScaleConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.config.train import DpoConfig, RoutingTraceConfig, SavingConfig, StragglersConfig, TrainConfig
from moefold.recipes.catalog import RECIPES


def with_model(**fields: Any) -> RunConfig:
    return RunConfig(model=ModelConfig(**fields))


def with_moe(**fields: Any) -> RunConfig:
    return with_model(moe=MoEConfig(**fields))


FLAT = ParallelConfig(sharding="flat")
CLONED = ParallelConfig(ep=2, echo=EchoConfig())
GRAPHS = KernelsConfig(graphs="partial")
WHOLE = KernelsConfig(graphs="partial", graph_scope=("attn", "moe_router", "moe"))
GRAPHED = RunConfig(parallel=FLAT, kernels=GRAPHS)
BOUNDED = replace(FLAT, ep=2, dispatcher="all_to_all_bounded")


ALIGNED = ParallelConfig(ep=2, dispatcher="all_to_all_aligned")


def narrowed(**fields: Any) -> RunConfig:
    return RunConfig(**({"precision": PrecisionConfig(recipe="mxfp8")} | fields))


def with_router(**fields: Any) -> RunConfig:
    return with_moe(router=RouterConfig(**fields))


def with_tp(tp: int, **fields: Any) -> RunConfig:
    return RunConfig(model=ModelConfig(**fields), parallel=ParallelConfig(tp=tp))


def with_moe_over(moe: MoEConfig | None, **degrees: int) -> RunConfig:
    return RunConfig(model=ModelConfig(moe=moe), parallel=ParallelConfig(**degrees))


def in_formats(
    moe: MoEConfig | None = None, experts: Any = "grouped", backend: Any = "torch", **formats: Any
) -> RunConfig:
    return RunConfig(
        model=ModelConfig(moe=moe or MoEConfig()),
        precision=PrecisionConfig(**formats),
        kernels=KernelsConfig(experts, backend),
    )


def _with_experts(kind: Any = "topk") -> ModelConfig:
    return ModelConfig(moe=MoEConfig(router=RouterConfig(kind=kind)))


def _wsd_of_200_steps(decay: int) -> RunConfig:
    schedule = LRScheduleConfig(kind="wsd", warmup=100, decay=decay)
    return RunConfig(optim=OptimConfig(lr_schedule=schedule), train=TrainConfig(steps=200))


def _in_phases(*phases: LRPhaseConfig) -> RunConfig:
    return RunConfig(optim=OptimConfig(lr_schedule=LRScheduleConfig(kind="phases", phases=phases)))


def _clipped(attention: GQAConfig | MLAConfig, master: Any = None) -> RunConfig:
    return RunConfig(
        model=ModelConfig(attention=attention),
        optim=OptimConfig(qk_clip=100.0),
        precision=PrecisionConfig(compute="bfloat16", master=master),
        parallel=ParallelConfig(sharding="flat"),
    )


def with_attention(name: Any, config: GQAConfig | MLAConfig, compute: Any = "bfloat16", **parallel: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(attention=config),
        precision=PrecisionConfig(compute=compute),
        kernels=KernelsConfig(attention=name),
        parallel=ParallelConfig(**parallel),
    )


def hybrid(parallel: ParallelConfig | None = None, **linear: int) -> RunConfig:
    attention = GatedDeltaNetConfig(**linear)
    return RunConfig(model=ModelConfig(num_layers=4, linear_attention=attention), parallel=parallel or ParallelConfig())


LINEAR = "model.linear_attention"
HEADS, MOE, ROUTER = "model.attention.num_kv_heads", "model.moe", "model.moe.router"
# rule, a run that keeps it, a run that breaks it, where the problem is reported
BESIDE = ParallelConfig(ep=2, overlap=("shared_experts",))
CHUNKS = ParallelConfig(ep=2, exchange_chunks=2)
HEADS_IN_CHUNKS = ParallelConfig(cp=2, context=ContextConfig(full="all_to_all"), overlap=("ulysses",), ulysses_chunks=4)
IN_CHUNKS = ParallelConfig(tp=2, overlap=("tensor_parallel",), tp_chunks=4)
SHARED = ModelConfig(moe=MoEConfig(shared_hidden_dim=64))
FOUR_STEPS = ParallelConfig(sharding="flat", param_sync="hierarchical", ranks_per_host=2)
CASES = [
    *(
        (messages.param_sync_has_levels, RunConfig(parallel=FOUR_STEPS), RunConfig(parallel=broken), path)
        for broken, path in (
            (replace(FOUR_STEPS, sharding="fsdp"), "parallel.param_sync"),
            (replace(FOUR_STEPS, ranks_per_host=1), "parallel.ranks_per_host"),
            (replace(FOUR_STEPS, param_sync="direct"), "parallel.ranks_per_host"),
        )
    ),
    (
        parallel.shared_experts_have_an_exchange_of_their_own,
        RunConfig(model=SHARED, parallel=BESIDE),
        RunConfig(model=ModelConfig(moe=MoEConfig()), parallel=BESIDE),
        "parallel.overlap",
    ),
    (
        parallel.shared_experts_have_an_exchange_of_their_own,
        RunConfig(model=SHARED, parallel=replace(BESIDE, schedule="zb_h1")),
        RunConfig(model=SHARED, parallel=replace(BESIDE, schedule="1f1b_overlapped")),
        "parallel.overlap",
    ),
    (
        parallel.shared_experts_have_an_exchange_of_their_own,
        RunConfig(model=SHARED, parallel=BESIDE),
        RunConfig(model=SHARED, parallel=replace(BESIDE, echo=EchoConfig(slots=1))),
        "parallel.overlap",
    ),
    (
        parallel.shared_experts_have_an_exchange_of_their_own,
        RunConfig(model=SHARED, parallel=BESIDE, memory=MemoryConfig(recompute=("attention",))),
        RunConfig(model=SHARED, parallel=BESIDE, memory=MemoryConfig(recompute=("experts",))),
        "parallel.overlap",
    ),
    *(
        (
            parallel.chunks_have_rows_to_exchange,
            RunConfig(model=SHARED, parallel=CHUNKS),
            broken,
            "parallel.exchange_chunks",
        )
        for broken in (
            RunConfig(model=SHARED, parallel=replace(CHUNKS, exchange_chunks=0)),
            RunConfig(model=SHARED, parallel=replace(CHUNKS, ep=1)),
            RunConfig(model=ModelConfig(moe=None), parallel=CHUNKS),
            RunConfig(model=SHARED, parallel=replace(CHUNKS, schedule="1f1b_overlapped")),
            RunConfig(model=SHARED, parallel=replace(CHUNKS, dispatcher="deepep")),
            RunConfig(model=SHARED, parallel=replace(CHUNKS, echo=EchoConfig(slots=1))),
            RunConfig(model=ModelConfig(moe=MoEConfig(capacity=CapacityConfig(1.0, pad=True))), parallel=CHUNKS),
            RunConfig(model=SHARED, parallel=CHUNKS, precision=PrecisionConfig(recipe="mxfp8")),
            RunConfig(model=SHARED, parallel=CHUNKS, memory=MemoryConfig(recompute=("experts",))),
            RunConfig(model=SHARED, parallel=CHUNKS, memory=MemoryConfig(retain=RetainConfig(rows="page"))),
            RunConfig(model=SHARED, parallel=CHUNKS, kernels=KernelsConfig(graphs="partial")),
        )
    ),
    *(
        (messages.tp_chunks_have_matmuls_beside_them, RunConfig(model=SHARED, parallel=IN_CHUNKS), broken, path)
        for broken, path in (
            (RunConfig(model=SHARED, parallel=replace(IN_CHUNKS, tp_chunks=1)), "parallel.tp_chunks"),
            (RunConfig(model=SHARED, parallel=ParallelConfig(tp=2, tp_chunks=4)), "parallel.tp_chunks"),
            (RunConfig(model=SHARED, parallel=replace(IN_CHUNKS, tp=1)), "parallel.overlap"),
            *(
                (RunConfig(model=SHARED, parallel=IN_CHUNKS, **other), "parallel.overlap")
                for other in (
                    {"precision": PrecisionConfig(tp_reduce="fp8_all_to_all")},
                    {"precision": PrecisionConfig(recipe="mxfp8")},
                    {"kernels": KernelsConfig(graphs="partial")},
                    {"memory": MemoryConfig(recompute=("attention",))},
                    {"memory": MemoryConfig(recompute=("feed_forward",))},
                    {"memory": MemoryConfig(recompute=("experts",))},
                )
            ),
            (
                RunConfig(
                    model=replace(SHARED, attention=MLAConfig()),
                    parallel=IN_CHUNKS,
                    memory=MemoryConfig(retain=RetainConfig(mla_up="discard")),
                ),
                "parallel.overlap",
            ),
        )
    ),
    *(
        (messages.ulysses_chunks_have_matmuls_beside_them, RunConfig(parallel=HEADS_IN_CHUNKS), broken, path)
        for broken, path in (
            (RunConfig(parallel=replace(HEADS_IN_CHUNKS, ulysses_chunks=1)), "parallel.ulysses_chunks"),
            (RunConfig(parallel=ParallelConfig(cp=2, ulysses_chunks=4)), "parallel.ulysses_chunks"),
            (RunConfig(parallel=replace(HEADS_IN_CHUNKS, cp=1)), "parallel.overlap"),
            (RunConfig(parallel=replace(HEADS_IN_CHUNKS, context=ContextConfig())), "parallel.overlap"),
            *(
                (RunConfig(parallel=HEADS_IN_CHUNKS, **other), "parallel.overlap")
                for other in (
                    {"precision": PrecisionConfig(recipe="mxfp8")},
                    {"kernels": KernelsConfig(graphs="partial")},
                    {"memory": MemoryConfig(recompute=("attention",))},
                    {"memory": MemoryConfig(retain=RetainConfig(core="offload"))},
                    {"optim": OptimConfig(qk_clip=100.0)},
                )
            ),
            (
                RunConfig(
                    model=ModelConfig(attention=MLAConfig()),
                    parallel=HEADS_IN_CHUNKS,
                    memory=MemoryConfig(retain=RetainConfig(mla_up="discard")),
                ),
                "parallel.overlap",
            ),
        )
    ),
    (
        messages.tp_chunks_have_matmuls_beside_them,
        RunConfig(model=ModelConfig(moe=MoEConfig()), parallel=IN_CHUNKS, memory=MemoryConfig(recompute=("experts",))),
        RunConfig(model=SHARED, parallel=IN_CHUNKS, memory=MemoryConfig(recompute=("experts",))),
        "parallel.overlap",
    ),
    (model.kv_heads_divide_heads, with_model(), with_model(attention=GQAConfig(num_heads=4, num_kv_heads=3)), HEADS),
    (
        model.key_heads_divide_value_heads,
        hybrid(num_key_heads=2, num_value_heads=6),
        hybrid(num_key_heads=4, num_value_heads=6),
        f"{LINEAR}.num_key_heads",
    ),
    (
        model.both_kinds_of_attention_are_used,
        hybrid(full_attention_every=4),
        hybrid(full_attention_every=5),
        f"{LINEAR}.full_attention_every",
    ),
    (
        model.both_kinds_of_attention_are_used,
        hybrid(full_attention_every=2),
        hybrid(full_attention_every=1),
        f"{LINEAR}.full_attention_every",
    ),
    (
        parallel.linear_heads_divide_over_tp,
        hybrid(ParallelConfig(tp=2)),
        hybrid(ParallelConfig(tp=4), num_key_heads=2),
        "parallel.tp",
    ),
    (
        train.clipped_layers_have_logits,
        hybrid(),
        replace(hybrid(), optim=OptimConfig(qk_clip=100.0)),
        "optim.qk_clip",
    ),
    (
        model.rotated_dims_are_even,
        with_model(attention=MLAConfig(nope_dim=7)),
        with_model(attention=MLAConfig(rope_dim=7)),
        "model.attention.rope_dim",
    ),
    (
        model.rotated_dims_fit_the_head,
        with_model(attention=GQAConfig(rope_dim=16)),
        with_model(attention=GQAConfig(rope_dim=18)),
        "model.attention.rope_dim",
    ),
    (
        model.only_head_norms_come_after_rope,
        with_model(attention=GQAConfig(qk_norm="head", qk_norm_when="after_rope")),
        with_model(attention=GQAConfig(qk_norm="full", qk_norm_when="after_rope")),
        "model.attention.qk_norm_when",
    ),
    (
        model.chunks_replace_windows,
        with_model(attention=GQAConfig(chunk=4)),
        with_model(attention=GQAConfig(chunk=4, window=8)),
        "model.attention.chunk",
    ),
    (
        model.temperature_is_for_layers_without_rope,
        with_model(attention=GQAConfig(nope_temperature=0.1, nope_every=2)),
        with_model(attention=GQAConfig(nope_temperature=0.1)),
        "model.attention.nope_temperature",
    ),
    (
        model.rope_is_rescaled_once,
        with_model(rope=RopeConfig(llama3=Llama3RopeConfig())),
        with_model(rope=RopeConfig(llama3=Llama3RopeConfig(), yarn=YarnConfig())),
        "model.rope.llama3",
    ),
    (
        model.llama3_frequencies_are_in_order,
        with_model(rope=RopeConfig(llama3=Llama3RopeConfig(low_freq_factor=1.0, high_freq_factor=1.0))),
        with_model(rope=RopeConfig(llama3=Llama3RopeConfig(low_freq_factor=4.0, high_freq_factor=1.0))),
        "model.rope.llama3.low_freq_factor",
    ),
    (
        model.yarn_extends_the_context,
        with_model(rope=RopeConfig(yarn=YarnConfig())),
        with_model(rope=RopeConfig(yarn=YarnConfig(factor=0.5))),
        "model.rope.yarn.factor",
    ),
    (model.experts_are_used, with_model(num_dense_layers=1), with_model(num_dense_layers=2), "model.num_dense_layers"),
    (model.top_k_fits_experts, with_moe(top_k=8), with_moe(top_k=9), f"{MOE}.top_k"),
    (model.groups_divide_experts, with_router(num_groups=4), with_router(num_groups=3), f"{ROUTER}.num_groups"),
    (
        model.top_groups_fits_num_groups,
        with_router(num_groups=2, top_groups=2),
        with_router(num_groups=2, top_groups=3),
        f"{ROUTER}.top_groups",
    ),
    (
        model.top_groups_hold_top_k,
        with_router(num_groups=4, top_groups=1),
        with_router(num_groups=8, top_groups=1),
        f"{ROUTER}.top_groups",
    ),
    (
        model.group_score_has_whole_terms,
        with_moe(top_k=4, router=RouterConfig(num_groups=4, top_groups=2, group_score="topk_sum")),
        with_moe(top_k=3, router=RouterConfig(num_groups=4, top_groups=2, group_score="topk_sum")),
        f"{ROUTER}.group_score",
    ),
    (
        model.only_topk_limits_groups,
        with_router(num_groups=2),
        with_router(kind="sinkhorn", num_groups=2),
        f"{ROUTER}.num_groups",
    ),
    (
        model.only_topk_has_an_expert_bias,
        with_router(expert_bias=True),
        with_router(kind="expert_choice", expert_bias=True),
        f"{ROUTER}.expert_bias",
    ),
    (
        model.expert_choice_has_its_own_capacity,
        with_moe(capacity=CapacityConfig()),
        with_moe(capacity=CapacityConfig(), router=RouterConfig(kind="expert_choice")),
        f"{MOE}.capacity",
    ),
    (
        model.device_groups_divide_experts,
        with_moe(balance=BalanceConfig(device_groups=4)),
        with_moe(balance=BalanceConfig(device_groups=3)),
        f"{MOE}.balance.device_groups",
    ),
    (
        model.capacity_devices_divide_experts,
        with_moe(capacity=CapacityConfig(per="device", device_groups=4)),
        with_moe(capacity=CapacityConfig(per="device", device_groups=3)),
        f"{MOE}.capacity.device_groups",
    ),
    (
        model.capacity_devices_are_used,
        with_moe(capacity=CapacityConfig(per="device", device_groups=2)),
        with_moe(capacity=CapacityConfig(device_groups=2)),
        f"{MOE}.capacity.device_groups",
    ),
    (
        model.padded_capacity_is_per_expert,
        with_moe(capacity=CapacityConfig(pad=True)),
        with_moe(capacity=CapacityConfig(pad=True, per="device", device_groups=2)),
        f"{MOE}.capacity.pad",
    ),
    (
        model.shared_gate_has_a_shared_expert,
        with_moe(shared_gate=True, shared_hidden_dim=32),
        with_moe(shared_gate=True),
        f"{MOE}.shared_gate",
    ),
    (parallel.heads_divide_over_tp, with_tp(4), with_tp(3), "parallel.tp"),
    (parallel.kv_heads_divide_over_tp, with_tp(4, attention=MLAConfig()), with_tp(4), "parallel.tp"),
    (parallel.vocabulary_divides_over_tp, with_tp(2), with_tp(2, vocab_size=255), "parallel.tp"),
    (
        parallel.dense_hidden_dim_divides_over_tp,
        with_tp(2, dense_hidden_dim=127),
        with_tp(2, dense_hidden_dim=127, num_dense_layers=1),
        "parallel.tp",
    ),
    (
        parallel.shared_hidden_dim_divides_over_tp,
        with_tp(2),
        with_tp(2, moe=MoEConfig(shared_hidden_dim=31)),
        "parallel.tp",
    ),
    (
        parallel.rank_orders_name_every_axis,
        RunConfig(parallel=ParallelConfig(rank_order=RankOrderConfig("dp-cp-tp-pp", "edp-etp-ep-pp"))),
        RunConfig(parallel=ParallelConfig(rank_order=RankOrderConfig("tp-cp-ep-dp-pp"))),
        "parallel.rank_order.dense",
    ),
    (
        parallel.rank_orders_name_every_axis,
        RunConfig(),
        RunConfig(parallel=ParallelConfig(rank_order=RankOrderConfig(expert="etp-pp-ep-edp"))),
        "parallel.rank_order.expert",
    ),
    (
        parallel.experts_divide_over_ep,
        with_moe_over(MoEConfig(), ep=8),
        with_moe_over(MoEConfig(), ep=3),
        "parallel.ep",
    ),
    (
        parallel.expert_hidden_dim_divides_over_etp,
        with_moe_over(MoEConfig(), etp=4),
        with_moe_over(MoEConfig(), etp=3),
        "parallel.etp",
    ),
    (parallel.expert_axes_have_experts, with_moe_over(None), with_moe_over(None, ep=2), "parallel.ep"),
    (
        train.microbatches_fill_the_batch,
        RunConfig(data=DataConfig(micro_batch=4)),
        RunConfig(data=DataConfig(micro_batch=3)),
        "data.micro_batch",
    ),
    (
        train.mixture_weights_are_positive,
        RunConfig(data=DataConfig(mixture=(SourceConfig("a", 3.0), SourceConfig("b", 0.0)))),
        RunConfig(data=DataConfig(mixture=(SourceConfig("a", 1.0), SourceConfig("b", float("nan"))))),
        "data.mixture.1.weight",
    ),
    (
        train.training_has_tokens,
        RunConfig(data=DataConfig(mixture=(SourceConfig("a"),))),
        RunConfig(),
        "data.train",
    ),
    (
        train.validation_is_of_the_trained_kind,
        RunConfig(data=DataConfig(train="builtin", validation="builtin")),
        RunConfig(data=DataConfig(train="tokens", validation="builtin")),
        "data.validation",
    ),
    (train.training_has_an_end, RunConfig(train=TrainConfig(steps=1)), RunConfig(), "train.steps"),
    (train.training_has_an_lr, RunConfig(), RunConfig(optim=OptimConfig(lr=0.0)), "optim.lr"),
    (
        train.lr_phases_are_a_whole_run,
        _in_phases(LRPhaseConfig(0.8, 1.0), LRPhaseConfig(0.2, 0.1, "cosine")),
        _in_phases(LRPhaseConfig(0.8, 1.0), LRPhaseConfig(0.1, 0.1, "cosine")),
        "optim.lr_schedule.phases",
    ),
    (
        train.slow_ranks_are_slower,
        RunConfig(),
        RunConfig(train=TrainConfig(stragglers=StragglersConfig(ratio=1.0))),
        "train.stragglers.ratio",
    ),
    (
        train.excluded_ranks_are_looked_for,
        RunConfig(train=TrainConfig(stragglers=StragglersConfig(on_found="exclude"))),
        RunConfig(train=TrainConfig(stragglers=StragglersConfig(window=0, on_found="exclude"))),
        "train.stragglers.on_found",
    ),
    (
        train.traced_routing_is_a_list_of_experts,
        RunConfig(model=_with_experts(), train=TrainConfig(routing_trace=RoutingTraceConfig(steps=4, replay="there"))),
        RunConfig(model=ModelConfig(moe=None), train=TrainConfig(routing_trace=RoutingTraceConfig(steps=4))),
        "train.routing_trace.steps",
    ),
    (
        train.traced_routing_is_a_list_of_experts,
        RunConfig(model=_with_experts("expert_choice")),
        RunConfig(
            model=_with_experts("expert_choice"), train=TrainConfig(routing_trace=RoutingTraceConfig(replay="there"))
        ),
        "train.routing_trace.replay",
    ),
    (
        train.traced_routing_is_a_list_of_experts,
        RunConfig(model=_with_experts(), train=TrainConfig(dpo=DpoConfig())),
        RunConfig(model=_with_experts(), train=TrainConfig(dpo=DpoConfig(), routing_trace=RoutingTraceConfig(steps=1))),
        "train.routing_trace.steps",
    ),
    (
        train.traced_routing_is_a_list_of_experts,
        RunConfig(model=_with_experts(), kernels=KernelsConfig(graphs="partial")),
        RunConfig(
            model=_with_experts(),
            kernels=KernelsConfig(graphs="partial"),
            train=TrainConfig(routing_trace=RoutingTraceConfig(steps=1)),
        ),
        "train.routing_trace.steps",
    ),
    (
        train.uploads_have_another_place,
        RunConfig(train=TrainConfig(saving=SavingConfig(upload="s3://bucket/runs"))),
        RunConfig(train=TrainConfig(saving=SavingConfig(upload="s3://name:password@bucket/runs"))),
        "train.saving.upload",
    ),
    (
        train.saves_are_retried_in_time,
        RunConfig(train=TrainConfig(saving=SavingConfig(retries=20))),
        RunConfig(train=TrainConfig(saving=SavingConfig(retries=21))),
        "train.saving.retries",
    ),
    (
        train.momentum_decays,
        RunConfig(optim=OptimConfig(algorithm="muon")),
        RunConfig(optim=OptimConfig(algorithm="muon", muon=MuonConfig(momentum=1.0))),
        "optim.muon.momentum",
    ),
    (
        train.momentum_is_kept_as_it_is,
        RunConfig(optim=OptimConfig(algorithm="muon"), memory=MemoryConfig(optimizer="host")),
        RunConfig(optim=OptimConfig(algorithm="muon"), memory=MemoryConfig(optimizer="cpu")),
        "memory.optimizer",
    ),
    (
        train.clipped_logits_follow_from_weights,
        _clipped(GQAConfig()),
        _clipped(GQAConfig(qk_norm="head")),
        "optim.qk_clip",
    ),
    (train.clipped_weights_are_whole, _clipped(MLAConfig()), _clipped(MLAConfig(), "remainder"), "optim.qk_clip"),
    (
        train.addresses_are_whole,
        RunConfig(data=DataConfig(train="s3://alice:secret@bucket/x")),
        RunConfig(data=DataConfig(train="s3://[redacted]@bucket/x")),
        "data.train",
    ),
    (train.name_is_one_word, RunConfig(name="a-1"), RunConfig(name="../a"), "name"),
    (
        train.lr_schedule_fits_into_the_run,
        _wsd_of_200_steps(decay=100),
        _wsd_of_200_steps(decay=101),
        "optim.lr_schedule",
    ),
    (
        train.lr_ends_at_or_below_the_peak,
        RunConfig(optim=OptimConfig(lr_schedule=LRScheduleConfig(floor=1.0))),
        RunConfig(optim=OptimConfig(lr_schedule=LRScheduleConfig(floor=1.1))),
        "optim.lr_schedule.floor",
    ),
    (
        kernels.compute_is_not_wider_than_params,
        in_formats(compute="bfloat16"),
        in_formats(compute="float32", params="bfloat16"),
        "precision.compute",
    ),
    (
        kernels.grouped_experts_are_not_float64,
        in_formats(compute="float64", params="float64", experts="sequential"),
        in_formats(compute="float64", params="float64"),
        "kernels.experts",
    ),
    (
        kernels.grouped_rows_are_aligned,
        in_formats(MoEConfig(expert_hidden_dim=12)),
        in_formats(MoEConfig(expert_hidden_dim=12), compute="bfloat16"),
        "model.moe.expert_hidden_dim",
    ),
    (
        kernels.fused_experts_have_no_padded_rows,
        in_formats(MoEConfig(capacity=CapacityConfig(pad=True))),
        in_formats(MoEConfig(capacity=CapacityConfig(pad=True)), experts="fused"),
        "model.moe.capacity.pad",
    ),
    (
        kernels.fused_experts_scale_activations,
        in_formats(MoEConfig(), experts="fused"),
        in_formats(MoEConfig(weight_at="output"), experts="fused"),
        "model.moe.weight_at",
    ),
    (
        kernels.narrow_experts_have_a_backend,
        narrowed(kernels=KernelsConfig(experts="auto")),
        narrowed(kernels=KernelsConfig(experts="fused")),
        "kernels.experts",
    ),
    (
        narrow_recipes.narrow_matmuls_are_torchs,
        narrowed(),
        narrowed(kernels=KernelsConfig(linear="transformer_engine")),
        "kernels.linear",
    ),
    (
        narrow_recipes.casts_are_known_on_this_device,
        narrowed(kernels=KernelsConfig(casts="native")),
        narrowed(kernels=KernelsConfig(casts="native", backend="triton")),
        "kernels.casts",
    ),
    (
        narrow_recipes.narrow_gemms_get_codes,
        narrowed(kernels=KernelsConfig(narrow_gemm="scaled_mm")),
        narrowed(kernels=KernelsConfig(narrow_gemm="scaled_mm"), precision=PrecisionConfig(recipe="bf16")),
        "kernels.narrow_gemm",
    ),
    (
        narrow_recipes.narrow_gemms_know_the_scales,
        narrowed(kernels=KernelsConfig(narrow_gemm="transformer_engine")),
        narrowed(
            kernels=KernelsConfig(narrow_gemm="transformer_engine"), precision=PrecisionConfig(recipe="fp8_rowwise")
        ),
        "kernels.narrow_gemm",
    ),
    (
        narrow_recipes.narrow_gemms_know_the_scales,
        narrowed(precision=PrecisionConfig(recipe="fp8_tensor", down_input="per_token")),
        narrowed(
            kernels=KernelsConfig(narrow_gemm="scaled_mm"),
            precision=PrecisionConfig(recipe="fp8_tensor", down_input="per_token"),
        ),
        "precision.down_input",
    ),
    (
        narrow_recipes.narrow_gemms_have_a_format_of_products,
        narrowed(
            kernels=KernelsConfig(narrow_gemm="transformer_engine"),
            precision=PrecisionConfig(recipe="mxfp8", compute="bfloat16"),
        ),
        narrowed(
            kernels=KernelsConfig(narrow_gemm="scaled_mm"),
            precision=PrecisionConfig(recipe="mxfp8", compute="float64"),
        ),
        "kernels.narrow_gemm",
    ),
    (
        narrow_recipes.narrow_gemms_have_whole_groups,
        narrowed(kernels=KernelsConfig(narrow_gemm="scaled_mm", row_padding="permute")),
        narrowed(kernels=KernelsConfig(narrow_gemm="scaled_mm")),
        "kernels.row_padding",
    ),
    (
        narrow_recipes.down_inputs_are_of_fp8,
        narrowed(precision=PrecisionConfig(recipe="fp8_tensor", down_input="per_token")),
        narrowed(precision=PrecisionConfig(recipe="nvfp4", down_input="per_token")),
        "precision.down_input",
    ),
    (
        narrow_recipes.rows_can_be_padded,
        narrowed(kernels=KernelsConfig(row_padding="routing_map")),
        narrowed(kernels=KernelsConfig(row_padding="permute", permute="transformer_engine")),
        "kernels.row_padding",
    ),
    (
        narrow_recipes.rows_of_zeros_stay_zeros,
        narrowed(model=ModelConfig(moe=MoEConfig(expert_mlp_bias=True)), parallel=ALIGNED),
        narrowed(model=ModelConfig(moe=MoEConfig(expert_mlp_bias=True, weight_at="output")), parallel=ALIGNED),
        "parallel.dispatcher",
    ),
    (
        narrow_recipes.rows_of_zeros_stay_zeros,
        narrowed(model=ModelConfig(moe=MoEConfig(weight_at="input", capacity=CapacityConfig(pad=True)))),
        narrowed(
            model=ModelConfig(moe=MoEConfig(expert_mlp_bias=True, weight_at="input", capacity=CapacityConfig(pad=True)))
        ),
        "model.moe.capacity.pad",
    ),
    (
        narrow_recipes.casts_are_known_on_this_device,
        narrowed(kernels=KernelsConfig(casts="triton", backend="triton")),
        narrowed(kernels=KernelsConfig(casts="triton")),
        "kernels.casts",
    ),
    (
        narrow_recipes.casts_are_known_on_this_device,
        narrowed(kernels=KernelsConfig(casts="triton", backend="triton")),
        narrowed(
            kernels=KernelsConfig(casts="triton", backend="triton"), precision=PrecisionConfig(recipe="fp8_rowwise")
        ),
        "kernels.casts",
    ),
    (
        narrow_recipes.wide_modules_exist,
        narrowed(precision=PrecisionConfig(recipe="mxfp8", wide=("layers.0.*",))),
        narrowed(precision=PrecisionConfig(recipe="mxfp8", wide=("layer.0.*",))),
        "precision.wide",
    ),
    (
        narrow_recipes.blocks_are_those_of_whole_matrices,
        narrowed(parallel=ParallelConfig(tp=2), precision=PrecisionConfig(recipe="bf16")),
        narrowed(parallel=ParallelConfig(tp=2), precision=PrecisionConfig(recipe="fp8_blockwise")),
        "parallel.tp",
    ),
    (
        messages.clones_have_other_ranks,
        RunConfig(parallel=CLONED),
        RunConfig(parallel=replace(CLONED, ep=1)),
        "parallel.echo",
    ),
    (
        messages.clones_have_other_ranks,
        RunConfig(parallel=CLONED),
        RunConfig(parallel=CLONED, model=ModelConfig(moe=None)),
        "parallel.echo",
    ),
    (
        messages.clones_have_our_dispatcher,
        RunConfig(parallel=replace(CLONED, dispatcher="two_level")),
        RunConfig(parallel=replace(CLONED, dispatcher="deepep")),
        "parallel.echo",
    ),
    (
        messages.clones_have_counted_rows,
        RunConfig(parallel=CLONED, model=ModelConfig(moe=MoEConfig(capacity=CapacityConfig()))),
        RunConfig(parallel=CLONED, model=ModelConfig(moe=MoEConfig(capacity=CapacityConfig(pad=True)))),
        "parallel.echo",
    ),
    (
        messages.clones_are_wide,
        RunConfig(parallel=CLONED, precision=PrecisionConfig(compute="bfloat16")),
        RunConfig(parallel=CLONED, precision=PrecisionConfig(recipe="mxfp8")),
        "parallel.echo",
    ),
    (
        messages.clones_are_on_the_compute_stream,
        RunConfig(parallel=replace(CLONED, schedule="zb_h1")),
        RunConfig(parallel=replace(CLONED, schedule="1f1b_overlapped")),
        "parallel.echo",
    ),
    (
        graphs.graphs_have_a_scope,
        RunConfig(kernels=GRAPHS),
        RunConfig(kernels=replace(GRAPHS, graph_scope=())),
        "kernels.graph_scope",
    ),
    (graphs.graphed_weights_stay_in_place, GRAPHED, RunConfig(kernels=GRAPHS), "kernels.graphs"),
    (
        graphs.graphed_microbatches_have_one_shape,
        GRAPHED,
        replace(GRAPHED, data=DataConfig(packing="padded")),
        "kernels.graphs",
    ),
    (
        graphs.graphs_defer_nothing,
        replace(GRAPHED, parallel=replace(FLAT, schedule="gpipe")),
        replace(GRAPHED, parallel=replace(FLAT, schedule="zb_h1")),
        "kernels.graphs",
    ),
    (
        graphs.graphs_defer_nothing,
        replace(GRAPHED, parallel=replace(FLAT, schedule="interleaved")),
        replace(GRAPHED, parallel=replace(FLAT, schedule="1f1b_overlapped")),
        "kernels.graphs",
    ),
    (
        graphs.graphs_have_no_collectives,
        replace(GRAPHED, parallel=replace(FLAT, ep=2)),
        replace(GRAPHED, parallel=replace(FLAT, tp=2)),
        "kernels.graphs",
    ),
    (
        graphs.graphs_have_no_collectives,
        replace(with_moe(balance=BalanceConfig(global_batch=0.1)), kernels=replace(GRAPHS, graph_scope=("attn",))),
        replace(with_moe(balance=BalanceConfig(global_batch=0.1)), kernels=GRAPHS),
        "kernels.graph_scope",
    ),
    (
        graphs.graphed_routers_read_nothing,
        replace(with_moe(router=RouterConfig(kind="balanced")), kernels=GRAPHS),
        replace(with_moe(router=RouterConfig(kind="expert_choice")), kernels=GRAPHS),
        "kernels.graph_scope",
    ),
    (
        graphs.graphed_layers_read_no_counts,
        RunConfig(kernels=WHOLE, parallel=BOUNDED),
        RunConfig(kernels=WHOLE, parallel=replace(BOUNDED, dispatcher="all_to_all")),
        "kernels.graph_scope",
    ),
    (
        graphs.graphed_layers_read_no_counts,
        RunConfig(kernels=replace(GRAPHS, experts="sequential"), parallel=BOUNDED),
        RunConfig(kernels=replace(WHOLE, experts="sequential"), parallel=BOUNDED),
        "kernels.graph_scope",
    ),
    (
        graphs.graphed_layers_read_no_counts,
        RunConfig(kernels=GRAPHS, parallel=replace(BOUNDED, overlap=("shared_experts",))),
        RunConfig(kernels=WHOLE, parallel=replace(BOUNDED, overlap=("shared_experts",))),
        "kernels.graph_scope",
    ),
    (
        graphs.graphs_keep_what_they_compute,
        replace(GRAPHED, memory=MemoryConfig(recompute=("experts",))),
        replace(GRAPHED, memory=MemoryConfig(recompute=("attention",))),
        "kernels.graph_scope",
    ),
    (
        graphs.graphs_keep_what_they_compute,
        replace(GRAPHED, memory=MemoryConfig(retain=RetainConfig(feed_norm="keep"))),
        replace(GRAPHED, memory=MemoryConfig(retain=RetainConfig(feed_norm="discard"))),
        "memory.retain.feed_norm",
    ),
    (
        graphs.graphs_note_nothing_on_the_host,
        replace(GRAPHED, kernels=replace(GRAPHS, backend="triton")),
        replace(GRAPHED, kernels=replace(GRAPHS, backend="native")),
        "kernels.graphs",
    ),
    (
        graphs.graphs_note_nothing_on_the_host,
        replace(GRAPHED, kernels=replace(GRAPHS, graph_scope=("moe_router",)), optim=OptimConfig(qk_clip=100.0)),
        replace(GRAPHED, optim=OptimConfig(qk_clip=100.0)),
        "kernels.graphs",
    ),
    (
        messages.narrow_rows_have_our_dispatcher,
        RunConfig(precision=PrecisionConfig(dispatch="mxfp8")),
        RunConfig(precision=PrecisionConfig(dispatch="mxfp8"), model=ModelConfig(moe=None)),
        "precision.dispatch",
    ),
    (
        narrow_recipes.narrow_gather_has_one_copy,
        narrowed(parallel=FLAT, precision=PrecisionConfig(recipe="fp8_blockwise", gather="narrow")),
        narrowed(parallel=FLAT, precision=PrecisionConfig(recipe="mxfp8", gather="narrow")),
        "precision.gather",
    ),
    (
        narrow_recipes.narrow_gather_has_one_copy,
        narrowed(parallel=FLAT, precision=PrecisionConfig(recipe="fp8_tensor", gather="narrow")),
        narrowed(parallel=FLAT, precision=PrecisionConfig(recipe="fp8_delayed", gather="narrow")),
        "precision.gather",
    ),
    (
        narrow_recipes.narrow_gather_has_one_copy,
        narrowed(parallel=FLAT, precision=PrecisionConfig(recipe="mxfp8", gather="bfloat16")),
        narrowed(parallel=FLAT, precision=PrecisionConfig(gather="narrow")),
        "precision.gather",
    ),
    (
        messages.rounded_parts_are_of_float32,
        in_formats(compute="bfloat16", reduce="bfloat16_all_to_all"),
        in_formats(compute="bfloat16", params="float64", reduce="bfloat16_all_to_all"),
        "precision.reduce",
    ),
    (
        narrow_recipes.narrow_gather_has_one_copy,
        narrowed(parallel=FLAT, precision=PrecisionConfig(recipe="fp8_tensor", gather="narrow")),
        narrowed(parallel=replace(FLAT, tp=2), precision=PrecisionConfig(recipe="fp8_tensor", gather="narrow")),
        "precision.gather",
    ),
    (
        narrow_recipes.blocks_are_those_of_whole_matrices,
        narrowed(parallel=ParallelConfig(tp=2), precision=PrecisionConfig(recipe="fp8_tensor")),
        narrowed(parallel=ParallelConfig(tp=2), precision=PrecisionConfig(recipe="fp8_blockwise")),
        "parallel.tp",
    ),
    (
        narrow_recipes.histories_have_a_step,
        narrowed(precision=PrecisionConfig(recipe="fp8_delayed", amax_history_len=1)),
        narrowed(precision=PrecisionConfig(recipe="fp8_delayed", amax_history_len=0)),
        "precision.amax_history_len",
    ),
    (
        narrow_recipes.kept_inputs_have_scales_of_their_own,
        narrowed(
            precision=PrecisionConfig(recipe="mxfp8"), memory=MemoryConfig(retain=RetainConfig(activation="quantize"))
        ),
        narrowed(
            precision=PrecisionConfig(recipe="fp8_delayed"),
            memory=MemoryConfig(retain=RetainConfig(activation="quantize")),
        ),
        "memory.retain",
    ),
    (
        narrow_recipes.experts_agree_on_amaxes_alone,
        narrowed(parallel=ParallelConfig(etp=2), precision=PrecisionConfig(recipe="fp8_tensor")),
        narrowed(
            parallel=ParallelConfig(pp=2, etp=2, schedule="1f1b_overlapped"),
            precision=PrecisionConfig(recipe="fp8_tensor"),
        ),
        "parallel.etp",
    ),
    (
        precision.only_float16_has_a_loss_scale,
        RunConfig(precision=PrecisionConfig(compute="float16", loss_scale=LossScaleConfig())),
        RunConfig(precision=PrecisionConfig(compute="bfloat16", loss_scale=LossScaleConfig())),
        "precision.loss_scale",
    ),
    (
        precision.loss_scales_are_numbers_of_float32,
        RunConfig(precision=PrecisionConfig(compute="float16", loss_scale=LossScaleConfig(initial=64.0, min=64.0))),
        RunConfig(precision=PrecisionConfig(compute="float16", loss_scale=LossScaleConfig(initial=64.0, min=128.0))),
        "precision.loss_scale.min",
    ),
    (
        precision.float16_has_wider_parameters,
        RunConfig(precision=PrecisionConfig(compute="float16")),
        RunConfig(precision=PrecisionConfig(params="bfloat16", compute="float16")),
        "precision.params",
    ),
    (
        precision.recipes_narrow_wider_formats,
        RunConfig(precision=PrecisionConfig(compute="bfloat16", recipe="mxfp8")),
        RunConfig(precision=PrecisionConfig(compute="float16", recipe="mxfp8")),
        "precision.recipe",
    ),
    (
        kernels.kernels_take_the_format,
        in_formats(compute="bfloat16", backend="triton"),
        in_formats(compute="float64", params="float64", experts="sequential", backend="triton"),
        "kernels.backend",
    ),
    (
        kernels.native_needs_fused_experts,
        in_formats(experts="fused", backend="native"),
        in_formats(backend="native"),
        "kernels.backend",
    ),
    (
        kernels.triton_is_not_combined_with_fused_experts,
        in_formats(backend="triton"),
        in_formats(experts="fused", backend="triton"),
        "kernels.backend",
    ),
    (
        kernels.attention_backend_takes_the_format,
        with_attention("flash_attn_3", GQAConfig(), compute="bfloat16"),
        with_attention("flash_attn_3", GQAConfig(), compute="float32"),
        "kernels.attention",
    ),
    (
        kernels.flash_attn_takes_the_head_dims,
        with_attention("flash_attn_3", MLAConfig()),
        with_attention("flash_attn_2", MLAConfig()),
        "kernels.attention",
    ),
    (
        kernels.flash_attn_takes_the_head_dims,
        with_attention("triton", GQAConfig(head_dim=12)),
        with_attention("flash_attn_2", GQAConfig(head_dim=12)),
        "model.attention.head_dim",
    ),
    (
        kernels.flash_attn_has_no_windows_in_a_ring,
        with_attention("flash_attn_3", GQAConfig(window=8), cp=2, context=ContextConfig(windowed="all_to_all")),
        with_attention("flash_attn_3", GQAConfig(window=8), cp=2),
        "parallel.context.windowed",
    ),
]


@pytest.mark.parametrize(
    ("moe", "compute", "cpu", "cuda"),
    [
        (MoEConfig(), "float32", "fused", "sequential"),
        (MoEConfig(), "bfloat16", "fused", "grouped"),
        (MoEConfig(), "float64", "fused", "sequential"),
        (MoEConfig(), "float16", "fused", "sequential"),
        (MoEConfig(weight_at="output"), "float16", "grouped", "sequential"),
        (MoEConfig(weight_at="output"), "float32", "grouped", "sequential"),
        (MoEConfig(weight_at="output"), "float64", "sequential", "sequential"),
        (MoEConfig(capacity=CapacityConfig(pad=True)), "bfloat16", "grouped", "grouped"),
        (MoEConfig(expert_hidden_dim=12), "bfloat16", "fused", "sequential"),
        (MoEConfig(expert_hidden_dim=12, weight_at="output"), "bfloat16", "sequential", "sequential"),
        (MoEConfig(), "mxfp8", "sequential", "sequential"),
    ],
)
def test_auto_stands_for_experts_that_no_rule_refuses(moe: MoEConfig, compute: Any, cpu: str, cuda: str) -> None:
    run = in_formats(moe, compute=compute, params="float64" if compute == "float64" else "float32", experts="auto")
    assert [kernels.experts_in_use(run, device) for device in ("cpu", "cuda")] == [cpu, cuda]
    assert kernels.native_needs_fused_experts(replace(run, kernels=KernelsConfig("auto", "native"))) is None or (
        cpu != "fused"
    )


def test_experts_by_name_stay_what_they_are() -> None:
    assert KernelsConfig().experts == "grouped"
    for name in ("sequential", "grouped", "fused"):
        run = in_formats(experts=name)
        assert {kernels.experts_in_use(run, device) for device in ("cpu", "cuda")} == {name}


@pytest.mark.parametrize(("rule", "good", "bad", "path"), CASES, ids=[case[0].__name__ for case in CASES])
def test_rule(rule: Any, good: RunConfig, bad: RunConfig, path: str) -> None:
    assert rule(good) in (None, [])
    found = rule(bad)
    (found,) = found if isinstance(found, list) else [found]
    assert found.path == path and found.message and found.fix
    assert found in problems_to_train(bad)
    assert (found in problems(bad)) == (rule not in RULES_TO_TRAIN)


def test_every_rule_has_a_case() -> None:
    """Those about pipelines, context, messages, optimizers, retained steps, adapters, other libraries and what is
    planned only have files of their own."""
    elsewhere = {*parallel.PIPELINE_RULES, *context.RULES, *parallel.DISPATCH_RULES}
    elsewhere |= {*planned_only.RULES, *engine_limits.RULES}
    elsewhere |= {*precision.FORMAT_RULES, *retained_steps.RULES}
    elsewhere |= {kernels.fused_experts_keep_their_first_gemm, *finetune.RULES, *kernels.FINETUNE_RULES}
    elsewhere |= {train.parameter_groups_have_parameters, train.parameter_groups_have_usable_numbers}
    assert {case[0] for case in CASES} == {*RULES, *RULES_TO_TRAIN} - elsewhere
    assert elsewhere <= set(RULES)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_no_problems(name: str) -> None:
    run = RECIPES[name]()
    stage = run.parallel.ep * run.parallel.etp * run.parallel.tp
    assert problems(run, world=None) == []
    assert problems(run, world=stage * run.parallel.pp) == []


def test_proxies_can_be_executed() -> None:
    assert all(problems(make(), 1) == [] for name, make in RECIPES.items() if "proxy" in name)


@pytest.mark.parametrize("degrees", [{"pp": 2}, {"pp": 8}, {"cp": 2}, {"cp": 3}, {"pp": 4, "cp": 3}])
def test_stages_may_be_empty_and_shares_of_a_sequence_uneven(degrees: dict[str, int]) -> None:
    """Two layers over eight stages, or 64 tokens in 2 * 3 chunks, waste a little and are not wrong."""
    assert problems(RunConfig(parallel=ParallelConfig(**degrees)), world=prod(degrees.values())) == []


def test_worlds_that_fold_and_that_do_not() -> None:
    run = RunConfig(parallel=ParallelConfig(tp=2, ep=4))
    assert problems(run, world=8) == []
    assert [problem.path for problem in problems(run, world=6)] == ["parallel.ep"]
    assert [problem.path for problem in problems(run, world=7)] == ["world"]
    assert [problem.path for problem in problems(run, world=0)] == ["world"]


def test_copies_divide_data_parallel_axes() -> None:
    run = RunConfig(parallel=ParallelConfig(dp_replicate=3, edp_replicate=3))
    paths = [problem.path for problem in problems(run, world=8)]
    assert paths == ["parallel.dp_replicate", "parallel.edp_replicate"]


def test_every_rank_gets_as_many_microbatches() -> None:
    run = RunConfig(data=DataConfig(global_batch=8, micro_batch=2))
    assert problems(run, world=4) == []
    (problem,) = problems(run, world=8)
    assert problem.path == "data.global_batch" and "16" in problem.fix


def test_all_problems_come_at_once() -> None:
    run = RunConfig(
        model=ModelConfig(dim=0, norm_eps=-1.0, attention=GQAConfig(num_heads=4, num_kv_heads=3, head_dim=5)),
        parallel=ParallelConfig(ep=3, etp=0),
        precision=PrecisionConfig(params="bfloat16"),
    )
    assert {problem.path for problem in problems(run, world=8)} == {
        "model.dim",
        "model.norm_eps",
        "model.attention.num_kv_heads",
        "model.attention.head_dim",
        "parallel.ep",
        "parallel.etp",
        "precision.compute",
    }


@pytest.mark.parametrize(
    ("run", "path"),
    [
        (with_moe(capacity=CapacityConfig(factor=0.0)), "model.moe.capacity.factor"),
        (with_moe(capacity=CapacityConfig(factor=float("nan"))), "model.moe.capacity.factor"),
        (with_moe(balance=BalanceConfig(z=float("inf"))), "model.moe.balance.z"),
        (with_moe(latent_dim=0), "model.moe.latent_dim"),
        (with_model(attention=GQAConfig(window=0)), "model.attention.window"),
        (RunConfig(seed=-1), "seed"),
    ],
)
def test_numbers_must_mean_something(run: RunConfig, path: str) -> None:
    assert path in {problem.path for problem in problems(run)}


@pytest.mark.parametrize("digits", [15, 20, 6000])
def test_huge_numbers_are_told_quickly(digits: int) -> None:
    size, started = 10**digits, time.process_time()
    run = RunConfig(model=ModelConfig(num_layers=size, vocab_size=size), parallel=ParallelConfig(tp=size, pp=size))
    assert {problem.path for problem in problems(run, world=size)} >= {"world", "model.num_layers", "model.vocab_size"}
    assert time.process_time() - started < 1


def test_divisors_are_listed_when_few() -> None:
    assert divisors(6) == "1, 2, 3 or 6"
    assert divisors(1) == "1"
    assert divisors(12, 8) == "1, 2 or 4"
    assert divisors(10**15) == "a divisor"
