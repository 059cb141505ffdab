"""Published measurements as workloads.

A record is one JSON object with a model, a cluster, a layout and flags, in the schema of public collections of training
runs: `model`, `hardware`, `parallel`, `flags`, `precision`, `seq_len`, `gbs`, `mbs`. Sources print what they like, so
many fields may be missing; what is assumed then is written here and nowhere else. Nothing that a record says about its
own result (its time, its memory) is read here: a prediction must not see the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from moefold.blueprint.model_shape import Attention, Dense, Layer, ModelShape, MoE, Recurrence
from moefold.blueprint.stages import parse_stages
from moefold.hardware.cluster import Cluster
from moefold.hardware.gpu import gpu_named
from moefold.plan.workload import (
    Batch,
    Dispatcher,
    Dtypes,
    Format,
    Framework,
    Graphs,
    Options,
    ParallelDegrees,
    Recomputed,
    Sharding,
    Workload,
)

Record = Mapping[str, Any]

_FORMATS: dict[str, Format] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8_tensor",
    "fp8_delayed": "fp8_delayed",
    "fp8_delayed_hybrid": "fp8_delayed",
    "fp8_tensorwise_current": "fp8_tensor",
    "fp8_tensorwise_dynamic": "fp8_tensor",
    "fp8_rowwise": "fp8_row",
    "fp8_blockwise": "fp8_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
_RECOMPUTED: dict[str, tuple[Recomputed, ...]] = {
    "full": ("full",),
    "activation checkpointing": ("full",),
    "recipe default (recompute on)": ("full",),
    "mla_up_proj": ("mla_up",),
    "layernorm": ("norms",),
    "moe_act": ("activation",),
    "moe": ("experts",),
    "mlp": ("feed_forward",),
    "core_attn": ("core_attention",),
    # torch's operator-wise choice keeps matmuls and drops the rest.
    "per-op SAC": ("norms", "activation"),
    "selective AC (every 2nd layer / op)": ("norms", "activation"),
}
_DISPATCHERS: dict[str, Dispatcher] = {"hybridep": "hybridep", "alltoall": "all_to_all", "allgather": "all_gather"}
# Vocabularies are padded to a multiple of this, times the tensor-parallel size.
_VOCAB_MULTIPLE = 128


def workload_of_record(record: Record) -> Workload:
    """The workload that a record describes."""
    degrees = _degrees(record)
    options = _options(record, degrees)
    return Workload(
        model=_model(record["model"]),
        cluster=_cluster(record),
        degrees=degrees,
        batch=_batch(record, degrees),
        dtypes=_dtypes(record, options),
        options=options,
    )


# ---- the model ----


def _model(model: Record) -> ModelShape:
    vocab = model.get("vocab") or 51200
    layers, mtp = _layers(model)
    return ModelShape(model["hidden"], vocab, tuple(layers), bool(model.get("tied")), (layers[-1],) * mtp)


def _layers(model: Record) -> tuple[list[Layer], int]:
    pattern = model.get("hybrid")
    mtp = int(model.get("mtp") or 0)
    if pattern:
        main, *ahead = pattern.split("/")
        return [_hybrid_layer(model, letter) for letter in main], len(ahead) or mtp
    counts = model.get("hybrid_counts")
    if counts:
        letters = "M" * counts["mamba"] + "*" * counts["attn"] + "-" * counts["mlp"]
        return [_hybrid_layer(model, letter) for letter in letters], mtp
    return [_plain_layer(model, index) for index in range(model["layers"])], mtp


def _hybrid_layer(model: Record, letter: str) -> Layer:
    if letter == "M":
        mamba = model["mamba"] if model.get("mamba") else {"heads": 64, "head_dim": 64, "state": 128, "groups": 8}
        return Layer(Recurrence(mamba["heads"], mamba["head_dim"], mamba["state"], mamba["groups"]), None)
    if letter == "*":
        return Layer(_attention(model, 0), None)
    return Layer(None, _moe(model) if letter == "E" else _dense(model))


def _plain_layer(model: Record, index: int) -> Layer:
    every = model.get("full_attn_every")
    mixer: Attention | Recurrence
    if every and (index + 1) % every:
        delta = model["gdn"]
        mixer = Recurrence(delta["value_heads"], delta["value_dim"], delta["key_dim"], delta["key_heads"])
    else:
        windowed = index < (model.get("window_layers") or 0)
        mixer = _attention(model, model["window"] if windowed else 0)
    first = model.get("dense_first_layers") or 0
    frequency = model.get("moe_layer_freq") or 1
    is_moe = model["moe"] and index >= first and (index + 1) % frequency == 0
    return Layer(mixer, _moe(model) if is_moe else _dense(model))


def _attention(model: Record, window: int) -> Attention:
    heads = model["heads"]
    if model.get("kv_lora"):
        qk_dim = model["qk_nope"] + model["qk_rope"]
        return Attention(
            heads, heads, qk_dim, model["v_head"], model.get("q_lora") or 0, model["kv_lora"], model["qk_rope"]
        )
    if model["attn"] == "dsv4_hybrid":
        # One key and value of the head's dim for all heads; tokens look at a window and a few compressed blocks.
        dim = model["qk_nope"] + model["qk_rope"]
        return Attention(heads, 1, dim, dim, model["q_lora"], window=model["csa_window"] + model["idx_topk"])
    dim = model.get("head_dim") or model["hidden"] // heads
    return Attention(heads, model.get("kv_heads") or heads, dim, dim, window=window)


def _is_gated(model: Record) -> bool:
    return model.get("act", "swiglu") not in ("gelu", "relu2")


def _dense(model: Record) -> Dense:
    return Dense(model.get("ffn") or 4 * model["hidden"], _is_gated(model))


def _moe(model: Record) -> MoE:
    shared = model.get("shared_ffn") or 0
    return MoE(
        model["experts"], model["topk"], model["moe_ffn"], shared, model.get("moe_latent") or 0, _is_gated(model)
    )


# ---- the cluster, the parallel degrees and the batch ----


def _cluster(record: Record) -> Cluster:
    # A record of feasibility names the GPU and the number alone.
    hardware = record.get("hardware") or {"gpu": record["gpu"], "num_gpus": record["num_gpus"]}
    gpu = gpu_named(hardware["gpu"])
    network = "efa" if "EFA" in str(hardware.get("network")) else "ib"
    nic = hardware.get("nic_gb_s_per_gpu") or gpu.nic_gb_s
    return Cluster(gpu, hardware["num_gpus"], hardware.get("nvlink_domain") or gpu.domain, nic, network)


def _world(record: Record) -> int:
    return int((record.get("hardware") or record)["num_gpus"])


def _degrees(record: Record) -> ParallelDegrees:
    parallel, flags = record["parallel"], record.get("flags") or {}
    tp, cp, pp = (parallel.get(axis) or 1 for axis in ("tp", "cp", "pp"))
    ep = parallel.get("ep") or 1
    vpp = parallel.get("vpp") or 1
    world = _world(record)
    # Old frameworks without folding cut experts by the tensor-parallel size; those say so in `etp`.
    etp = tp if flags.get("system") in ("FSDP", "FSDP+EP") else parallel.get("etp") or 1
    sharding, shards = _sharding(parallel.get("fsdp"), flags)
    schedule = "1f1b" if vpp == 1 else "interleaved"
    if "interleaved" in str(flags.get("pp_schedule")):
        layers = record["model"]["layers"]
        schedule, vpp = "interleaved", max(vpp, round(layers / pp / 2))
    dp = max(1, world // (tp * cp * pp))
    stages = _stages(flags.get("pp_layout"))
    if pp > 1 and parallel.get("vpp") is None:
        vpp = _virtual(record, stages, pp, dp)
        schedule = "1f1b" if vpp == 1 else "interleaved"
    return ParallelDegrees(tp, cp, pp, vpp, ep, etp, dp, schedule, stages, sharding, _copies(shards, dp * cp))


def _virtual(record: Record, stages: str | None, pp: int, dp: int) -> int:
    """Virtual stages where a source does not print them: those of its stage string, or, where waiting for the pipeline
    would cost a quarter of the step, as many as there are layers, up to eight. Tuned runs do not wait that long."""
    layers = record["model"]["layers"]
    if stages is not None:
        number = len(parse_stages(stages, layers, record["model"].get("mtp") or 0))
        return max(1, number // pp)
    microbatches = record["gbs"] / (dp * (record.get("mbs") or 1))
    if (record.get("flags") or {}).get("pp_schedule") == "1f1b" or (
        microbatches >= 4 * pp and not _unstated(record, "VPP")
    ):
        return 1
    return next((v for v in (8, 7, 6, 5, 4, 3, 2) if layers % (pp * v) == 0), 1)


def _unstated(record: Record, what: str) -> bool:
    """Whether the record's notes say that its source does not print this."""
    return any(what in note and "not stated" in note for note in record.get("notes") or ())


