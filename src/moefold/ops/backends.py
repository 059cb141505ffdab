"""The table of backends: which jobs each does, on which devices; backends are resolved by name here only.

A name gives exactly that backend, or an error that says why it cannot run and which ones can. Nothing falls back
silently: a run that asked for a kernel and got a loop would be slow without a reason in its log.

A backend that needs an optional package imports it inside its own function, so that moefold imports without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args

from torch import Tensor

from moefold.config.parallel import NamedDispatcher
from moefold.config.precision_recipes import RECIPE_NAMES
from moefold.errors import BackendError, did_you_mean
from moefold.ops import activations as swiglu
from moefold.ops import cross_entropy, rmsnorm, rope
from moefold.ops.activations import GLU, glu_named
from moefold.ops.compiled_cache import use_private_compiler_caches
from moefold.ops.engines import OPTIONAL
from moefold.ops.host_probe import HostInfo

NARROW = ("float32", "bfloat16")
ALL = ("float64", *NARROW, "float16")
BF16 = ("bfloat16",)
# The first GPUs with bfloat16. The kernels are compiled for Hopper and Blackwell; others are untested.
AMPERE = (8, 0)
# Of other libraries' grouped GEMMs.
HOPPER, BLACKWELL = (9, 0), (10, 0)


@dataclass(frozen=True)
class Backend:
    """One implementation of one job. ``setting`` is the config key that selects it; ``formats`` are those of
    `precision.compute`, of narrow GEMMs those of `precision.recipe`."""

    job: str
    name: str
    setting: str
    devices: tuple[str, ...]
    formats: tuple[str, ...]
    # The optional package that it needs, by its name in ``OPTIONAL``; the minimum compute capability of a GPU.
    engine: str | None = None
    capability: tuple[int, int] | None = None
    # Whether it needs a C compiler.
    compiles: bool = False
    note: str = ""
    # Formats on a GPU, where they differ.
    gpu_formats: tuple[str, ...] | None = None

    def formats_on(self, device: str) -> tuple[str, ...]:
        return self.formats if device != "cuda" or self.gpu_formats is None else self.gpu_formats


@dataclass(frozen=True)
class Kernels:
    """The jobs of any model that have a kernel, each a function; torch versions have the same signatures.

    ``MoEKernels`` adds those of an MoE layer.
    """

    weighted_activation: Callable[..., Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotate_qk: Callable[..., tuple[Tensor, Tensor | None]]
    keys_and_values: Callable[..., tuple[Tensor, Tensor]]
    vocab_stats: Callable[..., tuple[Tensor, Tensor]]
    # The GLU inside the fused experts on a CPU, by the name of its activation.
    glu: Callable[[str], GLU] = glu_named


# Jobs that have GPU kernels.
MOE_JOBS = ("map_rows", "permute", "unpermute", "route", "balance_stats")
JOBS = (*MOE_JOBS, *(field.name for field in fields(Kernels) if field.name != "glu"))
_KERNELS, _EXPERTS, _DISPATCH = "kernels.backend", "kernels.experts", "parallel.dispatcher"
_NARROW = "kernels.narrow_gemm"
_LINEAR, _PERMUTE, _ATTENTION = "kernels.linear", "kernels.permute", "kernels.attention"
_BOTH = ("cpu", "cuda")
_TE, _TE_GEMM = "transformer_engine", "transformer_engine_gemm"

BACKENDS = (
    *(Backend("dispatch", name, _DISPATCH, _BOTH, ALL, note="moefold's own") for name in get_args(NamedDispatcher)),
    Backend("dispatch", "deepep", _DISPATCH, ("cuda",), BF16, "deepep", AMPERE, note="DeepEP's Buffer"),
    Backend("dispatch", "deepep_elastic", _DISPATCH, ("cuda",), BF16, "deepep_elastic", HOPPER, note="ElasticBuffer"),
    Backend(
        "dispatch",
        "symmetric_memory",
        _DISPATCH,
        ("cuda",),
        ALL,
        "symmetric_memory",
        AMPERE,
        note="torch's all_to_all_vdev_2d",
    ),
    Backend("experts", "sequential", _EXPERTS, _BOTH, ALL, note="one GEMM per expert: the reference"),
    Backend("experts", "grouped", _EXPERTS, _BOTH, ALL[1:], note="torch's grouped GEMM", gpu_formats=BF16),
    Backend("experts", "deepgemm", _EXPERTS, ("cuda",), BF16, "deepgemm", HOPPER, note="DeepGEMM's grouped GEMM"),
    Backend("experts", "mxfp8", _EXPERTS, ("cuda",), BF16, "mxfp8", BLACKWELL, note="torchao's, in MXFP8"),
    Backend("experts", _TE, _EXPERTS, ("cuda",), BF16, _TE_GEMM, AMPERE, note="its grouped GEMM: a GEMM per expert"),
    Backend("experts", "fused", _EXPERTS, ("cpu",), ALL, note="permute, GEMMs and activation in one operator"),
    Backend("linear", "torch", _LINEAR, _BOTH, ALL, note="torch's matmul"),
    Backend("linear", _TE, _LINEAR, ("cuda",), BF16, _TE_GEMM, AMPERE, note="Transformer Engine's GEMM"),
    Backend("narrow_gemm", "emulated", _NARROW, _BOTH, RECIPE_NAMES, note="values of codes, multiplied wide"),
    Backend(
        "narrow_gemm",
        "scaled_mm",
        _NARROW,
        _BOTH,
        ("fp8_tensor", "fp8_delayed", "fp8_rowwise"),
        capability=HOPPER,
        note="torch's GEMMs of codes",
        gpu_formats=RECIPE_NAMES[1:],
    ),
    Backend(
        "narrow_gemm",
        _TE,
        _NARROW,
        ("cuda",),
        tuple(name for name in RECIPE_NAMES[1:] if name != "fp8_rowwise"),
        "transformer_engine_storage",
        HOPPER,
        note="Transformer Engine's GEMMs of codes",
    ),
    Backend("expert_permute", "backend", _PERMUTE, _BOTH, ALL, note="that of kernels.backend"),
    Backend("expert_permute", _TE, _PERMUTE, ("cuda",), NARROW, _TE, AMPERE, note="Transformer Engine's moe_permute"),
    Backend("attention", "reference", _ATTENTION, _BOTH, ALL, note="all scores in memory: the reference"),
    Backend(
        "attention", "sdpa", _ATTENTION, _BOTH, ALL, note="torch's fused attention, one call per shape of document"
    ),
    Backend(
        "attention", "triton", _ATTENTION, ("cuda",), NARROW, "triton", AMPERE, note="4 launches for any documents"
    ),
    Backend("attention", "flex", _ATTENTION, ("cuda",), NARROW, "triton", AMPERE, note="torch's flex_attention"),
    *(
        Backend("attention", name, _ATTENTION, ("cuda",), BF16, name, capability, note=note)
        for name, capability, note in (
            ("flash_attn_2", AMPERE, "one head dim for keys and values"),
            ("flash_attn_3", HOPPER, "Hopper"),
            ("flash_attn_4", HOPPER, "Hopper and Blackwell"),
        )
    ),
    Backend("glu", "torch", _KERNELS, ("cpu",), ALL, note="the reference"),
    Backend("glu", "native", _KERNELS, ("cpu",), NARROW, compiles=True, note="C in one pass, compiled on first use"),
    *(
        backend
        for job in JOBS
        for backend in (
            Backend(job, "torch", _KERNELS, _BOTH, ALL, note="the reference"),
            Backend(job, "triton", _KERNELS, ("cuda",), NARROW, "triton", AMPERE, note="one pass over memory"),
        )
    ),
)


def why_not(backend: Backend, device: str, host: HostInfo, number_format: str | None = None) -> str:
    """Empty if it can run on this device of this host; else all the reasons."""
    reasons = []
    if device not in backend.devices:
        reasons.append(f"runs on {' and '.join(backend.devices)}, not on {device}")
    elif device == "cuda" and not host.gpus:
        reasons.append("there is no GPU here")
    elif device == "cuda" and backend.capability is not None:
        reasons += [
            f"{gpu.name} has compute capability {_dotted(gpu.capability)}, {_dotted(backend.capability)} is needed"
            for gpu in dict.fromkeys(host.gpus)
            if gpu.capability < backend.capability
        ]
    if backend.engine is not None:
        engine = OPTIONAL[backend.engine]
        reasons += filter(None, [engine.problem(host.version_of(engine.package))])
    if backend.compiles and host.compiler is None:
        reasons.append("there is no C compiler (no cc, no $CC)")
    formats = backend.formats_on(device)
    if number_format is not None and number_format not in formats:
        where = " on a GPU" if formats != backend.formats else ""
        reasons.append(f"takes {' and '.join(formats)}{where}, not {number_format}")
    return "; ".join(reasons)


def resolve(job: str, name: str, device: str, host: HostInfo, number_format: str | None = None) -> Backend:
    """The backend of that name, or an error that names those that work on this host."""
    known = {backend.name: backend for backend in BACKENDS if backend.job == job}
    assert known, f"no backend for {job!r}"
    works = [other for other, backend in known.items() if not why_not(backend, device, host, number_format)]
    setting = next(iter(known.values())).setting
    auto = "auto chooses among them; " if setting == _EXPERTS and len(works) > 0 else ""
    instead = f"what works here on {device}: {', '.join(works) or 'nothing'}; {auto}`moefold doctor` shows all"
    if name not in known:
        raise BackendError(f"{setting}: no backend {name[:64]!r} for {job}; {did_you_mean(name, known)}{instead}")
    reason = why_not(known[name], device, host, number_format)
    if reason:
        raise BackendError(f"{setting}: {name} cannot do {job}: {reason}; {instead}")
    return known[name]


def torch_kernels() -> Kernels:
    return Kernels(
        weighted_activation=swiglu.weighted_activation,
        rms_norm=rmsnorm.rms_norm,
        rotate_qk=rope.rotate_qk,
        keys_and_values=rope.keys_and_values,
        vocab_stats=cross_entropy.vocab_stats,
    )


IN_TORCH = torch_kernels()


def triton_kernels() -> Kernels:
    use_private_compiler_caches()
    # Imported here because triton is an optional dependency.
    from moefold.ops.kernels import (
        cross_entropy_triton,
        rmsnorm_triton,
        rope_latent_triton,
        rope_triton,
        swiglu_triton,
    )

    return Kernels(
        weighted_activation=swiglu_triton.weighted_activation,
        rms_norm=rmsnorm_triton.rms_norm,
        rotate_qk=rope_triton.rotate_qk,
        keys_and_values=rope_latent_triton.keys_and_values,
        vocab_stats=cross_entropy_triton.vocab_stats,
    )


def as_rows(device: str, host: HostInfo) -> list[dict[str, Any]]:
    """The table for this host, as data."""
    return [
        {
            "job": backend.job,
            "backend": backend.name,
            "setting": backend.setting,
            "works": not (reason := why_not(backend, device, host)),
            "reason": reason or backend.note,
            "formats": list(backend.formats_on(device)),
        }
        for backend in BACKENDS
    ]


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
