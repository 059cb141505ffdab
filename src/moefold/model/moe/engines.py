"""Which engine runs the experts, by name."""

from __future__ import annotations

from moefold.config.moe import MoEConfig
from moefold.model.moe.experts import EngineMaker, ExpertEngine
from moefold.model.moe.fused_experts import FusedExperts
from moefold.model.moe.sorted_experts import SortedExperts
from moefold.model.products import Deferral, Products
from moefold.ops.grouped_matmul import grouped, sequential


def engine_named(name: str, products: Products, deferral: Deferral | None = None) -> EngineMaker:
    """``deferral``: where weight gradients wait, if the schedule puts them off."""

    def make(config: MoEConfig) -> ExpertEngine:
        makers: dict[str, EngineMaker] = {
            "sequential": lambda moe: SortedExperts(moe, products, sequential),
            "grouped": lambda moe: SortedExperts(moe, products, grouped),
            "fused": lambda moe: FusedExperts(moe, deferral),
        }
        return makers[name](config)

    return make
