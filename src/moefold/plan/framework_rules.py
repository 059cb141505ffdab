"""What other training frameworks accept: constraints as data, each with the place in the framework's own source.

A plan for Megatron-LM is worth nothing if Megatron refuses to start it. So a framework is a row of data: its package,
the releases whose source was read, and its rules. A rule is a conjunction in the framework's own words,

    overlap_moe_expert_parallel_comm recompute_granularity=full

which reads "the overlap is on, and the granularity is full": settings of which all holds are refused. `name` is true,
`!name` is not, `name=a|b` is one of these (or has one of them), `name!=a|b` none of them, and `name>1` is larger.
A rule has the message with which the framework refuses, the module it is in, and the releases that have it.

`refusal` judges settings by every release that was read, or by one: a plan that names no release starts on all of them.
`tests/brain/test_framework_rules.py` holds the rules against verdicts that the frameworks' own validators gave.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from moefold.errors import UnknownNameError

# Frameworks differ in what they save (`plan/memory/saved_*.py`), overlap and launch (`plan/timing/`), and accept.
FrameworkName = Literal["megatron", "fsdp2", "deepspeed", "jax", "moefold"]
# A framework's settings by its own names; virtual stages and the like are None where they are off.
Settings = Mapping[str, object]
Release = tuple[int, ...]

_FIRST: Release = (0,)
_LAST: Release = (9999,)


def release_of(text: str) -> Release:
    return tuple(int(part) for part in text.split("."))


@dataclass(frozen=True)
class Rule:
    """Settings that are refused together."""

    when: str
    message: str
    source: str
    # The first release that has the rule, and the first that has it no more.
    since: Release = _FIRST
    before: Release = _LAST
    # The validator lets it pass, and the run fails or does something else.
    late: bool = False

    @cached_property
    def _tests(self) -> tuple[tuple[str, Callable[[object], bool]], ...]:
        return tuple(_test(word) for word in self.when.split())

    def breaks(self, settings: Settings) -> bool:
        return all(test(settings.get(name)) for name, test in self._tests)

    def is_in(self, release: Release) -> bool:
        return self.since <= release < self.before


def _test(word: str) -> tuple[str, Callable[[object], bool]]:
    found = re.fullmatch(r"(!?)(\w+)(?:(!=|=|>)([\w|.]+))?", word)
    if found is None:
        raise ValueError(f"no condition: {word!r}")
    no, name, sign, text = found.groups()
    if sign is None:
        return name, (lambda value: not value) if no else bool
    if sign == ">":
        least = int(text)
        return name, lambda value: isinstance(value, int) and value > least
    refused = frozenset(text.split("|"))

    def is_one(value: object) -> bool:
        return not refused.isdisjoint(map(str, value) if isinstance(value, tuple) else (str(value),))

    return name, is_one if sign == "=" else lambda value: not is_one(value)


@dataclass(frozen=True)
class RuledFramework:
    """A framework as others install it, the releases that were read, and what they refuse."""

    package: str
    releases: tuple[str, ...]
    rules: tuple[Rule, ...]


_CONFIG = "megatron.core.transformer.transformer_config"
_ARGUMENTS = "megatron.training.arguments"
_ENUMS = "megatron.core.enums"
_COMBINED = "megatron.core.pipeline_parallel.combined_1f1b"
_FSDP = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
_OVERLAP = "overlap_moe_expert_parallel_comm"

MEGATRON = RuledFramework(
    "megatron-core",
    ("0.16.1", "0.19.1"),
    (
        # ---- expert communication beside another microbatch ----
        Rule(
            f"{_OVERLAP} pipeline_model_parallel_size>1 !virtual_pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size must be specified when pipeline_model_parallel_size > 1",
            _CONFIG,
        ),
        Rule(
            f"{_OVERLAP} expert_model_parallel_size=1",
            "overlap_moe_expert_parallel_comm is only supported with expert model parallelism",
            _CONFIG,
        ),
        Rule(
            f"{_OVERLAP} moe_token_dispatcher_type!=alltoall|flex",
            "overlap_moe_expert_parallel_comm is supported with alltoall/flex token dispatcher",
            _CONFIG,
        ),
        Rule(
            f"{_OVERLAP} recompute_granularity=full",
            "disable full recomputation when enabling overlap_moe_expert_parallel_comm",
            _CONFIG,
        ),
        Rule(
            f"{_OVERLAP} recompute_modules=moe",
            "disable moe in recompute_modules when enabling overlap_moe_expert_parallel_comm",
            _CONFIG,
            since=(0, 17),
        ),
        Rule(
            f"{_OVERLAP} !bf16 !fp16",
            "overlap_moe_expert_parallel_comm is only supported with bf16 or fp16 model",
            _CONFIG,
        ),
        Rule(
            f"{_OVERLAP} moe_shared_expert_overlap",
            "disable moe_shared_expert_overlap when enabling overlap_moe_expert_parallel_comm",
            _CONFIG,
        ),
        Rule(
            f"{_OVERLAP} mtp_num_layers>1",
            "MTP layernum only supports 1 when enabling overlap_moe_expert_parallel_comm",
            _CONFIG,
        ),
        Rule(
            f"{_OVERLAP} mtp_num_layers=1 pipeline_model_parallel_size=1",
            "Pipeline model parallel size must be larger than 1 when enabling the overlap with MTP layer",
            _CONFIG,
            before=(0, 18),
        ),
        Rule(
            f"{_OVERLAP} cuda_graph_impl=local|full_iteration",
            "CUDA graphs beside overlap_moe_expert_parallel_comm are those of cuda_graph_impl transformer_engine",
            _CONFIG,
            before=(0, 18),
        ),
        Rule(
            f"{_OVERLAP} cuda_graph_impl=transformer_engine cuda_graph_modules=moe|mlp",
            "CUDA graph scope on moe and mlp is not supported with overlap_moe_expert_parallel_comm",
            _CONFIG,
        ),
        Rule(
            f"delay_wgrad_compute !{_OVERLAP}",
            "overlap_moe_expert_parallel_comm must be enabled when enabling delay_wgrad_compute",
            _CONFIG,
        ),
        # Megatron-FSDP gathers parameters in hooks of modules, and the order of two microbatches calls their parts.
        Rule(
            f"{_OVERLAP} use_megatron_fsdp",
            "overlap_moe_expert_parallel_comm passes by the forward in which Megatron-FSDP gathers parameters",
            _COMBINED,
            before=(0, 18),
            late=True,
        ),
        Rule(
            f"{_OVERLAP} use_megatron_fsdp virtual_pipeline_model_parallel_size>1",
            "EP overlap 1F1B with FSDP is not supported for interleaved pipeline parallelism",
            _COMBINED,
            since=(0, 18),
            late=True,
        ),
        Rule(
            f"{_OVERLAP} use_megatron_fsdp cuda_graph_impl=transformer_engine|local",
            "1F1B overlap with FSDP does not support per-layer CUDA graphs",
            _FSDP,
            since=(0, 18),
            late=True,
        ),
        # ---- graphs ----
        Rule(
            "cuda_graph_impl=transformer_engine|local recompute_granularity=full",
            "full recompute is only supported with full iteration CUDA graph",
            _CONFIG,
        ),
        Rule(
            "cuda_graph_impl=transformer_engine cuda_graph_modules=moe_router recompute_modules=moe",
            "moe recompute is not supported with moe_router CUDA graph with cuda_graph_impl transformer_engine",
            _CONFIG,
        ),
        Rule(
            "cuda_graph_impl=transformer_engine|local cuda_graph_modules=moe|moe_router !num_moe_experts",
            "moe cuda graph is only supported for MoE",
            _CONFIG,
        ),
        Rule(
            "cuda_graph_impl=transformer_engine|local cuda_graph_modules=moe_preprocess cuda_graph_modules!=moe_router",
            "moe_preprocess cuda graph is only supported with moe_router cuda graph",
            _CONFIG,
        ),
        Rule(
            "cuda_graph_impl=transformer_engine|local cuda_graph_modules=moe_preprocess moe_expert_capacity_factor "
            "!moe_pad_expert_input_to_capacity moe_token_dispatcher_type=alltoall",
            "moe_preprocess cuda graph is not supported when there are DtoH copies in the preprocess step",
            _CONFIG,
        ),
        Rule(
            "cuda_graph_impl!=none cpu_offloading",
            "CUDA graphs not supported with CPU offloading",
            _CONFIG,
            before=(0, 18),
        ),
        Rule(
            "cuda_graph_impl=transformer_engine cpu_offloading",
            "CUDA graphs not supported with CPU offloading",
            _CONFIG,
        ),
        # Rows of experts whose number is not known need places that do not move.
        Rule(
            "cuda_graph_impl=full_iteration num_moe_experts !moe_paged_stash !moe_pad_expert_input_to_capacity",
            "a graph of the whole iteration needs fixed shapes: moe_paged_stash, or tokens padded to capacity",
            "megatron.core.transformer.moe",
            late=True,
        ),
        Rule("moe_paged_stash", "no argument --moe-paged-stash before 0.18", _ARGUMENTS, before=(0, 18)),
        Rule(
            "moe_paged_stash moe_flex_dispatcher_backend!=hybridep",
            "moe_expert_rank_capacity_factor requires moe_flex_dispatcher_backend to be 'hybridep'",
            _CONFIG,
            since=(0, 18),
        ),
        # ---- recomputation and offloading ----
        Rule(
            "recompute_modules=attention",
            "Invalid choices for recompute_modules: there is core_attn, and no whole attention",
            _CONFIG,
        ),
        Rule(
            "recompute_modules=moe_act !num_moe_experts",
            "moe_act in recompute_modules is only supported with moe_grouped_gemm",
            _CONFIG,
        ),
        Rule(
            "recompute_modules=mla_up_proj !multi_latent_attention",
            "mla_up_proj in recompute_modules is only supported with multi_latent_attention",
            _CONFIG,
        ),
        Rule(
            "recompute_modules=moe_act|layernorm fp8_recipe=delayed",
            "Delayed scaling does not support moe_act and layernorm recompute for fp8",
            _CONFIG,
        ),
        Rule(
            "cpu_offloading recompute_granularity=full|selective",
            "CPU offloading does not work when activation recomputation is enabled",
            _CONFIG,
        ),
        Rule(
            "cpu_offloading pipeline_model_parallel_size>1",
            "Currently there is no support for Pipeline parallelism with CPU offloading",
            _CONFIG,
        ),
        # ---- formats, experts, dispatchers ----
        Rule("fp8_recipe=rowwise", "Fp8Recipe has delayed, tensorwise, mxfp8, blockwise, custom", _ENUMS),
        Rule(
            "expert_model_parallel_size>1 !num_moe_experts",
            "num_moe_experts must be non None to use expert-parallel",
            _CONFIG,
        ),
        Rule(
            "moe_shared_expert_overlap moe_token_dispatcher_type!=alltoall",
            "moe_shared_expert_overlap only works with alltoall token dispatcher",
            _CONFIG,
            before=(0, 18),
        ),
        Rule(
            "moe_shared_expert_overlap moe_token_dispatcher_type=allgather",
            "moe_shared_expert_overlap works with the alltoall, DeepEP and HybridEP dispatchers",
            _CONFIG,
        ),
        Rule(
            "moe_flex_dispatcher_backend=deepep moe_token_dispatcher_type=flex moe_pad_expert_input_to_capacity",
            "Flex token dispatcher with deepep backend does not support moe_pad_expert_input_to_capacity",
            _CONFIG,
        ),
    ),
)

_TRAINER = "torchtitan.trainer"
_DIMS = "torchtitan.distributed.parallel_dims"

TORCHTITAN = RuledFramework(
    "torchtitan",
    ("0.3.0",),
    (
        Rule(
            "expert_tensor_parallel_degree>1",
            "ParallelismConfig has no expert_tensor_parallel_degree: EP borrows ranks from FSDP and TP",
            "torchtitan.config.configs",
        ),
        Rule("ranks_beyond_ep>0", "dp_shard * cp * tp == efsdp * ep", "torchtitan.config.configs"),
        Rule(
            "ep_overlap pipeline_parallel_schedule!=DualPipeV",
            "exchanges of experts overlap with another microbatch in the DualPipeV schedule only",
            "torchtitan.distributed.pipeline_parallel",
            late=True,
        ),
        Rule(
            "delay_wgrad",
            "weight gradients wait in the schedules ZBVZeroBubble and DualPipeV only",
            "torch.distributed.pipelining.schedules",
            late=True,
        ),
        Rule(
            "comm_backend!=standard|deepep|hybridep|minimal_async_ep",
            "Unknown comm_backend",
            "torchtitan.models.common.config_utils",
        ),
        Rule(
            "activation_checkpoint=other",
            "activation_checkpoint is full, selective (per operator), memory_budget or none: no single modules",
            "torchtitan.distributed.activation_checkpoint",
        ),
        Rule(
            "quantization!=none|float8_rowwise|mxfp8",
            "recipe_name: Literal['rowwise', 'rowwise_with_gw_hp'], or MXFP8",
            "torchtitan.components.quantization.float8",
        ),
        Rule("sharding!=fsdp", "parameters are sharded by fully_shard", "torchtitan.distributed.fsdp"),
        Rule(
            "tied pipeline_parallel_degree>1",
            "Weight tying is not supported with Pipeline Parallel",
            "torchtitan.models.common.decoder",
        ),
        Rule(
            "mtp pipeline_parallel_degree>1",
            "MTP does not support pipeline parallelism yet",
            "torchtitan.models.deepseek_v3.mtp",
        ),
        Rule(
            "mtp context_parallel_degree>1",
            "MTP does not support context parallelism yet",
            "torchtitan.models.deepseek_v3.mtp",
        ),
        Rule("uneven_tokens>0", "Training sequence length must be divisible by tp * 2 * cp", _TRAINER),
        Rule("training_dtype=float16", "training.dtype: Literal['bfloat16', 'float32']", "torchtitan.config.configs"),
        Rule(
            "cuda_graphs!=none pipeline_parallel_degree>1",
            "CUDA graphs do not support pipeline parallelism yet",
            _TRAINER,
        ),
        Rule("ranks_beyond_mesh>0", "dp_replicate * dp_shard * cp * tp * pp != WORLD_SIZE", _DIMS),
    ),
)

# Frameworks that a plan may be for.
SEARCHED: tuple[FrameworkName, ...] = ("moefold", "megatron", "fsdp2")
# By the framework of a workload. moefold's own rules are `moefold.checks`.
RULED: Mapping[str, RuledFramework] = {"megatron": MEGATRON, "fsdp2": TORCHTITAN}


def refusal(framework: str, settings: Settings, release: str = "") -> str | None:
    """Why this framework does not start these settings, by its release or by all that were read; None if it does."""
    ruled = RULED.get(framework)
    if ruled is None:
        return None
    for rule in _rules_in(framework, release):
        if rule.breaks(settings):
            return f"{ruled.package} refuses {rule.when}: {rule.message} ({rule.source})"
    return None


@lru_cache(maxsize=64)
def _rules_in(framework: str, release: str) -> tuple[Rule, ...]:
    ruled = RULED[framework]
    judged = [release_of(each) for each in ((release,) if release else ruled.releases)]
    return tuple(rule for rule in ruled.rules if any(rule.is_in(each) for each in judged))


def named_release(text: str) -> tuple[FrameworkName, str]:
    """`megatron@0.19.1` as framework and release; without a release all whose rules are known."""
    word, _, release = text.partition("@")
    name = next((known for known in SEARCHED if known == word), None)
    if name is None:
        raise UnknownNameError("framework", word, SEARCHED)
    known = RULED[name].releases if name in RULED else ()
    if release and release not in known:
        raise UnknownNameError(f"release of {name}", release, known)
    return name, release
