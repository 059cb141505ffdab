"""Experts on a CPU: gather, two products, the gate between them, and the sum per source row, a few experts at a time.

S source rows, K choices per row, P rows with pads, r rows of one turn, e experts, L width of a row, F hidden width,
G = 2F.

Three things cost a CPU more than the products: fresh memory, planning a product for a shape it has not seen, and
passes over tensors that no cache holds. So experts take turns: the rows of as many as fit the cache are gathered,
multiplied, gated and multiplied again before the next ones begin, in buffers used by all turns; row counts are rounded
up (``expert_rows.py``); and only the first product's result is kept for the backward, which gathers rows and computes
the activation again. The answers of a source row are added up in float32, each times its weight, in one pass.

Weights may be wider than the rows: an expert's weight is cast when its turn comes. The twin of all this is the plain
layer: ``moe/grouped_experts.py`` with one product per expert.

Experts as one operation with a gradient of its own: ``moe/cpu_fused_experts.py`` behind the engine's contract.

S source rows here, K choices per row, e experts of this rank, L width of a row, G twice the hidden width.

For the backward it keeps the source rows, the first product, and where each row went. Weight gradients are computed
with the rest, or put off where the schedule asks for that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.moe.dispatch.base import Arrived
from moefold.moe.experts import ExpertWeights
from moefold.moe.padded_permutation import (
    ExpertRows,
    choices_of_rows,
    lay_out_rows,
    weights_of_choices,
    weights_of_rows,
)
from moefold.moe.permute import count_choices
from moefold.nn.matmul_policy import WeightGradQueue
from moefold.ops.glu import GLU as Gate
from moefold.ops.segments import segment_sum

# Numbers before the gate that experts of one turn may have: two megabytes in bfloat16.
AT_ONCE = 1 << 20


class FusedWeights(NamedTuple):
    """As [out, in]; gate and up stand above each other. Biases are absent or one row per expert."""

    gate_up_eGL: Tensor
    down_eLF: Tensor
    gate_up_bias_eG: Tensor | None
    down_bias_eL: Tensor | None


class Backward(NamedTuple):
    """Gradients; those of the two weights only where they were wanted at once."""

    dx_SL: Tensor
    dweight_SK: Tensor
    dgate_up_eGL: Tensor | None
    ddown_eLF: Tensor | None
    dgate_up_bias_eG: Tensor | None
    ddown_bias_eL: Tensor | None
    # What the weights' gradients are computed from later.
    dgate_up_PG: Tensor | None
    act_PF: Tensor | None


class Turn(NamedTuple):
    """Neighbouring experts that are computed together, how many rows each has, and where those stand."""

    experts: slice
    sizes: tuple[int, ...]
    span: slice


def fused_forward(
    x_SL: Tensor, weight_SK: Tensor, weights: FusedWeights, rows: ExpertRows, gate: Gate
) -> tuple[Tensor, Tensor]:
    """Each source row's weighed answers, added up; and the first product, for the backward."""
    dim, hidden = x_SL.shape[1], weights.down_eLF.shape[2]
    gate_up_PG = x_SL.new_empty(sum(rows.sizes), 2 * hidden)
    answer_PL = x_SL.new_empty(sum(rows.sizes), dim)
    turns = turns_of(rows, hidden)
    gathered, acts = (_buffer(x_SL, turns, wide) for wide in (dim, hidden))
    for turn in turns:
        x_rL, act_rF = _take(x_SL, rows, turn, gathered), acts[: sum(turn.sizes)]
        _products(x_rL, weights.gate_up_eGL, weights.gate_up_bias_eG, gate_up_PG[turn.span], turn)
        gate.forward(gate_up_PG[turn.span], act_rF)
        _products(act_rF, weights.down_eLF, weights.down_bias_eL, answer_PL[turn.span], turn)
    return segment_sum(answer_PL, rows.row_C, rows.first_S, weights_of_choices(weight_SK, rows)), gate_up_PG


