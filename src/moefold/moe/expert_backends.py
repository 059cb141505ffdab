"""Which backend runs the experts, by name (``kernels.experts``)."""

from __future__ import annotations

from moefold.config.moe import MoEConfig
from moefold.moe.cpu_fused_experts import CpuFusedExperts
from moefold.moe.experts import ExpertBackend, ExpertBackendMaker
from moefold.moe.grouped_experts import (
    GroupedExperts,
    KernelPermutation,
    TorchPermutation,
    TransformerEnginePermutation,
    kernel_activation,
)
from moefold.moe.moe_kernels import MOE_IN_TORCH, MoEKernels
from moefold.nn.float32_matmul import Multiply, multiply_in_compute
from moefold.nn.matmul_kernels import ENGINE_MATMULS, GROUPED_MATMULS, GroupedMatmul
from moefold.nn.matmul_policy import MatmulPolicy, WeightGradQueue
from moefold.nn.step_retention import KEEP_ALL, Retention
from moefold.ops.engines import load_engine


def expert_backend(
    name: str,
    matmul_policy: MatmulPolicy,
    weight_grads: WeightGradQueue | None = None,
    kernels: MoEKernels = MOE_IN_TORCH,
    permute: str = "backend",
    retain: Retention = KEEP_ALL,
    multiply: Multiply = multiply_in_compute,
) -> ExpertBackendMaker:
    """``weight_grads``: where deferred weight gradients wait, if the schedule defers them. ``retain``: what is kept of
    the steps of the experts. ``multiply``: the matmuls of fused experts; others have those of ``matmul_policy``.

    ``permute``: whose permutation surrounds grouped GEMMs (``kernels.permute``).
    """

    def make(config: MoEConfig) -> ExpertBackend:
        if name == "fused":
            return CpuFusedExperts(kernels.glu(config.activation), weight_grads, retain, multiply)
        if name in ENGINE_MATMULS:
            # A missing or wrong version stops the run here, and not in its first step.
            load_engine(name)
        experts = grouped_experts(config, matmul_policy, (GROUPED_MATMULS | ENGINE_MATMULS)[name], kernels, retain)
        if permute == "transformer_engine":
            experts.permutation = TransformerEnginePermutation(load_engine(permute))
        return experts

    return make


def grouped_experts(
    moe: MoEConfig,
    matmul_policy: MatmulPolicy,
    matmul: GroupedMatmul,
    kernels: MoEKernels = MOE_IN_TORCH,
    retain: Retention = KEEP_ALL,
) -> GroupedExperts:
    """Kernels where there are any; in torch, single operations are faster than the kernels' references."""
    in_torch = kernels.permute is MOE_IN_TORCH.permute
    permutation = TorchPermutation() if in_torch else KernelPermutation(kernels)
    return GroupedExperts(moe, matmul_policy, matmul, permutation, kernel_activation(kernels, moe.activation), retain)
