"""The command with which Megatron-LM or torchtitan starts a plan that was made for it.

The model, the batch and the formats are the run's, the layout is the plan's (`settings_of` names its parts). Megatron
builds a model of its arguments, so all of it is said. torchtitan has configurations by name (`--module`, `--config`);
a model that is none of these cannot be started by arguments.

What a framework cannot be told is listed beside the command and left out of it. Megatron-LM is started on random tokens
of its own, torchtitan on the data of its configuration; what the run does not say ($LR, $STEPS) is to be filled in.

    Megatron-LM    the parser and `validate_args` of main, August 2026 (0.20)
    torchtitan     0.3.0

`python -m tests.framework_parsers commands` gives the commands of 40 questions to those parsers. A command for an older
release (`megatron@0.16.1`) differs in its options of graphs only, and was given to no parser.
"""

from __future__ import annotations

from collections.abc import Iterator

from moefold.config.attention import GQAConfig, MLAConfig, RopeConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.optim import OptimConfig
from moefold.plan.framework_rules import release_of
from moefold.plan.launch_command import (
    MEGATRON_FP8,
    MEGATRON_GRAPHS,
    FrameworkCommand,
    flags,
    layer_pattern,
    settings_of,
    stage_string,
    torchrun,
)
from moefold.plan.search.candidates import choice_of_workload
from moefold.plan.search.space import limits_of
from moefold.plan.workload import Workload
from moefold.recipes.catalog import RECIPES


def framework_command(workload: Workload) -> FrameworkCommand | None:
    """How the workload's own framework starts it; None for moefold (`plan/launch_command.py`) and those not known."""
    writers = {"megatron": _megatron_command, "fsdp2": _torchtitan_command}
    written = writers.get(workload.framework.name)
    return None if written is None or workload.shape is not None else written(workload)


# Arguments that have other names than the settings.
_MEGATRON_FLAGS = {"fp8": "fp8_format", "fp4": "fp4_format"}
# Ways in which a learning rate falls to a share of itself.
_FALLING = ("linear", "cosine")


def _megatron_command(workload: Workload) -> FrameworkCommand:
    run, parallel = workload.run, workload.parallel
    choice = choice_of_workload(workload)
    layout = {**settings_of(choice, limits_of(workload)), **_megatron_layout(workload)}
    layout = {_MEGATRON_FLAGS.get(name, name): value for name, value in layout.items()}
    if release_of(workload.framework.release or "0.19.1") < (0, 18):
        layout = _older_graphs(layout)
    model = run.model
    told = [
        *flags(_megatron_attention(model) | _megatron_rope(model.attention, model.rope)),
        *(flags(_megatron_moe(model, model.moe)) if model.moe else ()),
    ]
    steps = run.train.steps if run.train.steps else "$STEPS"
    training = {
        "micro_batch_size": run.data.micro_batch,
        "global_batch_size": run.data.global_batch,
        "lr": run.optim.lr or "$LR",
        **_megatron_rates(run.optim),
        "train_iters": steps,
        "adam_beta1": run.optim.beta1,
        "adam_beta2": run.optim.beta2,
        "weight_decay": run.optim.weight_decay,
        "clip_grad": run.optim.clip_norm,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
    }
    # With tensor or context parallelism, kernels of one stream have to start in the order in which they were launched;
    # those that overlap on streams of their own have not (`megatron.training.arguments`).
    one_queue = parallel.tp * parallel.cp > 1 and not workload.ep_overlap and parallel.sharding != "fsdp"
    return FrameworkCommand(
        "Megatron-LM",
        (
            *(("CUDA_DEVICE_MAX_CONNECTIONS=1",) if one_queue else ()),
            *torchrun(workload.cluster),
            "pretrain_gpt.py",
            *flags(_megatron_model(model)),
            *told,
            *flags(layout),
            *(each.replace("'$LR'", "$LR").replace("'$STEPS'", "$STEPS") for each in flags(training)),
        ),
        tuple(_not_in_megatron(workload)),
    )


def _megatron_rates(optim: OptimConfig) -> dict[str, object]:
    """Megatron's default falls linearly to nothing."""
    schedule = optim.lr_schedule
    falls = schedule.kind in _FALLING and bool(optim.lr)
    return {
        "lr_decay_style": schedule.kind if falls else "constant",
        "lr_warmup_iters": schedule.warmup or None,
        "min_lr": optim.lr * schedule.floor if falls and schedule.floor else None,
    }


