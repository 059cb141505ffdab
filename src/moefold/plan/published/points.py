"""From published records to points: workloads with measured step times, to which the planner's constants are fitted.

A point is a workload, its measured step, and the groups it must be left out with: its **leak group** (the same model,
layout and GPU in any release, or a whole sweep), its GPU, and its family of models.

Records do not state all that memory depends on. `completed` fills in fields that a source does not print, so that the
record can be read as a workload at all; `with_details` sets the defaults of its framework. Neither reads results.

`nearest_record` finds the measured run to hold beside a plan: first of a model of about that size, then on that GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from typing import Any

from moefold.blueprint.model_shape import Attention
from moefold.blueprint.param_counts import count_parameters
from moefold.blueprint.stages import unfolded
from moefold.config.memory import Recomputed
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.errors import MoefoldError
from moefold.plan.published.records import Record, formats_of, workload_of_record
from moefold.plan.published.release_presets import with_preset
from moefold.plan.workload import AttentionKernels, Workload, changed
from moefold.units import format_count

# Vocabularies of tokenizers that test configurations name; others have GPT-2's.
_VOCABULARIES = {"NullTokenizer": 131072, "Llama2Tokenizer": 32000}
_GPT2_VOCABULARY = 50257
# Enough microbatches to fill any pipeline, where a source prints none.
_MICROBATCHES_PER_RANK = 8
# Rows of the busiest rank over the mean, where untrained routers choose over made-up tokens (a study of a 30B hybrid
# saw 10 GB more on the busiest rank).
MOCK_IMBALANCE = 2.0
# Sources whose runs use the presets for speed.
_TUNED = ("Megatron-Bridge", "dgxc-benchmarking", "moe_recipes", "ModelZoo", "NeMo docs", "examples/llama")
# Recipes whose presets keep the weights themselves in eight bits.
_NATIVE_FP8 = ("fp8_delayed", "fp8_tensor", "mxfp8")


def completed(record: Record) -> Record:
    """The same record with what it lacks: microbatches, the experts' dim, the vocabulary, dense layers, vpp."""
    made = {**record, "model": _completed_model(record["model"]), "parallel": dict(record["parallel"])}
    parallel, flags = made["parallel"], record.get("flags") or {}
    tp, pp, cp = (parallel.get(axis) or 1 for axis in ("tp", "pp", "cp"))
    layout = flags.get("pp_layout")
    if isinstance(layout, str) and re.fullmatch(r"[EtmL|()*\d]+", layout):
        # A layout says how many stages there are, and how many MTP modules.
        letters = unfolded(layout)
        parallel["vpp"] = parallel.get("vpp") or max(1, (letters.count("|") + 1) // pp)
        made["model"]["mtp"] = letters.count("m")
    if not parallel.get("etp") and (parallel.get("ep") or 1) > 1:
        # The framework's own default.
        parallel["etp"] = tp
    if not parallel.get("fsdp") and any("FSDP" in note for note in record.get("notes") or ()):
        parallel["fsdp"] = "stated in words"
    if not record.get("gbs"):
        world = (record.get("hardware") or record)["num_gpus"]
        dp = max(1, world // (tp * cp * pp))
        made["gbs"] = dp * (record.get("mbs") or 1) * pp * _MICROBATCHES_PER_RANK
    return made


def is_test_configuration(record: Record) -> bool:
    """Of a framework's own functional tests: its defaults hold, not those of tuned runs."""
    return record.get("flags_source") == "model_config.yaml"


def _completed_model(model: Record) -> dict[str, Any]:
    made = dict(model)
    if model.get("moe") and not model.get("moe_ffn"):
        made["moe_ffn"] = model.get("ffn") or 4 * model["hidden"]
    if not model.get("vocab"):
        vocabulary = _VOCABULARIES.get(str(model.get("tokenizer")), _GPT2_VOCABULARY)
        multiple = model.get("make_vocab_size_divisible_by") or 128
        made["vocab"] = -(-vocabulary // multiple) * multiple
    pattern = re.fullmatch(r"\(\[0\]\*(\d+)\+\[1\]\*\d+\)", str(model.get("moe_layer_freq_pattern")))
    if pattern:
        made["dense_first_layers"] = int(pattern.group(1))
    return made


def with_details(record: Record, workload: Workload) -> Workload:
    """The workload with the defaults of its framework."""
    flags = record.get("flags") or {}
    framework = replace(
        workload.framework,
        sequence_parallel=_sequence_parallel(record),
        attention=_attention(record, workload),
        fused_loss=_fused_loss(record, workload),
        dropout=is_test_configuration(record) and not _is_latent(workload) and record["model"].get("act") == "gelu",
    )
    imbalance = MOCK_IMBALANCE if _routes_mock_data(record) else workload.imbalance
    layers = int(flags.get("cpu_offload_layers") or flags.get("activation_cpu_offload_layers") or 0)
    run = replace(
        workload.run,
        precision=_precision(record, workload),
        # Adapters are small; what they adapt has neither gradients nor states.
        optim=replace(workload.run.optim, trained="adapters" if flags.get("peft") == "lora" else "all"),
    )
    return changed(
        replace(workload, run=run, framework=framework, imbalance=imbalance),
        memory={"recompute": _recomputed(record, workload), "offload_layers": layers},
        parallel={"dp_replicate": _replicas(record, workload)},
    )


def _attention(record: Record, workload: Workload) -> AttentionKernels:
    """Megatron-DeepSpeed's runs are of its default attention, which writes its scores; no record says otherwise.
    torchtitan asks torch for flash attention on H100, and for cuDNN's on later GPUs (its pull request 1196)."""
    flags, framework = record.get("flags") or {}, workload.framework
    if flags.get("attention_backend") == "unfused" or framework.name == "deepspeed":
        return "unfused"
    torch = "torchtitan" in str(flags.get("system")) or flags.get("attn") in ("torch sdpa", "flex")
    return "flash2" if torch and workload.cluster.gpu.architecture == "sm90" else "cudnn"


def _replicas(record: Record, workload: Workload) -> int:
    """A stated number of shards counts ranks of dp; ranks of cp share their work."""
    shards = record["parallel"].get("fsdp")
    if workload.parallel.sharding != "fsdp" or not isinstance(shards, int) or shards < 2:
        return workload.parallel.dp_replicate
    return max(1, workload.dp // shards)


def _routes_mock_data(record: Record) -> bool:
    """An untrained router over made-up tokens, not forced to balance."""
    flags = record.get("flags") or {}
    return bool(record["model"].get("moe") and flags.get("mock_data") and not flags.get("routing"))


def _is_latent(workload: Workload) -> bool:
    return any(isinstance(layer.mixer, Attention) and layer.mixer.is_latent for layer in workload.model.layers)


def _sequence_parallel(record: Record) -> bool:
    stated = (record.get("flags") or {}).get("sequence_parallel")
    if stated is None:
        return not is_test_configuration(record)
    return bool(stated)


def _fused_loss(record: Record, workload: Workload) -> bool:
    """Tuned Megatron runs overwrite the logits, compilers fuse; tests and torchtitan before 2025 do neither."""
    stated = (record.get("flags") or {}).get("cross_entropy_fusion")
    if stated is not None:
        return bool(stated)
    if workload.framework.name == "fsdp2":
        system = str((record.get("flags") or {}).get("system"))
        return "AutoModel" in system or (workload.framework.compiled and workload.framework.date > 2025.2)
    return workload.framework.name in ("megatron", "jax") and not is_test_configuration(record)


def _recomputed(record: Record, workload: Workload) -> tuple[Recomputed, ...]:
    """Defaults: torchtitan recomputes operator by operator; MaxText and AutoModel recompute whole layers."""
    flags = record.get("flags") or {}
    system = str(flags.get("system") or "")
    if not flags.get("recompute"):
        if "torchtitan" in system:
            return ("norms", "activation")
        if "MaxText" in system or "AutoModel" in system:
            return ("full",)
    return workload.run.memory.recompute


def _precision(record: Record, workload: Workload) -> PrecisionConfig:
    precision, flags = workload.run.precision, record.get("flags") or {}
    optimizer = str(flags.get("optimizer") or "")
    if "8bit" in optimizer:
        precision = replace(precision, moments="float8")
    if "muon" in optimizer:
        # One moment in float32, which is as many bytes as two of 16 bits.
        precision = replace(precision, moments="bfloat16")
    if workload.framework.name != "megatron" or not _is_tuned(record) or flags.get("peft") == "lora":
        return precision
    # Presets of tuned runs reduce gradients as words, hold weights in eight bits where the format allows, and those of
    # MoE models hold moments as words.
    return replace(
        precision,
        gradients="bfloat16",
        params="float8" if precision.recipe in _NATIVE_FP8 else precision.params,
        moments="bfloat16" if workload.model.is_moe else precision.moments,
    )


def _is_tuned(record: Record) -> bool:
    source = record.get("source")
    name = str(source.get("name") if isinstance(source, Mapping) else source)
    return any(word in name for word in _TUNED)


@dataclass(frozen=True)
class Point:
    id: str
    workload: Workload
    seconds: float
    leak_group: str
    gpu: str
    family: str


def published_workload(record: Record) -> Workload:
    """The workload of a record, with what its source leaves unsaid filled in."""
    return with_details(record, workload_of_record(completed(record)))


def read_records(folder: Path) -> list[Record]:
    """All records of a collection, from its `published*.jsonl` files."""
    files = sorted(folder.glob("published*.jsonl"))
    if not files:
        raise MoefoldError(f"{folder}: no published*.jsonl here; name the folder that holds the collection")
    lines = (line for path in files for line in path.read_text("utf-8").splitlines() if line.strip())
    return [with_preset(json.loads(line)) for line in lines]


def points_of(records: Iterable[Record]) -> list[Point]:
    """Those records whose layout is complete and whose step time is known."""
    return [_point(record) for record in records if (record.get("use") or {}).get("time")]


def _point(record: Record) -> Point:
    target: dict[str, Any] = record["target"]
    return Point(
        id=record["id"],
        workload=published_workload(record),
        seconds=float(target["step_time_s"]),
        leak_group=record["leak_group"],
        gpu=record["hardware"]["gpu"],
        family=record["model"]["family"],
    )


def nearest_record(run: RunConfig, gpu: str, num_gpus: int, records: Iterable[Record]) -> Record | None:
    """The measured pretraining whose distance from this run is least; None if no record says its sizes and its rate.

    Sizes count most: the same model on another GPU is nearer than another model on this one.
    """
    sizes = count_parameters(run.model)
    timed = (record for record in records if (record.get("use") or {}).get("time"))
    trained = (record for record in timed if record.get("task", "pretrain") == "pretrain")
    is_moe = run.model.moe is not None
    known = [each for each in trained if each["model"].get("params_total") and bool(each["model"].get("moe")) == is_moe]

    def distance(record: Record) -> float:
        model, hardware = record["model"], record["hardware"]
        active = model.get("params_active") or model["params_total"]
        of_model = _factor(sizes.matrices, model["params_total"]) + _factor(sizes.active_matrices, active)
        of_job = _factor(num_gpus, hardware["num_gpus"]) + _factor(run.data.seq_len, record["seq_len"])
        other_format = formats_of(record) != (run.precision.compute, run.precision.recipe)
        return float(8 * of_model + 4 * (hardware["gpu"] != gpu) + of_job + other_format)

    return min(known, key=lambda record: (distance(record), record["id"]), default=None)


def record_words(record: Record) -> tuple[str, str]:
    """What was measured, and whose figure it is."""
    hardware, parallel, source = record["hardware"], record["parallel"], record["source"]
    sizes = ((axis, parallel.get(axis) or 1) for axis in ("tp", "cp", "pp", "vpp", "ep", "etp"))
    layout = " ".join(f"{axis}{size}" for axis, size in sizes if size > 1)
    model = record["model"]
    # Some benchmarks have fewer layers than the model that they are named after.
    name = f"{model.get('name') or model['key']} ({format_count(model['params_total'])} parameters)"
    job = f"{hardware['num_gpus']} {hardware['gpu']}, {record['precision']}, {record['seq_len']} tokens, {layout}"
    # Sources are named with the file in which the figure is.
    return f"{name} on {job}", f"{re.split(r' (?=[^ ]*/)', source['name'])[0]}, {record['date']}"


def _factor(one: float, other: float) -> float:
    """How far apart two sizes are, in powers of two."""
    return abs(log2(one / other))
