"""The kernels of an MoE layer beside those that any model has, and a whole set of them by a backend's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from moefold.checks.kernels import experts_in_use
from moefold.config.run import RunConfig
from moefold.moe.compiled_regions import region, require_compiler
from moefold.moe.kernels import router_reference as balance_torch
from moefold.moe.kernels import router_reference as router_torch
from moefold.moe.kernels import row_map_reference as permute_torch
from moefold.moe.kernels import row_map_reference as row_map
from moefold.moe.load_balancing import BalanceTerm, balance_term
from moefold.ops import backends
from moefold.ops.activations import weighted_activation_reference
from moefold.ops.backends import JOBS, Kernels, resolve
from moefold.ops.host_probe import HostInfo, probe_host
from moefold.ops.native.glu import native_activation, native_glu


@dataclass(frozen=True, kw_only=True)
class MoEKernels(Kernels):
    """Row maps, permutation, routing and the statistics of load balancing, each as a function."""

    map_rows: Callable[..., row_map.RowMap]
    permute: Callable[..., tuple[Tensor, Tensor | None]]
    unpermute: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    balance_stats: Callable[..., balance_torch.BalanceStats]
    # None is the router's own, which shares its scores.
    balance_term: BalanceTerm | None = None


def _shared(kernels: Kernels) -> dict[str, Any]:
    return {field.name: getattr(kernels, field.name) for field in fields(Kernels)}


def torch_kernels() -> MoEKernels:
    return MoEKernels(
        **_shared(backends.torch_kernels()),
        map_rows=row_map.map_rows,
        permute=permute_torch.permute,
        unpermute=permute_torch.unpermute,
        route=router_torch.route,
        balance_stats=balance_torch.balance_stats,
    )


MOE_IN_TORCH = torch_kernels()


def triton_kernels() -> MoEKernels:
    # Only here: triton is an extra.
    from moefold.moe.kernels import load_balancing_triton as balance_triton
    from moefold.moe.kernels import permute_triton, router_triton, row_map_triton

    return MoEKernels(
        **_shared(backends.triton_kernels()),
        map_rows=row_map_triton.map_rows,
        permute=permute_triton.permute,
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
    resolve("experts", experts_in_use(run, device), device, here, dtype)
    resolve("expert_permute", run.kernels.permute, device, here, dtype)
    kernels = kernels_named(run.kernels.backend, device, dtype, here)
    if run.kernels.compile == "none":
        return kernels
    require_compiler(device, here)
    return compile_regions(kernels)