def _stages(layout: object) -> str | None:
    """Stage strings as they are; "default" and descriptions in words are none."""
    return layout if isinstance(layout, str) and re.fullmatch(r"[EtmL|()*\d]+", layout) else None


def _copies(shards: int, ranks: int) -> int:
    return max(1, ranks // shards) if shards > 1 else 1


def _sharding(fsdp: object, flags: Record) -> tuple[Sharding, int]:
    if flags.get("megatron_fsdp") or flags.get("fsdp") or (isinstance(fsdp, str) and fsdp not in ("0", "")):
        return "zero3", 0
    if isinstance(fsdp, int) and fsdp > 0:
        return "zero3", fsdp
    if flags.get("system") == "Megatron-DeepSpeed" or flags.get("distributed_optimizer") is False:
        return "none", 0
    return "zero1", 0


def _batch(record: Record, degrees: ParallelDegrees) -> Batch:
    sequences = record.get("mbs") or 1
    microbatches = max(1, round(record["gbs"] / (degrees.dp * sequences)))
    return Batch(record["seq_len"], sequences, microbatches)


# ---- the framework ----


def _framework(record: Record) -> Framework:
    system = str((record.get("flags") or {}).get("system") or "")
    if "JAX" in system:
        return "jax"
    if "FSDP2" in system or "torchtitan" in system:
        return "fsdp2"
    return "deepspeed" if "DeepSpeed" in system else "megatron"


def _dispatcher(record: Record, degrees: ParallelDegrees) -> Dispatcher:
    if not record["model"]["moe"] or degrees.ep == 1:
        return "local"
    named = str((record.get("flags") or {}).get("dispatcher") or "")
    if named.startswith("deepep"):
        return "deepep"
    domain = (record.get("hardware") or {}).get("nvlink_domain") or 8
    if not named and _date(record.get("date")) > 2025.6 and (domain > 8 or degrees.ep > domain):
        # What tuned runs use on racks, and between nodes, since these dispatchers exist.
        return "hybridep" if domain > 8 else "deepep"
    return _DISPATCHERS.get(named, "all_to_all")


def _names(value: object) -> list[str]:
    """Lists, and lists that a source printed as a string."""
    if isinstance(value, str):
        return re.findall(r"[\w\-]+", value)
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []


def _recompute(flags: Record) -> Iterator[Recomputed]:
    value = flags.get("recompute")
    for name in [value] if isinstance(value, str) and value in _RECOMPUTED else _names(value):
        if name.startswith("not stated"):
            # The same release's other tables recompute these.
            yield from ("mla_up", "feed_forward", "experts")
        yield from _RECOMPUTED.get(name, ())


def _options(record: Record, degrees: ParallelDegrees) -> Options:
    flags = record.get("flags") or {}
    routing = str(flags.get("routing") or "")
    # A run without a forced balance sends its busiest rank more than the mean.
    natural = record["model"]["moe"] and not any(word in routing for word in ("balanced", "drop", "not stated"))
    return Options(
        framework=_framework(record),
        dispatcher=_dispatcher(record, degrees),
        ep_overlap=bool(flags.get("ep_overlap")),
        delay_wgrad=bool(flags.get("delay_wgrad")),
        recompute=frozenset(_recompute(flags)),
        graphs=_graphs(flags),
        graph_parts=frozenset(_names(flags.get("cuda_graph_scope"))),
        tp_overlap=_tensor_overlap(record, flags),
        gradient_overlap=flags.get("overlap_grad_reduce") is not False
        and "overlap paths disabled" not in str(flags.get("system")),
        paged_stash=bool(flags.get("paged_stash")),
        offloaded=frozenset(_names(flags.get("offload_modules")) + _names(flags.get("activation_offload"))),
        optimizer_on_host=bool(flags.get("optimizer_offload") or flags.get("optimizer_state_offload")),
        imbalance=1.3 if natural and routing else 1.0,
        drops="drop" in routing and "dropless" not in routing,
        compiled=bool(flags.get("compile")) or _framework(record) == "jax",
        date=_date(record.get("date")),
    )


def _tensor_overlap(record: Record, flags: Record) -> bool:
    """Where a record does not say: dense runs of Megatron overlap these collectives, and every recipe of one source."""
    stated = flags.get("tp_comm_overlap", flags.get("async_tp"))
    if stated is not None:
        return bool(stated)
    tuned = not record["model"]["moe"] or "dgxc" in str(record.get("source"))
    return tuned and _framework(record) == "megatron"


def _graphs(flags: Record) -> Graphs:
    implementation, scope = flags.get("cuda_graph_impl"), flags.get("cuda_graph_scope")
    if implementation == "full_iteration" or scope == "full_iteration":
        return "full"
    if implementation is None and scope is None and str(flags.get("routing")) == "token_drop":
        # Fixed shapes: these recipes record whole layers.
        return "full"
    return "partial" if implementation not in (None, "none") or _names(scope) else "none"


def _date(text: object) -> float:
    """2026-08-12 as 2026.58; a bare year as its middle; 0 if there is none."""
    found = re.search(r"(20)?(2\d)(?:[-.](\d\d))?", str(text))
    if not found:
        return 0.0
    month = int(found.group(3)) if found.group(3) else 7
    return 2000 + int(found.group(2)) + (month - 1) / 12


def _dtypes(record: Record, options: Options) -> Dtypes:
    flags, precision = record.get("flags") or {}, _FORMATS[record["precision"]]
    arguments = cast("Mapping[str, Any]", flags.get("precision_args") or {})
    gradients = 2.0 if "--grad-reduce-in-bf16" in arguments or flags.get("grad_reduce_in_fp32") is False else 4.0
    if options.framework in ("fsdp2", "jax"):
        # Parameters are held once, in float32, and cast where they are used.
        return Dtypes(precision, weight_bytes=4.0, gradient_bytes=4.0, master_bytes=0.0, moments_bytes=8.0)
    moments = 4.0 if flags.get("exp_avg_dtype") == "bf16" or arguments.get("--exp-avg-dtype") == "bf16" else 8.0
    weights = 1.0 if flags.get("fp8_param_gather") and precision != "bf16" else 2.0
    return Dtypes(precision, weights, gradients, 4.0, moments)
