"""Published measurements as workloads.

A record is one JSON object with a model, a cluster, a layout and flags, in the schema of public collections of training
runs: `model`, `hardware`, `parallel`, `flags`, `precision`, `seq_len`, `gbs`, `mbs`. Sources print what they like, so
many fields may be missing; what is assumed then is written here and nowhere else. Nothing that a record says about its
own result (its time, its memory) is read here: a prediction must not see the answer.

Flags are free words. Each is read, or ignored with a reason (`FLAGS_IGNORED`, `VALUES_IGNORED`), or listed as unread
(`unread_flags`): none is dropped silently.

A record becomes a `RunConfig`, with values that moefold plans and does not train; `record_model.py` reads its model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, cast, get_args

from moefold.blueprint.model_shape import shape_of
from moefold.blueprint.stages import parse_stages
from moefold.config.data import DataConfig
from moefold.config.memory import MemoryConfig, OffloadedActivation, Recomputed
from moefold.config.parallel import Overlap, ParallelConfig, PlannedDispatcherName, Sharding
from moefold.config.precision import ComputeFormat, Graphs, GraphScope, KernelsConfig, PrecisionConfig
from moefold.config.precision_recipes import RecipeName
from moefold.config.run import RunConfig
from moefold.hardware.cluster import Cluster, Network, gpu_named
from moefold.plan.dispatch_choice import OwnDispatcher
from moefold.plan.framework_rules import FrameworkName
from moefold.plan.published.record_model import nearest_config, shape_of_record
from moefold.plan.workload import MEGATRON_PRECISION, Framework, Workload

Record = Mapping[str, Any]

# Number formats as records print them: words, and recipes beside words of bfloat16.
_WORDS: dict[str, ComputeFormat] = {"bf16": "bfloat16", "fp16": "float16"}
_RECIPES: dict[str, RecipeName] = {
    "fp8": "fp8_tensor",
    "fp8_delayed": "fp8_delayed",
    "fp8_delayed_hybrid": "fp8_delayed",
    "fp8_tensorwise_current": "fp8_tensor",
    "fp8_tensorwise_dynamic": "fp8_tensor",
    "fp8_rowwise": "fp8_rowwise",
    "fp8_blockwise": "fp8_blockwise",
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
_DISPATCHERS: dict[str, OwnDispatcher | PlannedDispatcherName] = {
    "hybridep": "hybridep",
    "alltoall": "all_to_all",
    "allgather": "all_gather",
}
_READ = """activation_cpu_offload_layers activation_offload async_tp attention_backend attn compile cpu_offload_layers
cross_entropy_fusion cuda_graph_impl cuda_graph_scope cutedsl_fused_grouped_mlp delay_wgrad dispatcher
distributed_optimizer ep_overlap exp_avg_dtype fp8_param_gather fsdp grad_reduce_in_fp32 megatron_fsdp
mock_data offload_modules optimizer optimizer_offload optimizer_state_offload overlap_grad_reduce
paged_stash peft pp_layout pp_schedule precision_args recompute routing sequence_parallel system
tp_comm_overlap"""
FLAGS_READ = frozenset(_READ.split())
_SAID_ELSEWHERE = "another field of the record says it"
_ONE_RATE = "kernels of this kind have one rate per GPU and format; too few runs have it to fit another"
# Flags that predictions do without, and why.
FLAGS_IGNORED: Mapping[str, str] = {
    "local_batch": f"{_SAID_ELSEWHERE}: mbs",
    "num_layers": f"{_SAID_ELSEWHERE}: model.layers",
    "task": f"{_SAID_ELSEWHERE}: task",
    "attention_parallel": f"{_SAID_ELSEWHERE}: parallel",
    "expert_parallel": f"{_SAID_ELSEWHERE}: parallel",
    "recompute_granularity": f"{_SAID_ELSEWHERE}: recompute",
    "fine_grained_offload": f"{_SAID_ELSEWHERE}: offload_modules",
    "cuda_graph": "does not say what is recorded; cuda_graph_impl and cuda_graph_scope do",
    "recompute_num_layers": "full recomputation is planned of all layers",
    "competitor_prediction": "another tool's prediction, no property of the run",
    "p2p_overlap": "said of runs whose system says that overlaps are disabled, which is read",
    "overlap_param_gather": "goes with overlap_grad_reduce, which is read",
    "shared_expert_overlap": "the shared expert is planned as computed beside nothing; no record has it on",
    "fp8_attention": _ONE_RATE,
    "fp8_dot_product_attention": _ONE_RATE,
    "experts": _ONE_RATE,
    "fp8_dispatch": "exchanges of other frameworks are planned in the width of activations",
    "optimizer_states": "words, of one run whose memory nobody printed",
}
# Values of flags that are read otherwise.
VALUES_IGNORED: Mapping[tuple[str, str], str] = {
    ("recompute", "shared_experts"): "the shared expert is planned with the feed-forward part",
    ("recompute", "rmsnorm"): "of one run whose memory nobody printed",
    ("recompute", "swiglu"): "of one run whose memory nobody printed",
    ("dispatcher", "custom IB+NVLink all-to-all, 20 SMs, node-limited routing (4 nodes)"): "planned as an all-to-all",
}
# Vocabularies are padded to a multiple of this, times the tensor-parallel size.
_VOCAB_MULTIPLE = 128


def workload_of_record(record: Record) -> Workload:
    """The workload that a record describes."""
    flags = record.get("flags") or {}
    shape, framework = shape_of_record(record["model"]), _framework(record)
    run = RunConfig(
        name=str(record.get("id") or "published"),
        model=nearest_config(shape, drops=_drops(flags)),
        parallel=_parallel(record),
        precision=_precision(record, framework.name),
        kernels=KernelsConfig(graphs=_graphs(flags), graph_scope=_graph_scope(flags)),
        data=DataConfig(record["seq_len"], record["gbs"], record.get("mbs") or 1),
        memory=_memory(flags),
    )
    same = shape_of(run.model) == shape
    return Workload(run, _cluster(record), framework, _imbalance(record), None if same else shape)


def unread_flags(record: Record) -> Iterator[str]:
    """Flags and values of flags that predictions neither use nor ignore for a reason."""
    flags = record.get("flags") or {}
    yield from (name for name in flags if name not in FLAGS_READ and name not in FLAGS_IGNORED)
    known: Mapping[str, Iterable[str]] = {
        "recompute": _RECOMPUTED,
        "offload_modules": get_args(OffloadedActivation),
        "activation_offload": get_args(OffloadedActivation),
        "cuda_graph_scope": (*get_args(GraphScope), "full_iteration"),
        "cuda_graph_impl": ("none", "local", "transformer_engine", "full_iteration"),
        "dispatcher": _DISPATCHERS,
    }
    for name, values in known.items():
        value = flags.get(name)
        # Names with blanks in them are one name, which `_names` would cut.
        whole = isinstance(value, str) and (value in values or (name, value) in VALUES_IGNORED or name == "dispatcher")
        for each in [str(value)] if whole else _names(value):
            start = "not stated" if name == "recompute" else "deepep" if name == "dispatcher" else None
            if each not in values and (name, each) not in VALUES_IGNORED and not (start and each.startswith(start)):
                yield f"{name} {each}"


# ---- the cluster and the parallel degrees ----


def _cluster(record: Record) -> Cluster:
    # A record of feasibility names the GPU and the number alone.
    hardware = record.get("hardware") or {"gpu": record["gpu"], "num_gpus": record["num_gpus"]}
    gpu = gpu_named(_gpu_in_words(record) or hardware["gpu"])
    network: Network = "efa" if "EFA" in str(hardware.get("network")) else "ib"
    nic = hardware.get("nic_gb_s_per_gpu") or gpu.nic_gb_s
    return Cluster(gpu, hardware["num_gpus"], hardware.get("nvlink_domain") or gpu.domain, nic, network)


# Where a source names the family of a GPU alone, and its notes tell which one it is. 184 GiB are GB200's (torch counts
# 178 on B200). Those who wrote "power limited B200" say 750 W elsewhere (pull request 3566 of pytorch/ao).
_IN_WORDS = {"184 GiB HBM": "GB200", "power-limited B200": "B200-750W"}


def _gpu_in_words(record: Record) -> str | None:
    notes = " ".join(record.get("notes") or ())
    return next((gpu for words, gpu in _IN_WORDS.items() if words in notes), None)


def _world(record: Record) -> int:
    return int((record.get("hardware") or record)["num_gpus"])


def _parallel(record: Record) -> ParallelConfig:
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
    named: tuple[tuple[Overlap, str], ...] = (("ep", "ep_overlap"), ("wgrad", "delay_wgrad"))
    return ParallelConfig(
        tp=tp,
        cp=cp,
        pp=pp,
        ep=ep,
        etp=etp,
        vpp=vpp,
        schedule=schedule,
        stages=stages,
        sharding=sharding,
        overlap=tuple(name for name, flag in named if flags.get(flag)),
        dp_replicate=_copies(shards, dp * cp),
        dispatcher=_dispatcher(record, ep),
    )


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
        return "fsdp", 0
    if isinstance(fsdp, int) and fsdp > 0:
        return "fsdp", fsdp
    if flags.get("system") == "Megatron-DeepSpeed" or flags.get("distributed_optimizer") is False:
        return "none", 0
    return "zero1", 0


# ---- the framework ----


def _framework_name(record: Record) -> FrameworkName:
    system = str((record.get("flags") or {}).get("system") or "")
    if "JAX" in system:
        return "jax"
    if "FSDP2" in system or "torchtitan" in system:
        return "fsdp2"
    return "deepspeed" if "DeepSpeed" in system else "megatron"


def _dispatcher(record: Record, ep: int) -> OwnDispatcher | PlannedDispatcherName:
    if not record["model"]["moe"] or ep == 1:
        return "all_to_all"
    named = str((record.get("flags") or {}).get("dispatcher") or "")
    if named.startswith("deepep"):
        return "deepep"
    domain = (record.get("hardware") or {}).get("nvlink_domain") or 8
    if not named and _date(record.get("date")) > 2025.6 and (domain > 8 or ep > domain):
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


def _memory(flags: Record) -> MemoryConfig:
    offloaded = _names(flags.get("offload_modules")) + _names(flags.get("activation_offload"))
    return MemoryConfig(
        recompute=tuple(dict.fromkeys(_recompute(flags))),
        offload=tuple(name for name in get_args(OffloadedActivation) if name in offloaded),
        optimizer=_optimizer_place(flags),
    )


def _optimizer_place(flags: Record) -> Literal["device", "host", "cpu"]:
    """A sweep says how much of the states, "baseline" for nothing; predictions know all or nothing."""
    if flags.get("optimizer_offload") not in (None, False, "baseline"):
        return "cpu"
    return "host" if flags.get("optimizer_state_offload") else "device"


def _framework(record: Record) -> Framework:
    flags, name = record.get("flags") or {}, _framework_name(record)
    return Framework(
        name,
        date=_date(record.get("date")),
        compiled=bool(flags.get("compile")) or name == "jax",
        tp_overlap=_tensor_overlap(record, flags),
        gradient_overlap=flags.get("overlap_grad_reduce") is not False
        and "overlap paths disabled" not in str(flags.get("system")),
        paged_stash=bool(flags.get("paged_stash")),
        fused_experts=bool(flags.get("cutedsl_fused_grouped_mlp")),
        fused_router=_fused_router(record),
    )


# Whose presets fuse the router since Transformer Engine can (2.6, of July 2025).
_FUSED_ROUTERS = ("Bridge docs", "verification_cards", "moe_recipes", "ModelZoo", "Scalable Training of MoE Models")
_SINCE = 2025.5


def _fused_router(record: Record) -> bool:
    source = str(record.get("source"))
    return _date(record.get("date")) >= _SINCE and any(name in source for name in _FUSED_ROUTERS)


def _imbalance(record: Record) -> float:
    """A run without a forced balance sends its busiest rank more than the mean. torchtitan forces none."""
    flags = record.get("flags") or {}
    routing = str(flags.get("routing") or ("natural" if "torchtitan" in str(flags.get("system")) else ""))
    natural = record["model"]["moe"] and not any(word in routing for word in ("balanced", "drop", "not stated"))
    return 1.3 if natural and routing else 1.0


def _drops(flags: Record) -> bool:
    routing = str(flags.get("routing") or "")
    return "drop" in routing and "dropless" not in routing


def _tensor_overlap(record: Record, flags: Record) -> bool:
    """Where a record does not say: dense runs of Megatron overlap these collectives, and every recipe of one source."""
    stated = flags.get("tp_comm_overlap", flags.get("async_tp"))
    if stated is not None:
        return bool(stated)
    tuned = not record["model"]["moe"] or "dgxc" in str(record.get("source"))
    return tuned and _framework_name(record) == "megatron"


def _graphs(flags: Record) -> Graphs:
    implementation, scope = flags.get("cuda_graph_impl"), flags.get("cuda_graph_scope")
    if implementation == "full_iteration" or scope == "full_iteration":
        return "full"
    if implementation is None and scope is None and str(flags.get("routing")) == "token_drop":
        # Fixed shapes: these recipes record whole layers.
        return "full"
    return "partial" if implementation not in (None, "none") or _names(scope) else "none"


def _graph_scope(flags: Record) -> tuple[GraphScope, ...]:
    named = _names(flags.get("cuda_graph_scope"))
    return tuple(scope for scope in get_args(GraphScope) if scope in named)


def _date(text: object) -> float:
    """2026-08-12 as 2026.58; a bare year as its middle; 0 if there is none."""
    found = re.search(r"(20)?(2\d)(?:[-.](\d\d))?", str(text))
    if not found:
        return 0.0
    month = int(found.group(3)) if found.group(3) else 7
    return 2000 + int(found.group(2)) + (month - 1) / 12


def formats_of(record: Record) -> tuple[ComputeFormat, RecipeName | None]:
    """`precision.compute` and `precision.recipe`."""
    printed = record["precision"]
    return (_WORDS[printed], None) if printed in _WORDS else ("bfloat16", _RECIPES[printed])


def _precision(record: Record, framework: FrameworkName) -> PrecisionConfig:
    flags, (compute, recipe) = record.get("flags") or {}, formats_of(record)
    if framework in ("fsdp2", "jax"):
        # Parameters are held once, in float32, and cast where they are used.
        return PrecisionConfig("float32", compute, recipe)
    arguments = cast("Mapping[str, Any]", flags.get("precision_args") or {})
    narrow_sums = "--grad-reduce-in-bf16" in arguments or flags.get("grad_reduce_in_fp32") is False
    narrow_moments = flags.get("exp_avg_dtype") == "bf16" or arguments.get("--exp-avg-dtype") == "bf16"
    return replace(
        MEGATRON_PRECISION,
        params="float8" if flags.get("fp8_param_gather") and recipe is not None else "bfloat16",
        compute=compute,
        recipe=recipe,
        gradients="bfloat16" if narrow_sums else "float32",
        moments="bfloat16" if narrow_moments else "float32",
    )
