"""Experts as one operation with a gradient of its own: ``ops/fused_experts.py`` behind the engine's contract.

S source rows here, K choices per row, e experts of this rank, L width of a row, G twice the hidden width.

For the backward it keeps the source rows, the first product, and where each row went. Weight gradients are computed
with the rest, or put off where the schedule asks for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefold.dispatch.contract import Arrived
from moefold.model.moe.experts import ExpertWeights
from moefold.model.products import Deferral
from moefold.ops.expert_rows import ExpertRows, lay_out_rows
from moefold.ops.fused_experts import (
    FusedWeights,
    down_gradient,
    fused_backward,
    fused_forward,
    gate_up_gradient,
)
from moefold.ops.gates import Gate
from moefold.ops.permute import count_choices


class FusedExperts:
    def __init__(self, gate: Gate, deferral: Deferral | None = None) -> None:
        self.gate, self.deferral = gate, deferral

    def __call__(self, arrived: Arrived, weights: ExpertWeights) -> Tensor:
        down_bias = None if weights.down_bias is None else weights.down_bias * weights.bias_share
        out: Tensor = _Fused.apply(
            arrived.rows_SD,
            arrived.choices.weight_tK,
            weights.gate_up,
            weights.down,
            weights.gate_up_bias,
            down_bias,
            lay_out_rows(arrived.choices, _rows_per_expert(arrived, weights)),
            self.gate,
            self.deferral,
        )
        return out


def _rows_per_expert(arrived: Arrived, weights: ExpertWeights) -> list[int]:
    """Empty slots are not computed, so where experts have slots their real rows are counted."""
    if arrived.slots is None:
        return arrived.rows_per_expert
    counted: list[int] = count_choices(arrived.choices, weights.gate_up.shape[0]).tolist()
    return counted


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SL: Tensor,
        weight_SK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        rows: ExpertRows,
        gate: Gate,
        deferral: Deferral | None,
    ) -> Tensor:
        weights = _stacked(gate_up, down, gate_up_bias, down_bias)
        y_SL, gate_up_PG = fused_forward(x_SL, weight_SK, weights, rows, gate)
        _, *maps = rows
        ctx.save_for_backward(x_SL, weight_SK, gate_up_PG, gate_up, down, gate_up_bias, down_bias, *maps)
        ctx.sizes, ctx.gate, ctx.deferral = rows.sizes, gate, deferral
        # What recomputation unpacks is no longer the parameter itself.
        ctx.parameters = gate_up, down
        return y_SL

    @staticmethod
    def backward(ctx: Any, dout_SL: Tensor) -> tuple[Tensor | None, ...]:
        x_SL, weight_SK, gate_up_PG, gate_up, down, gate_up_bias, down_bias, *maps = ctx.saved_tensors
        rows, deferral = ExpertRows(ctx.sizes, *maps), ctx.deferral
        later = deferral is not None and deferral.active
        at_once = (ctx.needs_input_grad[2] and not later, ctx.needs_input_grad[3] and not later)
        weights, dout_SL = _stacked(gate_up, down, gate_up_bias, down_bias), dout_SL.contiguous()
        found = fused_backward(dout_SL, x_SL, weight_SK, gate_up_PG, weights, rows, ctx.gate, at_once)
        if later:
            dgate_up_PG, act_PF = found.dgate_up_PG, found.act_PF
            assert dgate_up_PG is not None and act_PF is not None
            own_gate_up, own_down = ctx.parameters
            deferral.put(own_down, lambda: down_gradient(dout_SL, act_PF, rows, down))
            deferral.put(
                own_gate_up,
                lambda: gate_up_gradient(x_SL, dgate_up_PG, rows, weights.gate_up_eGL).view(gate_up.shape),
            )
        return (
            found.dx_SL,
            found.dweight_SK,
            None if found.dgate_up_eGL is None else found.dgate_up_eGL.view(gate_up.shape),
            found.ddown_eLF,
            None if found.dgate_up_bias_eG is None else found.dgate_up_bias_eG.view(gate_up_bias.shape),
            found.ddown_bias_eL,
            None,
            None,
            None,
        )


def _stacked(gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None) -> FusedWeights:
    return FusedWeights(
        gate_up.flatten(1, 2), down, None if gate_up_bias is None else gate_up_bias.flatten(1), down_bias
    )
