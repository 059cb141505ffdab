"""Which engine runs the experts, by name."""

from __future__ import annotations

from moefold.config.moe import MoEConfig
from moefold.model.moe.experts import EngineMaker, ExpertEngine
from moefold.model.moe.fused_experts import FusedExperts
from moefold.model.moe.kernel_experts import KernelExperts
from moefold.model.moe.moe_kernels import MOE_IN_TORCH, MoEKernels
from moefold.model.moe.sorted_experts import SortedExperts
from moefold.model.products import Deferral, Products
from moefold.ops.grouped_matmul import GroupedMatmul, grouped, sequential


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
