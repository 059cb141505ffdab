"""Which engine runs the experts, by name."""

from __future__ import annotations

from moefold.config.moe import MoEConfig
from moefold.moe.cpu_fused_experts import FusedExperts
from moefold.moe.experts import EngineMaker, ExpertEngine
from moefold.moe.grouped_experts import KernelExperts, SortedExperts
from moefold.moe.moe_kernels import MOE_IN_TORCH, MoEKernels
from moefold.nn.grouped_mm import GroupedMatmul, grouped, sequential
from moefold.nn.matmul_policy import Deferral, Products


def engine_named(
    name: str, products: Products, deferral: Deferral | None = None, kernels: MoEKernels = MOE_IN_TORCH
) -> EngineMaker:
    """``deferral``: where weight gradients wait, if the schedule puts them off."""

    def around(matmul: GroupedMatmul, moe: MoEConfig) -> ExpertEngine:
        """In torch, single steps are faster than twins of kernels."""
        if kernels.permute is MOE_IN_TORCH.permute:
            return SortedExperts(moe, products, matmul)
        return KernelExperts(moe, products, matmul, kernels)

    def make(config: MoEConfig) -> ExpertEngine:
        makers: dict[str, EngineMaker] = {
            "sequential": lambda moe: around(sequential, moe),
            "grouped": lambda moe: around(grouped, moe),
            "fused": lambda moe: FusedExperts(kernels.gate(moe.activation), deferral),
        }
        return makers[name](config)

    return make
