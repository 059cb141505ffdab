"""The command that starts a planned workload, and what of it moefold cannot run.

A workload has a run, so the command is the keys in which that run differs from the one the user named. Where the
planned framework is another one, its run may have values that this trainer lacks (`checks/planned_only.py`): those are
listed by `beyond_moefold`, and the command is that of the nearest run without them. `settings_of` is a layout in the
words of that other framework, for its rules (`plan/framework_rules.py`) and commands (`plan/framework_commands.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import get_args

from moefold.blueprint.model_shape import shape_of
from moefold.blueprint.stages import balanced_stages, parse_stages, print_stages
from moefold.checks.planned_only import PLANNED_ONLY, planned_only
from moefold.config.memory import Recomputed
from moefold.config.precision import Graphs, GraphScope
from moefold.config.run import RunConfig
from moefold.hardware.cluster import Cluster
from moefold.plan.framework_rules import Settings
from moefold.plan.memory.saving_steps import DEFAULTS
from moefold.plan.search.space import LayoutChoice, Limits, Recompute
from moefold.plan.stage_contents import contents_of, written_stages
from moefold.plan.workload import PlannedFormat, Workload, changed
from moefold.schedule.names import SCHEDULES

# Keys that a plan may set, in the order in which a command lists them.
_PLANNED_KEYS = (
    *(f"parallel.{axis}" for axis in ("tp", "cp", "pp", "ep", "etp", "vpp", "schedule", "stages")),
    *("parallel.dp_replicate", "parallel.edp_replicate", "parallel.rank_order.dense", "parallel.rank_order.expert"),
    *("data.micro_batch", "data.global_batch", "data.seq_len", "memory.recompute"),
    *("parallel.dispatcher", "parallel.ep_inner", "precision.compute", "precision.recipe", "parallel.sharding"),
    *("parallel.param_sync", "parallel.ranks_per_host", "parallel.dispatch_sms"),
    *DEFAULTS,
)
_ROWS = {row.path: row for row in PLANNED_ONLY}


def beyond_moefold(workload: Workload) -> list[str]:
    """What this workload has that moefold cannot run, in words; empty if it can."""
    # Overlaps have a schedule of their own here, or none.
    found = [row.described(values) for row, values in planned_only(workload.run) if row.path != "parallel.overlap"]
    if order_of(workload) is None:
        found.append(f"{_traits(workload)} over {workload.parallel.vpp} stages per rank")
    return found


def order_of(workload: Workload) -> str | None:
    """The name of moefold's schedule for this workload; None if there is none."""
    parallel, wanted = workload.parallel, (workload.ep_overlap, workload.delay_wgrad)

    def suits(name: str) -> bool:
        schedule = SCHEDULES[name]
        fits = not schedule.problems(parallel.pp, parallel.vpp, workload.microbatches)
        return fits and (schedule.overlaps, schedule.splits_backward) == wanted

    if parallel.schedule in SCHEDULES and suits(parallel.schedule):
        return parallel.schedule
    return next((name for name in ("1f1b", "interleaved", *SCHEDULES) if suits(name)), None)


def _traits(workload: Workload) -> str:
    named = (
        "overlapped expert communication" * workload.ep_overlap,
        "deferred weight gradients" * workload.delay_wgrad,
    )
    return f"{workload.parallel.schedule} with {' and '.join(filter(None, named)) or 'plain passes'}"


def changes_to_run(workload: Workload, run: RunConfig) -> dict[str, str]:
    """The dotted keys in which ``run`` differs from the workload's, with the workload's values as on a command line.

    Values that cannot be trained are left out.
    """
    changes: dict[str, str] = {}
    for path in _PLANNED_KEYS:
        value = _value_at(workload.run, path)
        if path == "parallel.schedule":
            value = order_of(workload) or value
        if path in _ROWS:
            trained = _ROWS[path].trained
            if isinstance(value, tuple):
                value = tuple(item for item in value if item in trained)
            elif value not in trained:
                continue
        if value != _value_at(run, path):
            changes[path] = _word(value)
    return changes


def with_stages(workload: Workload) -> Workload:
    """Stages written out, where the trainer would divide layers otherwise."""
    num_stages = workload.parallel.pp * workload.parallel.vpp
    if workload.parallel.stages is not None or num_stages == 1:
        return workload
    planned = stage_string(workload)
    if planned == print_stages(balanced_stages(shape_of(workload.run.model), num_stages)):
        return workload
    return changed(workload, parallel={"stages": planned})


