"""Which backend does which job where: a table, and the only way to get a backend by its name.

A name either gives exactly that backend or an error that says why not and what would work here. Nothing is replaced by
something else silently: a run that asked for a kernel and got a loop would be slow, and nobody would know why.

A backend that needs a package beyond the core dependencies imports it in its own function, so moefold imports without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from moefold.errors import BackendError, did_you_mean
from moefold.ops import activations as swiglu
from moefold.ops import cross_entropy, rmsnorm
from moefold.ops.glu import Gate, gate_named
from moefold.ops.host_probe import HostInfo
from moefold.ops.kernels import rope_reference as rope_torch

NARROW = ("float32", "bfloat16")
ALL = ("float64", *NARROW)
# The first cards with bfloat16. The kernels are built for Hopper and Blackwell; on others nobody has looked at them.
AMPERE = (8, 0)


@dataclass(frozen=True)
class Backend:
    """One way to do one job. ``setting`` is the dotted key of a run that chooses it."""

    job: str
    name: str
    setting: str
    devices: tuple[str, ...]
    formats: tuple[str, ...]
    # Packages that must be installed, and the least compute capability of a card.
    packages: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    # Whether a C compiler must be there.
    compiles: bool = False
    note: str = ""


@dataclass(frozen=True)
class Kernels:
    """The jobs of any model that have a kernel, each as a function; references have the same signatures.

    ``MoEKernels`` adds those of an MoE layer.
    """

    weighted_activation: Callable[..., Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    turn: Callable[..., tuple[Tensor, Tensor | None]]
    keys_and_values: Callable[..., tuple[Tensor, Tensor]]
    vocab_stats: Callable[..., tuple[Tensor, Tensor]]
    # The activation inside the fused experts, by its name: a job of CPUs.
    gate: Callable[[str], Gate] = gate_named


# What a GPU has kernels for.
MOE_JOBS = ("map_rows", "permute", "unpermute", "route", "balance_stats")
JOBS = (*MOE_JOBS, *(field.name for field in fields(Kernels) if field.name != "gate"))
_KERNELS, _EXPERTS = "precision.kernels", "precision.experts"
_BOTH = ("cpu", "cuda")

BACKENDS = (
    Backend("experts", "sequential", _EXPERTS, _BOTH, ALL, note="one product per expert: the twin"),
    Backend("experts", "grouped", _EXPERTS, _BOTH, NARROW, note="torch's grouped product"),
    Backend("experts", "fused", _EXPERTS, ("cpu",), ALL, note="one operation for all that experts do"),
    Backend("gate", "torch", _KERNELS, ("cpu",), ALL, note="the twin"),
    Backend("gate", "native", _KERNELS, ("cpu",), NARROW, compiles=True, note="C in one pass, compiled on first use"),
    *(
        backend
        for job in JOBS
        for backend in (
            Backend(job, "torch", _KERNELS, _BOTH, ALL, note="the twin"),
            Backend(job, "triton", _KERNELS, ("cuda",), NARROW, ("triton",), AMPERE, note="one pass over memory"),
        )
    ),
)


def why_not(backend: Backend, device: str, here: HostInfo, number_format: str | None = None) -> str:
    """Empty if it can run on this device of this machine; else the reasons, all of them."""
    reasons = []
    if device not in backend.devices:
        reasons.append(f"runs on {' and '.join(backend.devices)}, not on {device}")
    elif device == "cuda" and not here.cards:
        reasons.append("there is no GPU here")
    elif device == "cuda" and backend.capability is not None:
        reasons += [
            f"{card.name} has compute capability {_dotted(card.capability)}, {_dotted(backend.capability)} is needed"
            for card in dict.fromkeys(here.cards)
            if card.capability < backend.capability
        ]
    reasons += [f"{package} is not installed" for package in backend.packages if package not in here.packages]
    if backend.compiles and here.compiler is None:
        reasons.append("there is no C compiler (no cc, no $CC)")
    if number_format is not None and number_format not in backend.formats:
        reasons.append(f"takes {' and '.join(backend.formats)}, not {number_format}")
    return "; ".join(reasons)


def resolve(job: str, name: str, device: str, here: HostInfo, number_format: str | None = None) -> Backend:
    """The backend of that name, or an error that names those that would do here."""
    known = {backend.name: backend for backend in BACKENDS if backend.job == job}
    assert known, f"nobody does {job!r}"
    works = [other for other, backend in known.items() if not why_not(backend, device, here, number_format)]
    instead = f"what works here on {device}: {', '.join(works) or 'nothing'}; `moefold doctor` shows all"
    setting = next(iter(known.values())).setting
    if name not in known:
        raise BackendError(f"{setting}: no backend {name[:64]!r} for {job}; {did_you_mean(name, known)}{instead}")
    reason = why_not(known[name], device, here, number_format)
    if reason:
        raise BackendError(f"{setting}: {name} cannot do {job}: {reason}; {instead}")
    return known[name]


def torch_kernels() -> Kernels:
    return Kernels(
        weighted_activation=swiglu.weighted_activation,
        rms_norm=rmsnorm.rms_norm,
        turn=rope_torch.turn,
        keys_and_values=rope_torch.keys_and_values,
        vocab_stats=cross_entropy.vocab_stats,
    )


IN_TORCH = torch_kernels()


def triton_kernels() -> Kernels:
    # Only here: triton is an extra.
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
        turn=rope_triton.turn,
        keys_and_values=rope_latent_triton.keys_and_values,
        vocab_stats=cross_entropy_triton.vocab_stats,
    )


def as_rows(device: str, here: HostInfo) -> list[dict[str, Any]]:
    """The table for this machine, as data."""
    return [
        {
            "job": backend.job,
            "backend": backend.name,
            "setting": backend.setting,
            "works": not (reason := why_not(backend, device, here)),
            "reason": reason or backend.note,
            "formats": list(backend.formats),
        }
        for backend in BACKENDS
    ]


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
