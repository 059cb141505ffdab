"""Rules about number formats and kernel backends, and what `kernels.experts: auto` stands for.

`AUTO_EXPERTS` is a table by device and compute format. The first row counts whose backend no rule refuses for this run.
The choice depends on the run and the kind of device only, so that it can be said before a job starts, and on a machine
without a GPU.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from moefold.blueprint.lora_adapters import is_adapter
from moefold.blueprint.param_groups import is_trained
from moefold.blueprint.parameters import is_expert, parameters
from moefold.checks.retained_steps import said
from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.memory import RetainedStep, Retention
from moefold.config.precision import BYTES, COMPUTE_FORMATS, FORMATS, ComputeFormat, NamedExperts
from moefold.config.run import RunConfig
from moefold.errors import Problem

# torch's grouped_mm loads rows in chunks of this many bytes and refuses other row sizes.
ROW_BYTES = 16
# Of attention backends that do not take all of them.
_ATTENTION_FORMATS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("triton", "flex"), ("float32", "bfloat16")),
    **dict.fromkeys(("flash_attn_2", "flash_attn_3", "flash_attn_4"), ("bfloat16",)),
}
# Instructions that multiply a format, of which a CPU needs one.
CPU_INSTRUCTIONS = {
    "bfloat16": frozenset({"amx_bf16", "avx512_bf16"}),
    "float16": frozenset({"amx_fp16", "avx512_fp16"}),
}
# Entries of a head of bfloat16 in 16 bytes.
_FLASH_MULTIPLE = 8


def compute_is_not_wider_than_params(run: RunConfig) -> Problem | None:
    params, compute = run.precision.params, run.precision.compute
    # Other parameters are planned only.
    if params not in FORMATS or BYTES[compute] <= BYTES[params]:
        return None
    return Problem(
        "precision.compute", f"{compute} is wider than the parameters' {params}", f"use {params}, or params {compute}"
    )


def grouped_experts_are_not_float64(run: RunConfig) -> Problem | None:
    if run.model.moe is None or run.kernels.experts != "grouped" or run.precision.compute != "float64":
        return None
    return Problem(
        "kernels.experts",
        "torch's grouped GEMM has no float64 kernel",
        "use fused or sequential, or precision.compute float32",
    )


def grouped_rows_are_aligned(run: RunConfig) -> list[Problem]:
    """A row of an expert's weights has the (latent) dim of its input, or this etp rank's part of the hidden dim."""
    moe, compute = run.model.moe, run.precision.compute
    grouped = run.kernels.experts in ("grouped", "deepgemm")
    if moe is None or not grouped or compute == "float64":
        return []
    multiple = ROW_BYTES // BYTES[compute]
    inner = "model.dim" if moe.latent_dim is None else "model.moe.latent_dim"
    rows = {
        inner: moe.latent_dim or run.model.dim,
        "model.moe.expert_hidden_dim": moe.expert_hidden_dim // max(run.parallel.etp, 1),
    }
    return [
        Problem(
            path,
            f"rows of {size} {compute} numbers (experts, etp={run.parallel.etp}) are not a multiple of "
            f"{ROW_BYTES} bytes, which the grouped GEMM needs",
            f"make it a multiple of {multiple}, or use kernels.experts fused or sequential",
        )
        for path, size in rows.items()
        if size % multiple
    ]


def fused_experts_have_no_padded_rows(run: RunConfig) -> Problem | None:
    """Padding saves a GPU the wait for row counts; the fused CPU experts read those counts anyway."""
    moe = run.model.moe
    if moe is None or run.kernels.experts != "fused" or moe.capacity is None or not moe.capacity.pad:
        return None
    return Problem(
        "model.moe.capacity.pad",
        "kernels.experts fused computes only rows that hold a token, no padding",
        "use pad false, or kernels.experts grouped",
    )


def fused_experts_scale_activations(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or run.kernels.experts != "fused" or moe.weight_at == "activation":
        return None
    return Problem(
        "model.moe.weight_at",
        f"kernels.experts fused sums expert outputs as it goes and cannot scale an expert's {moe.weight_at}",
        "use activation, or kernels.experts grouped",
    )


def fused_experts_keep_their_first_gemm(run: RunConfig) -> list[Problem]:
    """They save rows as they came and the first GEMM's output, and recompute the activation anyway. They read the
    number of rows on the host, so that there is nothing to page."""
    if run.model.moe is None or run.kernels.experts != "fused":
        return []
    retained = run.memory.retained()
    refused: dict[RetainedStep, tuple[Retention, ...]] = {
        "rows": ("discard", "page"),
        "gate_up": ("discard", "page"),
        "activation": ("offload", "page"),
    }
    return [
        Problem(
            f"memory.retain.{step}",
            f"kernels.experts fused is one operation, of which this step cannot be {said(retained[step])} by itself",
            "use keep, or kernels.experts grouped or sequential",
        )
        for step, choices in refused.items()
        if retained[step] in choices
    ]


def adapted_experts_have_a_backend(run: RunConfig) -> Problem | None:
    """Adapters are two more grouped matmuls, between which nothing is fused; other libraries' were never tried."""
    experts = run.kernels.experts
    if run.model.moe is None or experts in ("sequential", "grouped", "auto"):
        return None
    specs = [spec for spec in parameters(run.model) if is_expert(spec.name)] if _is_fine_tuned(run) else []
    if not any(is_adapter(spec.name) or not is_trained(spec.name, run.optim) for spec in specs):
        return None
    return Problem(
        "kernels.experts",
        f"{experts} experts cannot have adapters or be frozen",
        "use grouped or sequential, or adapters without `*.experts.*` in model.lora.targets",
    )