def fused_backward(
    dout_SL: Tensor,
    x_SL: Tensor,
    weight_SK: Tensor,
    gate_up_PG: Tensor,
    weights: FusedWeights,
    rows: ExpertRows,
    gate: Gate,
    at_once: tuple[bool, bool],
) -> Backward:
    """``at_once``: whether the gradients of the first and of the second weight are computed here, or later."""
    dim, hidden = x_SL.shape[1], weights.down_eLF.shape[2]
    found, turns = _room_for(x_SL, weights, rows, at_once), turns_of(rows, hidden)
    weight_P = weights_of_rows(weight_SK, rows)
    dweight_P = weight_P.new_empty(weight_P.shape)
    dx_PL = x_SL.new_empty(sum(rows.sizes), dim)
    gathered, acts, dacts, dgates = (_buffer(x_SL, turns, wide) for wide in (dim, hidden, hidden, 2 * hidden))
    for turn in turns:
        span, count = turn.span, sum(turn.sizes)
        dout_rL, dact_rF = _take(dout_SL, rows, turn, gathered), dacts[:count]
        dgate_rG = dgates[:count] if found.dgate_up_PG is None else found.dgate_up_PG[span]
        act_rF = acts[:count] if found.act_PF is None else found.act_PF[span]
        _back_products(dout_rL, weights.down_eLF, dact_rF, turn)
        dweight_P[span] = gate.backward(gate_up_PG[span], dact_rF, weight_P[span], dgate_rG, act_rF)
        if weights.down_bias_eL is not None:
            _down_bias_gradients(dout_rL, weight_P[span], weights.down_bias_eL, found, turn, dweight_P[span])
        if found.ddown_eLF is not None:
            _weight_gradients(dout_rL, act_rF, found.ddown_eLF, turn)
        if found.dgate_up_bias_eG is not None:
            for sums, part in zip(found.dgate_up_bias_eG[turn.experts], dgate_rG.split(turn.sizes), strict=True):
                sums.copy_(part.sum(0))
        if found.dgate_up_eGL is not None:
            _weight_gradients(dgate_rG, _take(x_SL, rows, turn, gathered), found.dgate_up_eGL, turn)
        _back_products(dgate_rG, weights.gate_up_eGL, dx_PL[span], turn)
    return found._replace(
        dx_SL=segment_sum(dx_PL, rows.row_C, rows.first_S, None),
        dweight_SK=choices_of_rows(dweight_P, rows, weight_SK.shape),
    )