def stage_string(workload: Workload) -> str:
    """The layers of every stage as the prediction distributed them."""
    stages = contents_of(workload.model, workload.parallel.pp * workload.parallel.vpp, written_stages(workload))
    letters = "|".join(
        "E" * stage.embedding + "t" * sum(number for _, number in stage.layers) + "m" * stage.mtp + "L" * stage.head
        for stage in stages
    )
    return print_stages(parse_stages(letters, len(workload.model.layers), workload.model.mtp))


def launch_words(workload: Workload, name: str, changes: Mapping[str, str]) -> list[str]:
    """What to type once per node, in pieces that belong together. ``name`` is the run's recipe or file."""
    started = ["-m moefold.cli.main", f"train {shlex.quote(name)}"]
    words = (f"--{path} {shlex.quote(value)}" for path, value in changes.items())
    return [*torchrun(workload.cluster), *started, *words]


def torchrun(cluster: Cluster) -> list[str]:
    """What starts a process on every GPU of a node, up to the program."""
    per_node = min(cluster.gpu.per_node, cluster.num_gpus)
    nodes = -(-cluster.num_gpus // per_node)
    # A fixed port and no rendezvous service: torch's c10d service unpickles what reaches its port, from any host. On
    # one node too torchrun starts that service, with --standalone as without it, unless a port is given.
    meet = ["--master-port 29500"]
    if nodes > 1:
        meet = [f"--nnodes {nodes}", "--node-rank $NODE_RANK", "--master-addr $HEAD", "--master-port 29500"]
    return ["torchrun", *meet, f"--nproc-per-node {per_node}"]


def folded(words: Sequence[str], dim: int) -> str:
    """The command over several lines, as a shell reads it."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 3 > dim:
            lines.append("    ")
        lines[-1] += word if not lines[-1].strip() else f" {word}"
    return " \\\n".join(lines)


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)


def _value_at(run: RunConfig, path: str) -> object:
    value: object = run
    for name in path.split("."):
        value = getattr(value, name)
    return value


# ---- a layout in another framework's words ----

GRAPHED: tuple[GraphScope, ...] = ("attn", "moe_router", "moe_preprocess")
_MEGATRON_MODULES: dict[Recomputed, str] = {
    "norms": "layernorm",
    "activation": "moe_act",
    "experts": "moe",
    "feed_forward": "mlp",
    "mla_up": "mla_up_proj",
    "core_attention": "core_attn",
    "attention": "attention",
}
MEGATRON_FP8: dict[PlannedFormat, str] = {
    "fp8_tensor": "tensorwise",
    "fp8_delayed": "delayed",
    "fp8_blockwise": "blockwise",
    "fp8_rowwise": "rowwise",
    "mxfp8": "mxfp8",
}
MEGATRON_GRAPHS: dict[Graphs, str] = {"none": "none", "partial": "transformer_engine", "full": "full_iteration"}
_TORCHTITAN_FORMATS: dict[PlannedFormat, str] = {
    "bfloat16": "none",
    "float16": "none",
    "float32": "none",
    "fp8_rowwise": "float8_rowwise",
    "mxfp8": "mxfp8",
}
# Per-operator selective checkpointing keeps matmuls and computes the rest again.
_SELECTIVE: Recompute = frozenset({"norms", "activation"})


def settings_of(choice: LayoutChoice, limits: Limits) -> Settings:
    """The candidate as settings of the framework, by the names that it has for them."""
    if limits.framework == "megatron":
        return _megatron_settings(choice, limits)
    return _torchtitan_settings(choice, limits) if limits.framework == "fsdp2" else {}


def _megatron_settings(choice: LayoutChoice, limits: Limits) -> dict[str, object]:
    flex = choice.dispatcher in ("deepep", "hybridep")
    modules = tuple(_MEGATRON_MODULES[part] for part in get_args(Recomputed) if part in choice.recompute - {"full"})
    granularity = "full" if "full" in choice.recompute else "selective" if modules else None
    scopes = GRAPHED if limits.moe else ("attn",)
    return {
        "tensor_model_parallel_size": choice.tp,
        "context_parallel_size": choice.cp,
        "pipeline_model_parallel_size": choice.pp,
        "virtual_pipeline_model_parallel_size": choice.vpp if choice.vpp > 1 else None,
        "expert_model_parallel_size": choice.ep,
        "expert_tensor_parallel_size": choice.etp,
        "sequence_parallel": choice.tp > 1,
        "num_moe_experts": limits.experts if limits.moe else None,
        "moe_token_dispatcher_type": "flex"
        if flex
        else "allgather"
        if choice.dispatcher == "all_gather"
        else "alltoall",
        "moe_flex_dispatcher_backend": choice.dispatcher if flex else None,
        "moe_expert_capacity_factor": 1.0 if limits.drops else None,
        "moe_pad_expert_input_to_capacity": limits.drops and choice.graphs != "none",
        "moe_paged_stash": choice.graphs == "full" and limits.moe and not limits.drops,
        "overlap_moe_expert_parallel_comm": choice.ep_overlap,
        "delay_wgrad_compute": choice.delay_wgrad,
        "recompute_granularity": granularity,
        "recompute_modules": modules,
        "cuda_graph_impl": MEGATRON_GRAPHS[choice.graphs],
        "cuda_graph_modules": scopes if choice.graphs == "partial" else (),
        "bf16": choice.format not in ("float16", "float32"),
        "fp16": choice.format == "float16",
        "fp8": "e4m3" if choice.format in MEGATRON_FP8 else None,
        "fp8_recipe": MEGATRON_FP8.get(choice.format),
        "fp4": "e2m1" if choice.format == "nvfp4" else None,
        "mtp_num_layers": limits.mtp or None,
        "multi_latent_attention": limits.latent,
        "use_megatron_fsdp": choice.sharding == "fsdp",
        "use_distributed_optimizer": choice.sharding in ("zero1", "fsdp"),
    }


def _torchtitan_settings(choice: LayoutChoice, limits: Limits) -> dict[str, object]:
    replicas = limits.world // (choice.tp * choice.cp * choice.pp)
    shards = replicas // choice.replicate
    kept: dict[Recompute, str] = {frozenset(): "none", _SELECTIVE: "selective", frozenset({"full"}): "full"}
    backends = {"local": "standard", "all_to_all": "standard"}
    return {
        "tensor_parallel_degree": choice.tp,
        "context_parallel_degree": choice.cp,
        "pipeline_parallel_degree": choice.pp,
        "pipeline_parallel_schedule": "1F1B" if choice.vpp == 1 else "Interleaved1F1B",
        "stages_per_rank": choice.vpp,
        "expert_parallel_degree": choice.ep,
        "expert_tensor_parallel_degree": choice.etp,
        "data_parallel_replicate_degree": choice.replicate,
        "data_parallel_shard_degree": shards,
        "ranks_beyond_mesh": limits.world - shards * choice.replicate * choice.tp * choice.cp * choice.pp,
        "ranks_beyond_ep": shards * choice.cp * choice.tp % choice.ep,
        "uneven_tokens": limits.seq_len % (choice.tp * (2 * choice.cp if choice.cp > 1 else 1)),
        "ep_overlap": choice.ep_overlap,
        "delay_wgrad": choice.delay_wgrad,
        "comm_backend": backends.get(choice.dispatcher, choice.dispatcher),
        "activation_checkpoint": kept.get(choice.recompute, "other"),
        "quantization": _TORCHTITAN_FORMATS.get(choice.format, choice.format),
        "training_dtype": choice.format,
        "sharding": choice.sharding,
        "cuda_graphs": choice.graphs,
        "tied": limits.tied,
        "mtp": limits.mtp > 0,
    }


# ---- arguments of another framework ----


@dataclass(frozen=True)
class FrameworkCommand:
    """What to type once per node, in pieces that belong together, and what of the run it does not say."""

    program: str
    words: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    @property
    def introduction(self) -> str:
        without = f" (it is not told: {'; '.join(self.left_out)})" if self.left_out else ""
        return f"With {self.program}{without}:"


def flags(settings: Mapping[str, object]) -> Iterator[str]:
    """As argparse reads them: `--name value`, `--name` alone where it is true, nothing where it is off."""
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            yield flag
        elif isinstance(value, tuple) and value:
            yield f"{flag} {' '.join(map(str, value))}"
        elif value is not None and value is not False and value != ():
            yield f"{flag} {shlex.quote(str(value))}"


def layer_pattern(layers: Sequence[int]) -> str:
    """As Megatron evaluates it: `[0]*3+[1]*58`, or a period that repeats, `[1,0]*18`."""
    for period in range(2, len(layers) // 2 + 1):
        repeats = len(layers) // period
        if list(layers[:period]) * repeats == list(layers):
            return f"{list(layers[:period])}*{repeats}".replace(" ", "")
    return "+".join(f"[{value}]*{len(list(run))}" for value, run in groupby(layers))