def _megatron_model(model: ModelConfig) -> dict[str, object]:
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.dim,
        "ffn_hidden_size": model.dense_hidden_dim,
        "vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": 128,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "normalization": "RMSNorm",
        "norm_epsilon": model.norm_eps,
        "apply_layernorm_1p": model.norm_scale == "one_plus_weight",
        "init_method_std": model.init_std,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "mtp_num_layers": model.num_mtp or None,
        "mtp_loss_scaling_factor": model.mtp_weight if model.num_mtp else None,
    }


def _megatron_attention(model: ModelConfig) -> dict[str, object]:
    attention = model.attention
    if isinstance(attention, MLAConfig):
        return {
            "num_attention_heads": attention.num_heads,
            "multi_latent_attention": True,
            "q_lora_rank": attention.q_latent,
            "kv_lora_rank": attention.kv_latent,
            "qk_head_dim": attention.nope_dim,
            "qk_pos_emb_head_dim": attention.rope_dim,
            "v_head_dim": attention.value_dim,
            # Of the latents.
            "qk_layernorm": True,
            "disable_bias_linear": True,
        }
    everywhere = _biases_everywhere(model)
    windows = [int(attention.window_of(layer) is not None) for layer in range(model.num_layers)]
    return {
        "num_attention_heads": attention.num_heads,
        "group_query_attention": True,
        "num_query_groups": attention.num_kv_heads,
        "kv_channels": attention.head_dim,
        "qk_layernorm": attention.qk_norm == "head",
        "qk_l2_norm": attention.qk_norm == "unit",
        "disable_bias_linear": not everywhere,
        "add_qkv_bias": attention.qkv_bias and not everywhere,
        "attention_output_gate": attention.output_gate,
        "softmax_type": "learnable" if attention.sinks else None,
        # Positions before the token.
        "window_size": f"{attention.window - 1},0" if attention.window else None,
        "window_attn_skip_freq": layer_pattern(windows) if attention.window and not all(windows) else None,
        "no_rope_freq": attention.nope_every,
    }


def _biases_everywhere(model: ModelConfig) -> bool:
    """Megatron's linear layers have biases all together."""
    attention, moe = model.attention, model.moe
    biases = isinstance(attention, GQAConfig) and attention.qkv_bias and attention.out_bias
    return biases and moe is not None and moe.expert_mlp_bias


def _megatron_rope(attention: GQAConfig | MLAConfig, rope: RopeConfig) -> dict[str, object]:
    latent, yarn, llama3 = isinstance(attention, MLAConfig), rope.yarn, rope.llama3
    made: dict[str, object] = {"rotary_base": int(rope.theta)}
    if isinstance(attention, GQAConfig) and attention.rope_dim is not None:
        made["rotary_percent"] = attention.rope_dim / attention.head_dim
    if latent:
        # Latent attention has YaRN unless told otherwise.
        made |= {"position_embedding_type": "rope", "rope_type": "yarn" if yarn else "rope"}
        if yarn:
            made |= {"rotary_scaling_factor": yarn.factor, "mscale": yarn.mscale or 1.0}
            made["mscale_all_dim"] = yarn.mscale_all_dim
        return made
    made |= {"position_embedding_type": "yarn" if yarn else "rope", "rotary_interleaved": rope.interleaved}
    if yarn:
        made |= {
            "rotary_scaling_factor": yarn.factor,
            "yarn_original_max_position_embeddings": yarn.original_context,
            "yarn_beta_fast": yarn.beta_fast,
            "yarn_beta_slow": yarn.beta_slow,
            "no_yarn_correction_range_round_to_int": not yarn.truncate,
        }
    return made | ({"use_rope_scaling": True, "rope_scaling_factor": llama3.factor} if llama3 else {})


