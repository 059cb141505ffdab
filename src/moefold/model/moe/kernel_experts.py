"""Experts between kernels: one map of rows, and every step between the two grouped products a single pass.

S source rows here, R rows sorted by expert, e experts of this rank, L width of a row, F hidden width, G = 2F.

The same computation as ``SortedExperts``, which is its twin. What differs is who does the steps around the products:
they are handed in as ``Kernels``, so that a GPU has its own and everything else has theirs in torch.
"""

from __future__ import annotations

from torch import Tensor

from moefold.config.moe import MoEConfig
from moefold.dispatch.contract import Arrived
from moefold.model.moe.experts import ExpertWeights
from moefold.model.moe.moe_kernels import MoEKernels
from moefold.model.moe.sorted_experts import per_row, weigh
from moefold.model.products import Products
from moefold.ops.grouped_matmul import GroupedMatmul
from moefold.ops.kernels.row_map import RowMap, map_slots


class KernelExperts:
    def __init__(self, config: MoEConfig, products: Products, matmul: GroupedMatmul, kernels: MoEKernels) -> None:
        self.activation = config.activation
        self.weigh_activation = config.weight_at == "activation"
        self.products, self.matmul, self.kernels = products, matmul, kernels

    def __call__(self, arrived: Arrived, weights: ExpertWeights) -> Tensor:
        rows, weight_SK = self._map(arrived, weights.gate_up.shape[0]), arrived.choices.weight_tK
        # Weights that multiply the output stay with the tokens; unpermuting multiplies.
        moved = weight_SK if self.weigh_activation else None
        rows_RL, weight_R = self.kernels.permute(arrived.rows_SD, rows, moved)
        gate_up_RG = self._times(rows_RL, weights.gate_up, arrived)
        if weights.gate_up_bias is not None:
            gate_up_RG = gate_up_RG + per_row(weights.gate_up_bias.flatten(1), rows_RL, arrived)
        hidden_RF = self.kernels.weighted_activation(gate_up_RG, weight_R, self.activation)
        out_RL = self._times(hidden_RF, weights.down, arrived)
        if weights.down_bias is not None:
            # Times 0 and not left out: every rank's bias takes part in the backward pass.
            bias_RL = per_row(weights.down_bias, rows_RL, arrived) * weights.bias_share
            out_RL = out_RL + (bias_RL if weight_R is None else weigh(bias_RL, weight_R))
        return self.kernels.unpermute(out_RL, rows, None if self.weigh_activation else weight_SK)

    def _map(self, arrived: Arrived, num_experts: int) -> RowMap:
        if arrived.slots is not None:
            return map_slots(arrived.choices, num_experts, arrived.slots)
        return self.kernels.map_rows(arrived.choices, num_experts, num_rows=sum(arrived.rows_per_expert))

    def _times(self, rows: Tensor, weight: Tensor, arrived: Arrived) -> Tensor:
        return self.products.grouped(self.matmul, rows, weight, arrived.rows_per_expert_e, arrived.rows_per_expert)
