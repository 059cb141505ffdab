"""The kernels of an MoE layer beside those that any model has: a whole set by a backend's name, or regions by torch.

A **region** (``kernels.compile: regions``) is a function of tensors without communication and without a read on the
host: scores to experts and probs, the term of a balance loss, the order in which rows are sent, the activation between
two grouped GEMMs. ``fullgraph`` makes a graph break an error, so a region is one graph, forward and backward. A size
that changes is dynamic from its first change on, so that the number of rows, which is another at every step, does not
compile anything again. The functions are the references of the hand-written kernels; where the run names Triton
kernels, those stay. Matmuls, collectives and the deterministic sum over a token's rows are one launch each already and
stay outside. Fake tensors (the dry run) take the plain function: they have no values, and the shapes are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from inspect import signature
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moefold.checks.kernels import experts_in_use, matmul_format
from moefold.config.run import RunConfig
from moefold.errors import BackendError
from moefold.moe.kernels import moe_references as in_torch
from moefold.moe.load_balancing import BalanceKernels, BalanceTerm, balance_term
from moefold.ops import backends
from moefold.ops.activations import weighted_activation_reference
from moefold.ops.backends import JOBS, Kernels, resolve
from moefold.ops.compiled_cache import use_private_compiler_caches
from moefold.ops.host_probe import HostInfo, probe_host
from moefold.ops.native.glu import native_activation, native_glu
from moefold.precision.quantize import Quantized

# A function is compiled for each dtype, with and without gradients, for no row, one row and more: more than torch's
# eight, and with ``fullgraph`` one too many is an error. Older versions have only a global limit.
_LIMIT = {"recompile_limit": 64} if "recompile_limit" in signature(torch.compile).parameters else {}
P = ParamSpec("P")
R = TypeVar("R")


class Region(Generic[P, R]):
    """``backend``: of torch.compile."""

    def __init__(self, plain: Callable[P, R], backend: str | Callable[..., object] = "inductor") -> None:
        self.plain = plain
        use_private_compiler_caches()
        self.compiled: Callable[P, R] = torch.compile(plain, fullgraph=True, backend=backend, **_LIMIT)  # type: ignore[call-overload]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        chosen = self.plain if isinstance(args[0], FakeTensor) else self.compiled
        return chosen(*args, **kwargs)


@cache
def region(plain: Callable[P, R]) -> Region[P, R]:
    """One for all layers."""
    return Region(plain)


def require_compiler(device: str, host: HostInfo) -> None:
    """torch compiles with Triton for GPUs and with a C++ compiler for CPUs."""
    if device == "cuda" and "triton" not in host.packages:
        raise BackendError("kernels.compile: regions needs triton, which is not installed; use none")
    if device == "cpu" and host.compiler is None:
        raise BackendError("kernels.compile: regions needs a C++ compiler (no cc, no $CC); use none")


@dataclass(frozen=True, kw_only=True)
class MoEKernels(Kernels):
    """Row maps, permutation, routing and the statistics of load balancing, each as a function."""

    map_rows: Callable[..., in_torch.RowMap]
    permute: Callable[..., tuple[Tensor, Tensor | None]]
    unpermute: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    balance_stats: Callable[..., in_torch.BalanceStats]
    # Used where casts are kernels as well (``kernels.casts: triton``).
    permute_cast: Callable[..., tuple[Tensor, Tensor | None, Quantized]] = in_torch.permute_cast
    # None is the router's own, which shares its scores.
    balance_term: BalanceTerm | None = None

    def for_router(self) -> tuple[Callable[..., tuple[Tensor, Tensor]] | None, BalanceKernels]:
        """Those that a router is given. In torch one call is no faster, and its own steps are the reference."""
        fused_stats = None if self.balance_stats is in_torch.balance_stats else self.balance_stats
        balance = BalanceKernels(None if fused_stats else self.balance_term, fused_stats)
        return None if self.route is in_torch.route else self.route, balance


def _shared(kernels: Kernels) -> dict[str, Any]:
    return {field.name: getattr(kernels, field.name) for field in fields(Kernels)}


def torch_kernels() -> MoEKernels:
    return MoEKernels(
        **_shared(backends.torch_kernels()),
        map_rows=in_torch.map_rows,
        permute=in_torch.permute,
        unpermute=in_torch.unpermute,
        route=in_torch.route,
        balance_stats=in_torch.balance_stats,
    )


MOE_IN_TORCH = torch_kernels()


def triton_kernels() -> MoEKernels:
    # Only here: triton is an extra.
    from moefold.moe.kernels import load_balancing_triton as balance_triton
    from moefold.moe.kernels import permute_cast_triton, permute_triton, router_triton, row_map_triton

    return MoEKernels(
        **_shared(backends.triton_kernels()),
        map_rows=row_map_triton.map_rows,
        permute=permute_triton.permute,
        permute_cast=permute_cast_triton.permute_cast,
        unpermute=permute_triton.unpermute,
        route=router_triton.route,
        balance_stats=balance_triton.balance_stats,
    )


def native_kernels() -> MoEKernels:
    return replace(MOE_IN_TORCH, glu=native_glu, weighted_activation=native_activation)


def kernels_named(name: str, device: str, number_format: str | None = None, here: HostInfo | None = None) -> MoEKernels:
    """All jobs by one backend, ready to be handed to the model."""
    here = probe_host() if here is None else here
    for job in ("glu",) if name == "native" else JOBS:
        resolve(job, name, device, here, number_format)
    return {"torch": torch_kernels, "triton": triton_kernels, "native": native_kernels}[name]()


def compile_regions(kernels: MoEKernels) -> MoEKernels:
    """Those that are torch's own operations, compiled; other kernels as they are."""
    activation = kernels.weighted_activation
    if activation is MOE_IN_TORCH.weighted_activation:
        activation = region(weighted_activation_reference)
    route = region(kernels.route) if kernels.route is MOE_IN_TORCH.route else kernels.route
    return replace(kernels, route=route, weighted_activation=activation, balance_term=region(balance_term))


def kernels_for(run: RunConfig, device: str) -> MoEKernels:
    """The kernels of `run.kernels`; raises where this machine cannot run one of them in `precision.compute`."""
    here, dtype = probe_host(), run.precision.compute
    experts = experts_in_use(run, device)
    if device == "cuda" and experts == "grouped" and matmul_format(run) != dtype:
        raise BackendError(
            f"kernels.experts: grouped takes bfloat16 on a GPU, and precision.recipe {run.precision.recipe} gives it "
            "float32 while kernels.narrow_gemm is emulated; use kernels.narrow_gemm scaled_mm, or kernels.experts "
            "sequential"
        )
    resolve("experts", experts, device, here, dtype)
    resolve("expert_permute", run.kernels.permute, device, here, dtype)
    kernels = kernels_named(run.kernels.backend, device, dtype, here)
    if run.kernels.compile == "none":
        return kernels
    require_compiler(device, here)
    return compile_regions(kernels)
