"""Experts run on rows sorted by expert: one grouped product, the gate, another grouped product.

S source rows here, R rows sorted by expert, e experts of this rank, L width of a row, F hidden width.

The output of an expert is linear in its hidden activation, so a token's weight for the expert may as well multiply
there. That is half of what is known as memory-efficient permutation: multiplying the output would need the R x L
output again in the backward pass, while the activation is kept for the second product anyway.

Experts between kernels: one map of rows, and every step between the two grouped products a single pass.

S source rows here, R rows sorted by expert, e experts of this rank, L width of a row, F hidden width, G = 2F.

The same computation as ``GroupedExperts``, which is its twin. What differs is who does the steps around the products:
they are handed in as ``Kernels``, so that a GPU has its own and everything else has theirs in torch.
"""

from __future__ import annotations

from torch import Tensor

from moefold.config.moe import MoEConfig
from moefold.moe.dispatch.base import Arrived
from moefold.moe.experts import ExpertWeights
from moefold.moe.kernels.row_map_reference import RowMap, map_slots
from moefold.moe.moe_kernels import MoEKernels
from moefold.moe.permute import group_by_expert, group_padded, put_back, take_rows, take_weights
from moefold.nn.grouped_mm import GroupedMatmul
from moefold.nn.matmul_policy import MatmulPolicy
from moefold.ops.activations import ACTIVATIONS


class GroupedExperts:
    def __init__(self, config: MoEConfig, products: MatmulPolicy, matmul: GroupedMatmul) -> None:
        self.activation = ACTIVATIONS[config.activation]
        self.weigh_activation = config.weight_at == "activation"
        self.products, self.matmul = products, matmul

    def __call__(self, arrived: Arrived, weights: ExpertWeights) -> Tensor:
        num_experts = weights.gate_up.shape[0]
        if arrived.slots is None:
            groups = group_by_expert(arrived.choices, num_experts, sum(arrived.rows_per_expert))
        else:
            groups = group_padded(arrived.choices, num_experts, arrived.slots)
        padded = arrived.slots is not None
        rows_RL = take_rows(arrived.rows_SD, groups.token_N, padded)
        weight_R = take_weights(arrived.choices.weight_tK, groups.choice_N, padded)
        answers_RL = self._answers(rows_RL, weight_R, arrived, weights)
        return put_back(answers_RL, groups.token_N, arrived.rows_SD.shape[0], padded)

    def _answers(self, rows_RL: Tensor, weight_R: Tensor, arrived: Arrived, weights: ExpertWeights) -> Tensor:
        hidden_RF = self._hidden(rows_RL, arrived, weights)
        if self.weigh_activation:
            out_RL = self._times(weigh(hidden_RF, weight_R), weights.down, arrived)
            return (
                out_RL if weights.down_bias is None else out_RL + weigh(_bias_down(rows_RL, arrived, weights), weight_R)
            )
        out_RL = self._times(hidden_RF, weights.down, arrived)
        if weights.down_bias is not None:
            out_RL = out_RL + _bias_down(rows_RL, arrived, weights)
        return weigh(out_RL, weight_R)

    def _hidden(self, rows_RL: Tensor, arrived: Arrived, weights: ExpertWeights) -> Tensor:
        gate_up_RG = self._times(rows_RL, weights.gate_up, arrived)
        if weights.gate_up_bias is not None:
            gate_up_RG = gate_up_RG + per_row(weights.gate_up_bias.flatten(1), rows_RL, arrived)
        return self.activation(*gate_up_RG.chunk(2, dim=-1))

    def _times(self, rows: Tensor, weight: Tensor, arrived: Arrived) -> Tensor:
        return self.products.grouped(self.matmul, rows, weight, arrived.rows_per_expert_e, arrived.rows_per_expert)


def _bias_down(rows_RL: Tensor, arrived: Arrived, weights: ExpertWeights) -> Tensor:
    assert weights.down_bias is not None
    # Times 0 and not left out: every rank's bias takes part in the backward pass.
    return per_row(weights.down_bias, rows_RL, arrived) * weights.bias_scale


def weigh(rows: Tensor, weight_R: Tensor) -> Tensor:
    """Multiply in the wider of the two formats, then return to the rows' own.

    The weight's gradient is a sum over a row's whole width and feeds the router, which works in float32 for a reason.
    """
    return (rows * weight_R[:, None]).to(rows.dtype)


def per_row(bias_e: Tensor, rows_RL: Tensor, arrived: Arrived) -> Tensor:
    """Each row's own expert's bias; the total is known from the rows, so it need not be read back."""
    bias_R = bias_e.repeat_interleave(arrived.rows_per_expert_e, dim=0, output_size=rows_RL.shape[0])
    return bias_R.to(rows_RL.dtype)


class KernelGroupedExperts:
    def __init__(self, config: MoEConfig, products: MatmulPolicy, matmul: GroupedMatmul, kernels: MoEKernels) -> None:
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
            bias_RL = per_row(weights.down_bias, rows_RL, arrived) * weights.bias_scale
            out_RL = out_RL + (bias_RL if weight_R is None else weigh(bias_RL, weight_R))
        return self.kernels.unpermute(out_RL, rows, None if self.weigh_activation else weight_SK)

    def _map(self, arrived: Arrived, num_experts: int) -> RowMap:
        if arrived.slots is not None:
            return map_slots(arrived.choices, num_experts, arrived.slots)
        return self.kernels.map_rows(arrived.choices, num_experts, num_rows=sum(arrived.rows_per_expert))

    def _times(self, rows: Tensor, weight: Tensor, arrived: Arrived) -> Tensor:
        return self.products.grouped(self.matmul, rows, weight, arrived.rows_per_expert_e, arrived.rows_per_expert)
