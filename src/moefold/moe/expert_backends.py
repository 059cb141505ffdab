"""Which backend runs the experts, by name (``kernels.experts``)."""

from __future__ import annotations

from moefold.config.moe import MoEConfig
from moefold.moe.cpu_fused_experts import CpuFusedExperts
from moefold.moe.experts import ExpertBackend, ExpertBackendMaker
from moefold.moe.grouped_experts import (
    GroupedExperts,
    KernelPermutation,
    TorchPermutation,
    kernel_activation,
    torch_activation,
)
from moefold.moe.moe_kernels import MOE_IN_TORCH, MoEKernels
from moefold.nn.matmul_policy import GroupedMatmul, MatmulPolicy, WeightGradQueue, grouped, sequential


def expert_backend(
    name: str,
    matmul_policy: MatmulPolicy,
    weight_grads: WeightGradQueue | None = None,
    kernels: MoEKernels = MOE_IN_TORCH,
) -> ExpertBackendMaker:
    """``weight_grads``: where deferred weight gradients wait, if the schedule defers them."""

    def make(config: MoEConfig) -> ExpertBackend:
        makers: dict[str, ExpertBackendMaker] = {
            "sequential": lambda moe: grouped_experts(moe, matmul_policy, sequential, kernels),
            "grouped": lambda moe: grouped_experts(moe, matmul_policy, grouped, kernels),
            "fused": lambda moe: CpuFusedExperts(kernels.glu(moe.activation), weight_grads),
        }
        return makers[name](config)

    return make


def grouped_experts(
    moe: MoEConfig, matmul_policy: MatmulPolicy, matmul: GroupedMatmul, kernels: MoEKernels = MOE_IN_TORCH
) -> GroupedExperts:
    """Kernels where there are any; in torch, single operations are faster than the kernels' references."""
    if kernels.permute is MOE_IN_TORCH.permute:
        return GroupedExperts(moe, matmul_policy, matmul, TorchPermutation(), torch_activation(moe.activation))
    return GroupedExperts(
        moe, matmul_policy, matmul, KernelPermutation(kernels), kernel_activation(kernels, moe.activation)
    )