def _megatron_moe(model: ModelConfig, moe: MoEConfig) -> dict[str, object]:
    router, balance, capacity = moe.router, moe.balance, moe.capacity
    pattern = [int(model.is_moe_layer(layer)) for layer in range(model.num_layers)]
    losses = {
        "aux_loss": balance.microbatch,
        "seq_aux_loss": balance.sequence,
        "global_aux_loss": balance.global_batch,
    }
    used = {name: value for name, value in losses.items() if value}
    kind = {"sinkhorn": ("sinkhorn",)}.get(router.kind, tuple(used) or ("none",))
    clamped = moe.activation == "clamped_swiglu"
    softmax = router.score == "softmax"
    return {
        "num_experts": moe.num_experts,
        "moe_layer_freq": None if all(pattern) else layer_pattern(pattern),
        "moe_ffn_hidden_size": moe.expert_hidden_dim,
        "moe_shared_expert_intermediate_size": moe.shared_hidden_dim or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_latent_size": moe.latent_dim,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": router.score,
        # Softmax of all logits, whose top-k are not normalised. Normalised ones are the softmax of the top-k alone.
        "moe_router_pre_softmax": softmax and router.score_when == "before_topk" and not router.normalize,
        "moe_router_topk_scaling_factor": router.scale if router.scale != 1 else None,
        "moe_router_num_groups": router.num_groups if router.num_groups > 1 else None,
        "moe_router_group_topk": router.top_groups if router.num_groups > 1 else None,
        "moe_router_enable_expert_bias": router.expert_bias,
        "moe_router_bias_update_rate": router.bias_update_rate if router.expert_bias else None,
        "moe_router_dtype": "fp32" if router.fp32 else None,
        "moe_router_force_load_balancing": router.kind == "balanced",
        "moe_router_load_balancing_type": kind,
        "moe_aux_loss_coeff": tuple(used.values()),
        "moe_z_loss_coeff": balance.z or None,
        "moe_expert_capacity_factor": capacity.factor if capacity else None,
        "moe_pad_expert_input_to_capacity": capacity.pad if capacity else None,
        "moe_token_drop_policy": {"probability": "probs", "position": "position"}[capacity.drop] if capacity else None,
        "moe_apply_probs_on_input": moe.weight_at == "input",
        "swiglu": not clamped,
        "quick_geglu": clamped,
        "glu_linear_offset": 1.0 if clamped else None,
        "activation_func_clamp_value": 7.0 if clamped else None,
        **dict.fromkeys(("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"), True),
    }


def _megatron_layout(workload: Workload) -> dict[str, object]:
    """What settings of the rules leave open, and what the plan's prediction takes for granted."""
    run, parallel, framework = workload.run, workload.parallel, workload.framework
    fsdp, sharded = parallel.sharding == "fsdp", parallel.sharding in ("zero1", "fsdp")
    whole, overlaps = "full" in workload.recompute, framework.gradient_overlap
    narrow, away = run.precision.moments == "bfloat16", run.memory.optimizer != "device"
    paged = run.kernels.graphs == "full" and workload.model.is_moe and not workload.drops
    stages = parallel.pp * parallel.vpp
    return {
        # The string says how many stages a rank has, too.
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": stage_string(workload) if stages > 1 else None,
        "expert_tensor_parallel_size": parallel.etp if workload.model.is_moe else None,
        # Of the model above.
        "num_moe_experts": None,
        "multi_latent_attention": None,
        "mtp_num_layers": None,
        "moe_expert_capacity_factor": None,
        "moe_pad_expert_input_to_capacity": None,
        "recompute_method": "uniform" if whole else None,
        "recompute_num_layers": 1 if whole else None,
        "cuda_graph_impl": None if run.kernels.graphs == "none" else MEGATRON_GRAPHS[run.kernels.graphs],
        # Rows of the busiest rank over the mean, for which pages are kept.
        "moe_expert_rank_capacity_factor": 1.5 if paged else None,
        "use_transformer_engine_op_fuser": paged,
        # Beside an optimizer on the CPU with delayed scales alone.
        "fp8_param_gather": workload.format in (("fp8_delayed",) if away else MEGATRON_FP8),
        "overlap_grad_reduce": overlaps,
        "overlap_param_gather": overlaps and sharded,
        "tp_comm_overlap": framework.tp_overlap and parallel.tp > 1,
        "data_parallel_sharding_strategy": "optim_grads_params" if fsdp else None,
        "ckpt_format": "fsdp_dtensor" if fsdp else None,
        "use_precision_aware_optimizer": narrow or away,
        "exp_avg_dtype": "bf16" if narrow else None,
        "exp_avg_sq_dtype": "bf16" if narrow else None,
        "optimizer_cpu_offload": away,
        "cross_entropy_loss_fusion": framework.fused_loss,
        "cross_entropy_fusion_impl": "native" if framework.fused_loss else None,  # 0.20 refuses Transformer Engine's.
        "seq_length": run.data.seq_len,
        "max_position_embeddings": run.data.seq_len,
    }


def _older_graphs(layout: dict[str, object]) -> dict[str, object]:
    """Before 0.18 modules were a scope, and so was the whole iteration."""
    made = {("cuda_graph_scope" if name == "cuda_graph_modules" else name): value for name, value in layout.items()}
    if made["cuda_graph_impl"] == "full_iteration":
        made |= {"cuda_graph_impl": "local", "cuda_graph_scope": ("full_iteration",)}
    return made