def narrow_experts_have_a_backend(run: RunConfig) -> Problem | None:
    """Recipes narrow operands of grouped matmuls; fused experts have no such place, and engines narrow themselves."""
    experts = run.kernels.experts
    if run.model.moe is None or run.precision.recipe is None or experts in ("sequential", "grouped", "auto"):
        return None
    return Problem(
        "kernels.experts",
        f"{experts} experts cannot be narrowed by precision.recipe {run.precision.recipe}",
        "use grouped, sequential or auto, or precision.recipe null",
    )


def adapters_of_experts_are_aligned(run: RunConfig) -> Problem | None:
    lora, compute = run.model.lora, run.precision.compute
    if lora is None or run.kernels.experts != "grouped" or compute == "float64":
        return None
    multiple = ROW_BYTES // BYTES[compute]
    if lora.rank % multiple == 0 or not any(
        is_adapter(spec.name) and is_expert(spec.name) for spec in parameters(run.model)
    ):
        return None
    return Problem(
        "model.lora.rank",
        f"rows of {lora.rank} {compute} numbers are not a multiple of {ROW_BYTES} bytes, which the grouped GEMM needs",
        f"use a multiple of {multiple}, or kernels.experts sequential",
    )


def adapted_layers_are_computed_by_torch(run: RunConfig) -> Problem | None:
    if run.kernels.linear == "torch" or not _is_fine_tuned(run):
        return None
    return Problem("kernels.linear", f"{run.kernels.linear} was not tried with adapters or frozen weights", "use torch")


def _is_fine_tuned(run: RunConfig) -> bool:
    return run.model.lora is not None or run.optim.trained != "all" or bool(run.optim.frozen)


def kernels_take_the_format(run: RunConfig) -> Problem | None:
    """Those in C have no float16; of those in Triton some were interpreted in it, and no model of them."""
    backend, compute = run.kernels.backend, run.precision.compute
    if backend == "torch" or compute in ("float32", "bfloat16"):
        return None
    words = f"{backend} kernels compute in float32" if compute == "float64" else f"{backend} kernels take no {compute}"
    return Problem(
        "kernels.backend", words, f"use torch, or compute {'float32' if compute == 'float64' else 'bfloat16'}"
    )


def triton_is_not_combined_with_fused_experts(run: RunConfig) -> Problem | None:
    if run.model.moe is None or run.kernels.backend != "triton" or run.kernels.experts != "fused":
        return None
    return Problem(
        "kernels.backend",
        "triton kernels run on GPUs, and kernels.experts fused on CPUs",
        "use torch, or kernels.experts grouped",
    )


def native_needs_fused_experts(run: RunConfig) -> Problem | None:
    """Native kernels run on CPUs only, so `auto` is what it stands for there."""
    if run.model.moe is None or run.kernels.backend != "native" or (experts := experts_in_use(run, "cpu")) == "fused":
        return None
    return Problem(
        "kernels.backend",
        f"native has an activation for dense layers and fused experts, but kernels.experts is {experts}",
        "use torch, or kernels.experts fused",
    )


# ---- auto ----


@dataclass(frozen=True)
class AutoExperts:
    """On this device, with these compute formats, `auto` stands for ``experts`` unless a rule refuses it."""

    device: str
    formats: tuple[ComputeFormat, ...]
    experts: NamedExperts
    why: str


AUTO_EXPERTS = (
    AutoExperts("cpu", COMPUTE_FORMATS, "fused", "fastest on a CPU"),
    AutoExperts(
        "cpu",
        ("float32", "bfloat16", "float16"),
        "grouped",
        "padded rows, and probs elsewhere than at the activation",
    ),
    AutoExperts("cpu", COMPUTE_FORMATS, "sequential", "any run"),
    AutoExperts("cuda", ("bfloat16",), "grouped", "torch's grouped GEMM, which takes bfloat16 only on a GPU"),
    AutoExperts("cuda", COMPUTE_FORMATS, "sequential", "any run"),
)
_EXPERTS_RULES = (
    grouped_experts_are_not_float64,
    grouped_rows_are_aligned,
    fused_experts_have_no_padded_rows,
    fused_experts_scale_activations,
    fused_experts_keep_their_first_gemm,
    adapted_experts_have_a_backend,
    narrow_experts_have_a_backend,
    adapters_of_experts_are_aligned,
)