def gate_up_gradient(x_SL: Tensor, dgate_up_PG: Tensor, rows: ExpertRows, like_eGL: Tensor) -> Tensor:
    """The first weight's gradient, later."""
    turns = turns_of(rows, like_eGL.shape[1] // 2)
    made, gathered = _zeros_where_idle(like_eGL, rows), _buffer(x_SL, turns, x_SL.shape[1])
    for turn in turns:
        _weight_gradients(dgate_up_PG[turn.span], _take(x_SL, rows, turn, gathered), made, turn)
    return made


def down_gradient(dout_SL: Tensor, act_PF: Tensor, rows: ExpertRows, like_eLF: Tensor) -> Tensor:
    """The second weight's gradient, later."""
    turns = turns_of(rows, like_eLF.shape[2])
    made, gathered = _zeros_where_idle(like_eLF, rows), _buffer(dout_SL, turns, dout_SL.shape[1])
    for turn in turns:
        _weight_gradients(_take(dout_SL, rows, turn, gathered), act_PF[turn.span], made, turn)
    return made


def turns_of(rows: ExpertRows, hidden: int) -> list[Turn]:
    """As many experts at a time as have at most ``AT_ONCE`` numbers before the gate; one expert may have more."""
    turns: list[Turn] = []
    first = start = stop = 0
    for expert, size in enumerate(rows.sizes):
        if stop > start and (stop - start + size) * 2 * hidden > AT_ONCE:
            turns.append(Turn(slice(first, expert), rows.sizes[first:expert], slice(start, stop)))
            first, start = expert, stop
        stop += size
    if stop > start:
        turns.append(Turn(slice(first, len(rows.sizes)), rows.sizes[first:], slice(start, stop)))
    return turns


def _room_for(x_SL: Tensor, weights: FusedWeights, rows: ExpertRows, at_once: tuple[bool, bool]) -> Backward:
    """The gradients, not computed yet."""
    first, second = at_once
    total, hidden = sum(rows.sizes), weights.down_eLF.shape[2]

    def room(like: Tensor | None) -> Tensor | None:
        return None if like is None else _zeros_where_idle(like, rows)

    return Backward(
        dx_SL=x_SL,
        dweight_SK=x_SL,
        dgate_up_eGL=room(weights.gate_up_eGL if first else None),
        ddown_eLF=room(weights.down_eLF if second else None),
        dgate_up_bias_eG=room(weights.gate_up_bias_eG),
        ddown_bias_eL=room(weights.down_bias_eL),
        dgate_up_PG=None if first else x_SL.new_empty(total, 2 * hidden),
        act_PF=None if second else x_SL.new_empty(total, hidden),
    )


def _zeros_where_idle(like: Tensor, rows: ExpertRows) -> Tensor:
    """Room for a gradient; that of an expert without a row is 0."""
    made = torch.empty_like(like)
    for expert, size in enumerate(rows.sizes):
        if not size:
            made[expert].zero_()
    return made


def _buffer(like: Tensor, turns: list[Turn], dim: int) -> Tensor:
    """Room for the rows of the largest turn."""
    return like.new_empty(max((sum(turn.sizes) for turn in turns), default=0), dim)


def _take(x_SL: Tensor, rows: ExpertRows, turn: Turn, buffer: Tensor) -> Tensor:
    return torch.index_select(x_SL, 0, rows.source_P[turn.span], out=buffer[: sum(turn.sizes)])


def _products(rows_rA: Tensor, weight_eBA: Tensor, bias_eB: Tensor | None, out_rB: Tensor, turn: Turn) -> None:
    """Each expert's rows times its matrix."""
    weights = weight_eBA[turn.experts].unbind()
    biases = [None] * len(weights) if bias_eB is None else bias_eB[turn.experts].unbind()
    for rows, weight, bias, out in zip(
        rows_rA.split(turn.sizes), weights, biases, out_rB.split(turn.sizes), strict=True
    ):
        if not rows.shape[0]:
            continue
        if bias is None:
            torch.mm(rows, weight.to(rows.dtype).t(), out=out)
        else:
            torch.addmm(bias.to(rows.dtype), rows, weight.to(rows.dtype).t(), out=out)


def _back_products(grad_rB: Tensor, weight_eBA: Tensor, out_rA: Tensor, turn: Turn) -> None:
    """Gradients of those rows."""
    weights = weight_eBA[turn.experts].unbind()
    for grad, weight, out in zip(grad_rB.split(turn.sizes), weights, out_rA.split(turn.sizes), strict=True):
        if grad.shape[0]:
            torch.mm(grad, weight.to(grad.dtype), out=out)


def _weight_gradients(left_rA: Tensor, right_rB: Tensor, out_eAB: Tensor, turn: Turn) -> None:
    """Each expert's rows on the left, turned, times those on the right, in the format of ``out``."""
    outs = out_eAB[turn.experts].unbind()
    for left, right, out in zip(left_rA.split(turn.sizes), right_rB.split(turn.sizes), outs, strict=True):
        if not left.shape[0]:
            continue
        if out.dtype == left.dtype:
            torch.mm(left.t(), right, out=out)
        else:
            out.copy_(torch.mm(left.t(), right))


def _down_bias_gradients(
    dout_rL: Tensor, weight_r: Tensor, bias_eL: Tensor, found: Backward, turn: Turn, dweight_r: Tensor
) -> None:
    """The bias is weighed with the answer, so the weights learn from it too."""
    assert found.ddown_bias_eL is not None
    biases, sums = bias_eL[turn.experts].unbind(), found.ddown_bias_eL[turn.experts].unbind()
    parts = (dout_rL.split(turn.sizes), weight_r.split(turn.sizes), dweight_r.split(turn.sizes))
    for bias, sum_, dout, weight, dweight in zip(biases, sums, *parts, strict=True):
        dweight += dout @ bias.to(dout.dtype)
        sum_.copy_(weight.to(dout.dtype) @ dout)


class CpuFusedExperts:
    def __init__(self, gate: Gate, weight_grads: WeightGradQueue | None = None) -> None:
        self.gate, self.weight_grads = gate, weight_grads

    def __call__(self, arrived: Arrived, weights: ExpertWeights) -> Tensor:
        down_bias = None if weights.down_bias is None else weights.down_bias * weights.bias_scale
        out: Tensor = _Fused.apply(
            arrived.rows_SD,
            arrived.choices.weight_tK,
            weights.gate_up,
            weights.down,
            weights.gate_up_bias,
            down_bias,
            lay_out_rows(arrived.choices, _rows_per_expert(arrived, weights)),
            self.gate,
            self.weight_grads,
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
        weight_grads: WeightGradQueue | None,
    ) -> Tensor:
        weights = _stacked(gate_up, down, gate_up_bias, down_bias)
        y_SL, gate_up_PG = fused_forward(x_SL, weight_SK, weights, rows, gate)
        _, *maps = rows
        ctx.save_for_backward(x_SL, weight_SK, gate_up_PG, gate_up, down, gate_up_bias, down_bias, *maps)
        ctx.sizes, ctx.gate, ctx.weight_grads = rows.sizes, gate, weight_grads
        # What recomputation unpacks is no longer the parameter itself.
        ctx.parameters = gate_up, down
        return y_SL

    @staticmethod
    def backward(ctx: Any, dout_SL: Tensor) -> tuple[Tensor | None, ...]:
        x_SL, weight_SK, gate_up_PG, gate_up, down, gate_up_bias, down_bias, *maps = ctx.saved_tensors
        rows, weight_grads = ExpertRows(ctx.sizes, *maps), ctx.weight_grads
        later = weight_grads is not None and weight_grads.active
        at_once = (ctx.needs_input_grad[2] and not later, ctx.needs_input_grad[3] and not later)
        weights, dout_SL = _stacked(gate_up, down, gate_up_bias, down_bias), dout_SL.contiguous()
        found = fused_backward(dout_SL, x_SL, weight_SK, gate_up_PG, weights, rows, ctx.gate, at_once)
        if later:
            dgate_up_PG, act_PF = found.dgate_up_PG, found.act_PF
            assert dgate_up_PG is not None and act_PF is not None
            own_gate_up, own_down = ctx.parameters
            weight_grads.put(own_down, lambda: down_gradient(dout_SL, act_PF, rows, down))
            weight_grads.put(
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