def _not_in_megatron(workload: Workload) -> Iterator[str]:
    model, optim = workload.run.model, workload.run.optim
    attention, moe = model.attention, model.moe
    if model.linear_attention is not None:
        yield "layers of linear attention"
    if isinstance(attention, GQAConfig):
        biased = attention.qkv_bias or attention.out_bias or (moe is not None and moe.expert_mlp_bias)
        odd = {
            "norms of queries and keys over all heads": attention.qk_norm == "full",
            "norms of queries and keys after RoPE": attention.qk_norm_when == "after_rope",
            "attention within chunks": attention.chunk is not None,
            "temperatures of layers without RoPE": bool(attention.nope_temperature),
            "biases in some linear layers": biased
            and not _biases_everywhere(model)
            and (attention.out_bias or (moe is not None and moe.expert_mlp_bias)),
        }
        yield from (words for words, found in odd.items() if found)
    yarn = model.rope.yarn
    if (
        isinstance(attention, MLAConfig)
        and yarn
        and (yarn.original_context, yarn.beta_fast, yarn.beta_slow) != (*(4096, 32.0, 1.0),)
    ):
        yield "YaRN's original context and ramp, which latent attention has as 4096, 32 and 1"
    if moe is not None:
        router = moe.router
        odd = {
            "expert-choice routing": router.kind == "expert_choice",
            "sigmoid scores that are not normalised": router.score == "sigmoid" and not router.normalize,
            "groups of experts by their best expert": router.num_groups > 1 and router.group_score == "max",
            "balance between devices": bool(moe.balance.device),
            "capacity of devices": moe.capacity is not None and moe.capacity.per == "device",
        }
        yield from (words for words, found in odd.items() if found)
    if optim.algorithm == "muon" or optim.qk_clip is not None:
        yield "Muon and QK-clip: the command has Adam"
    if optim.lr_schedule.kind not in ("constant", *(_FALLING if optim.lr else ())):
        yield "how the learning rate falls"
    if model.lora is not None:
        yield "adapters"


# ---- torchtitan ----

# Configurations of torchtitan 0.3.0, as module and name, by the recipe that has the same model.
_TORCHTITAN_MODELS = {
    "deepseek_v3": ("deepseek_v3", "deepseek_v3_671b"),
    "qwen3_30b_a3b": ("qwen3", "qwen3_30b_a3b"),
    "gpt_oss_20b": ("gpt_oss", "gpt_oss_20b"),
    "gpt_oss_120b": ("gpt_oss", "gpt_oss_120b"),
}


def _torchtitan_command(workload: Workload) -> FrameworkCommand | None:
    run, parallel = workload.run, workload.parallel
    known = next((made for name, made in _TORCHTITAN_MODELS.items() if RECIPES[name]().model == run.model), None)
    if known is None:
        return None
    module, config = known
    settings = settings_of(choice_of_workload(workload), limits_of(workload))
    names = ("tensor", "context", "pipeline", "expert")
    degrees = (*(f"{each}_parallel_degree" for each in names), *(f"data_parallel_{each}_degree" for each in _KINDS))
    stages, microbatches = parallel.pp * parallel.vpp, workload.microbatches if parallel.pp > 1 else 1
    said: dict[str, object] = {f"parallelism.{name}": settings[name] for name in degrees}
    if parallel.pp > 1:
        said |= {
            "parallelism.pipeline_parallel_schedule": settings["pipeline_parallel_schedule"],
            "parallelism.pipeline_parallel_layers_per_stage": _layers_per_stage(workload),
            "parallelism.pipeline_parallel_microbatch_size": run.data.micro_batch,
        }
    said |= {
        "training.local_batch_size": run.data.micro_batch * microbatches,
        "training.global_batch_size": run.data.global_batch,
        "training.seq_len": run.data.seq_len,
        "training.disable_cuda_graphs": run.kernels.graphs == "none",
        "compile.enable": workload.framework.compiled,
    }
    if run.train.steps:
        said["training.steps"] = run.train.steps
    left_out = {
        f"matmuls in {workload.format}: a configuration of its own": settings["quantization"] != "none",
        f"the dispatcher {workload.dispatcher}: a configuration of its own": settings["comm_backend"] != "standard",
        f"{stages} stages: its own are cut by a number of layers": parallel.pp > 1
        and -(-_with_ends(workload) // _layers_per_stage(workload)) != stages,
    }
    return FrameworkCommand(
        "torchtitan",
        (
            *torchrun(workload.cluster),
            "-m torchtitan.train",
            f"--module {module}",
            f"--config {config}",
            *flags(said),
            f"activation-checkpoint:{settings['activation_checkpoint']}",
        ),
        tuple(words for words, found in left_out.items() if found),
    )


_KINDS = ("replicate", "shard")


def _with_ends(workload: Workload) -> int:
    """Embedding and head count as a layer each, as torchtitan does by itself."""
    return workload.run.model.num_layers + 2


def _layers_per_stage(workload: Workload) -> int:
    return -(-_with_ends(workload) // (workload.parallel.pp * workload.parallel.vpp))