def experts_in_use(run: RunConfig, device: str) -> NamedExperts:
    """The backend that runs the experts on this kind of device: the one that the run names, or what auto stands for."""
    if run.kernels.experts != "auto":
        return run.kernels.experts
    for row in AUTO_EXPERTS:
        named = replace(run, kernels=replace(run.kernels, experts=row.experts))
        fits = row.device == device and matmul_format(run) in row.formats
        if fits and not any(rule(named) for rule in _EXPERTS_RULES):
            return row.experts
    return "sequential"


def matmul_format(run: RunConfig) -> ComputeFormat:
    """Of what the experts' GEMMs are given: emulated narrow GEMMs have values of codes in float32."""
    emulated = run.precision.recipe is not None and run.kernels.narrow_gemm == "emulated"
    return "float32" if emulated and run.precision.compute == "bfloat16" else run.precision.compute


def cpu_matmul_in_use(run: RunConfig, device: str, cpu_features: Collection[str]) -> Literal["compute", "float32"]:
    """How 16-bit numbers are multiplied on this device, whose CPU has these features (`/proc/cpuinfo`)."""
    compute, named = run.precision.compute, run.kernels.cpu_matmul
    if device != "cpu" or compute not in CPU_INSTRUCTIONS or named == "compute":
        return "compute"
    missing = CPU_INSTRUCTIONS[compute].isdisjoint(cpu_features)
    return "float32" if named == "float32" or (missing and cpu_features) else "compute"


def attention_in_use(run: RunConfig) -> str:
    """`auto` follows ``kernels.backend``: our kernels everywhere, or torch's own."""
    if run.kernels.attention != "auto":
        return run.kernels.attention
    return "triton" if run.kernels.backend == "triton" else "sdpa"


def kernels_in_use(run: RunConfig, device: str) -> dict[str, str]:
    """Which implementation does what on this kind of device, by the keys of ``kernels``."""
    experts = {"experts": experts_in_use(run, device), "permute": run.kernels.permute} if run.model.moe else {}
    dense = {"linear": run.kernels.linear, "attention": attention_in_use(run), "backend": run.kernels.backend}
    return experts | dense


def attention_backend_takes_the_format(run: RunConfig) -> Problem | None:
    name, compute = run.kernels.attention, run.precision.compute
    if name not in _ATTENTION_FORMATS or compute in _ATTENTION_FORMATS[name]:
        return None
    takes = " and ".join(_ATTENTION_FORMATS[name])
    return Problem("kernels.attention", f"{name} takes {takes}, not {compute}", "use sdpa or reference")


def flash_attn_takes_the_head_dims(run: RunConfig) -> list[Problem]:
    """Rows of a head are loaded in chunks, and FlashAttention 2 has one head dim for keys and values."""
    name, config = run.kernels.attention, run.model.attention
    if not name.startswith("flash_attn"):
        return []
    if isinstance(config, MLAConfig):
        dim, value_dim, path = config.nope_dim + config.rope_dim, config.value_dim, "model.attention.value_dim"
    else:
        dim, value_dim, path = config.head_dim, config.head_dim, "model.attention.head_dim"
    found = []
    if any(size % _FLASH_MULTIPLE for size in (dim, value_dim)):
        words = f"{name} needs multiples of {_FLASH_MULTIPLE}, keys have {dim} and values {value_dim}"
        found.append(Problem(path, words, "use kernels.attention triton or sdpa"))
    if name == "flash_attn_2" and dim != value_dim:
        words = f"flash_attn_2 needs one head dim, keys have {dim} and values {value_dim}"
        found.append(Problem("kernels.attention", words, "use triton, flash_attn_3 or flash_attn_4"))
    return found


def flash_attn_has_no_windows_in_a_ring(run: RunConfig) -> Problem | None:
    config, context = run.model.attention, run.parallel.context
    cut = isinstance(config, GQAConfig) and (config.window is not None or config.chunk is not None)
    if not cut or not run.kernels.attention.startswith("flash_attn") or run.parallel.cp == 1:
        return None
    if context.windowed == "all_to_all":
        return None
    return Problem(
        "parallel.context.windowed",
        f"kernels.attention {run.kernels.attention} has no mask for what cuts through a step of a ring",
        "use all_to_all, or kernels.attention triton",
    )


FINETUNE_RULES = (
    adapted_experts_have_a_backend,
    adapters_of_experts_are_aligned,
    adapted_layers_are_computed_by_torch,
)
RULES = (
    compute_is_not_wider_than_params,
    grouped_experts_are_not_float64,
    grouped_rows_are_aligned,
    fused_experts_have_no_padded_rows,
    fused_experts_scale_activations,
    fused_experts_keep_their_first_gemm,
    narrow_experts_have_a_backend,
    *FINETUNE_RULES,
    kernels_take_the_format,
    triton_is_not_combined_with_fused_experts,
    native_needs_fused_experts,
    attention_backend_takes_the_format,
    flash_attn_takes_the_head_dims,
    flash_attn_has_no_windows_in_a_ring,
)
