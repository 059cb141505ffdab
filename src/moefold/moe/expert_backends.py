"""Which engine runs the experts, by name."""

from __future__ import annotations

from moefold.config.moe import MoEConfig
from moefold.moe.cpu_fused_experts import CpuFusedExperts
from moefold.moe.experts import ExpertBackend, ExpertBackendMaker
from moefold.moe.grouped_experts import GroupedExperts, KernelGroupedExperts
from moefold.moe.moe_kernels import MOE_IN_TORCH, MoEKernels
from moefold.nn.grouped_mm import GroupedMatmul, grouped, sequential
from moefold.nn.matmul_policy import MatmulPolicy, WeightGradQueue


def expert_backend(
    name: str, products: MatmulPolicy, weight_grads: WeightGradQueue | None = None, kernels: MoEKernels = MOE_IN_TORCH
) -> ExpertBackendMaker:
    """``weight_grads``: where weight gradients wait, if the schedule puts them off."""

    def around(matmul: GroupedMatmul, moe: MoEConfig) -> ExpertBackend:
        """In torch, single steps are faster than twins of kernels."""
        if kernels.permute is MOE_IN_TORCH.permute:
            return GroupedExperts(moe, products, matmul)
        return KernelGroupedExperts(moe, products, matmul, kernels)

    def make(config: MoEConfig) -> ExpertBackend:
        makers: dict[str, ExpertBackendMaker] = {
            "sequential": lambda moe: around(sequential, moe),
            "grouped": lambda moe: around(grouped, moe),
            "fused": lambda moe: CpuFusedExperts(kernels.glu(moe.activation), weight_grads),
        }
        return makers[name](config)

    return make
