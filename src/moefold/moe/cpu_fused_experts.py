"""Experts on a CPU as one operation: gather, GEMM, activation, GEMM, and the sum per received row, tile by tile.

Three things cost a CPU more than the GEMMs: fresh memory, planning a GEMM for a shape it has not seen, and passes over
tensors that no cache holds. So experts are computed in tiles: the rows of as many experts as fit the cache are
gathered, multiplied, activated and multiplied again before the next tile begins, in buffers that all tiles share; row
counts are rounded up (``padded_permutation.py``); and only the first GEMM's output is saved for the backward, which
recomputes the rest. The expert outputs of a received row are summed in float32, each times its prob, in one pass.

Master weights may be wider than the rows: an expert's weight is cast when its tile comes. Weight gradients are computed
in the backward, or deferred where the schedule asks for that. The reference is ``moe/grouped_experts.py`` with one
GEMM per expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.moe.dispatch.base import ExpertInput
from moefold.moe.experts import ExpertWeights
from moefold.moe.padded_permutation import (
    PaddedRowMap,
    assignments_of_rows,
    pad_rows,
    probs_of_assignments,
    probs_of_rows,
)
from moefold.moe.permute import count_assignments
from moefold.nn.float32_matmul import Multiply, multiply_in_compute
from moefold.nn.matmul_policy import WeightGradQueue
from moefold.nn.step_retention import KEEP_ALL, Retention
from moefold.ops.activations import GLU
from moefold.ops.segments import segment_sum

# Entries before the activation that the experts of one tile may have: two megabytes in bfloat16.
TILE_ENTRIES = 1 << 20


class FusedWeights(NamedTuple):
    """As [out, in]; gate and up are stacked. Biases are absent or one row per expert."""

    gate_up_eGL: Tensor
    down_eLF: Tensor
    gate_up_bias_eG: Tensor | None
    down_bias_eL: Tensor | None


class Backward(NamedTuple):
    """Gradients; those of the two weights only where they are not deferred."""

    dx_RL: Tensor
    dprob_RK: Tensor
    dgate_up_eGL: Tensor | None
    ddown_eLF: Tensor | None
    dgate_up_bias_eG: Tensor | None
    ddown_bias_eL: Tensor | None
    # What deferred weight gradients are computed from.
    dgate_up_PG: Tensor | None
    act_PF: Tensor | None


class ExpertTile(NamedTuple):
    """Neighbouring experts that are computed together, rows of each, and the span of those rows."""

    experts: slice
    sizes: tuple[int, ...]
    span: slice


def fused_forward(
    x_RL: Tensor, prob_RK: Tensor, weights: FusedWeights, rows: PaddedRowMap, gate: GLU, multiply: Multiply
) -> tuple[Tensor, Tensor]:
    """Each received row's expert outputs times probs, summed; and the first GEMM's output, for the backward."""
    dim, hidden = x_RL.shape[1], weights.down_eLF.shape[2]
    gate_up_PG = x_RL.new_empty(sum(rows.sizes), 2 * hidden)
    out_PL = x_RL.new_empty(sum(rows.sizes), dim)
    tiles = tiles_of(rows, hidden)
    gathered, acts = (_buffer(x_RL, tiles, size) for size in (dim, hidden))
    for tile in tiles:
        x_tile, act_tile = _take(x_RL, rows, tile, gathered), acts[: sum(tile.sizes)]
        _matmuls(x_tile, weights.gate_up_eGL, weights.gate_up_bias_eG, gate_up_PG[tile.span], tile, multiply)
        gate.forward(gate_up_PG[tile.span], act_tile)
        _matmuls(act_tile, weights.down_eLF, weights.down_bias_eL, out_PL[tile.span], tile, multiply)
    return segment_sum(out_PL, rows.row_N, rows.first_R, probs_of_assignments(prob_RK, rows)), gate_up_PG


def fused_backward(
    dout_RL: Tensor,
    x_RL: Tensor,
    prob_RK: Tensor,
    gate_up_PG: Tensor,
    weights: FusedWeights,
    rows: PaddedRowMap,
    gate: GLU,
    now: tuple[bool, bool],
    multiply: Multiply,
) -> Backward:
    """``now``: whether the gradients of the first and of the second weight are computed here, or deferred."""
    dim, hidden = x_RL.shape[1], weights.down_eLF.shape[2]
    grads, tiles = _gradient_buffers(x_RL, weights, rows, now), tiles_of(rows, hidden)
    prob_P = probs_of_rows(prob_RK, rows)
    dprob_P = prob_P.new_empty(prob_P.shape)
    dx_PL = x_RL.new_empty(sum(rows.sizes), dim)
    gathered, acts, dacts, dgates = (_buffer(x_RL, tiles, size) for size in (dim, hidden, hidden, 2 * hidden))
    for tile in tiles:
        span, count = tile.span, sum(tile.sizes)
        dout_tile, dact_tile = _take(dout_RL, rows, tile, gathered), dacts[:count]
        dgate_tile = dgates[:count] if grads.dgate_up_PG is None else grads.dgate_up_PG[span]
        act_tile = acts[:count] if grads.act_PF is None else grads.act_PF[span]
        _input_gradients(dout_tile, weights.down_eLF, dact_tile, tile, multiply)
        dprob_P[span] = gate.backward(gate_up_PG[span], dact_tile, prob_P[span], dgate_tile, act_tile)
        if weights.down_bias_eL is not None:
            _down_bias_gradients(dout_tile, prob_P[span], weights.down_bias_eL, grads, tile, dprob_P[span])
        if grads.ddown_eLF is not None:
            _weight_gradients(dout_tile, act_tile, grads.ddown_eLF, tile, multiply)
        if grads.dgate_up_bias_eG is not None:
            for sums, part in zip(grads.dgate_up_bias_eG[tile.experts], dgate_tile.split(tile.sizes), strict=True):
                sums.copy_(part.sum(0))
        if grads.dgate_up_eGL is not None:
            _weight_gradients(dgate_tile, _take(x_RL, rows, tile, gathered), grads.dgate_up_eGL, tile, multiply)
        _input_gradients(dgate_tile, weights.gate_up_eGL, dx_PL[span], tile, multiply)
    return grads._replace(
        dx_RL=segment_sum(dx_PL, rows.row_N, rows.first_R, None),
        dprob_RK=assignments_of_rows(dprob_P, rows, prob_RK.shape),
    )


def gate_up_gradient(
    x_RL: Tensor, dgate_up_PG: Tensor, rows: PaddedRowMap, like_eGL: Tensor, multiply: Multiply
) -> Tensor:
    """The first weight's gradient, where it was deferred."""
    tiles = tiles_of(rows, like_eGL.shape[1] // 2)
    grad, gathered = _zeros_where_idle(like_eGL, rows), _buffer(x_RL, tiles, x_RL.shape[1])
    for tile in tiles:
        _weight_gradients(dgate_up_PG[tile.span], _take(x_RL, rows, tile, gathered), grad, tile, multiply)
    return grad


def down_gradient(dout_RL: Tensor, act_PF: Tensor, rows: PaddedRowMap, like_eLF: Tensor, multiply: Multiply) -> Tensor:
    """The second weight's gradient, where it was deferred."""
    tiles = tiles_of(rows, like_eLF.shape[2])
    grad, gathered = _zeros_where_idle(like_eLF, rows), _buffer(dout_RL, tiles, dout_RL.shape[1])
    for tile in tiles:
        _weight_gradients(_take(dout_RL, rows, tile, gathered), act_PF[tile.span], grad, tile, multiply)
    return grad


def tiles_of(rows: PaddedRowMap, hidden: int) -> list[ExpertTile]:
    """As many experts per tile as have at most ``TILE_ENTRIES`` entries before the activation; one may exceed."""
    tiles: list[ExpertTile] = []
    first = start = stop = 0
    for expert, size in enumerate(rows.sizes):
        if stop > start and (stop - start + size) * 2 * hidden > TILE_ENTRIES:
            tiles.append(ExpertTile(slice(first, expert), rows.sizes[first:expert], slice(start, stop)))
            first, start = expert, stop
        stop += size
    if stop > start:
        tiles.append(ExpertTile(slice(first, len(rows.sizes)), rows.sizes[first:], slice(start, stop)))
    return tiles


def _gradient_buffers(x_RL: Tensor, weights: FusedWeights, rows: PaddedRowMap, now: tuple[bool, bool]) -> Backward:
    """Buffers for the gradients."""
    first, second = now
    total, hidden = sum(rows.sizes), weights.down_eLF.shape[2]

    def buffer(like: Tensor | None) -> Tensor | None:
        return None if like is None else _zeros_where_idle(like, rows)

    return Backward(
        dx_RL=x_RL,
        dprob_RK=x_RL,
        dgate_up_eGL=buffer(weights.gate_up_eGL if first else None),
        ddown_eLF=buffer(weights.down_eLF if second else None),
        dgate_up_bias_eG=buffer(weights.gate_up_bias_eG),
        ddown_bias_eL=buffer(weights.down_bias_eL),
        dgate_up_PG=None if first else x_RL.new_empty(total, 2 * hidden),
        act_PF=None if second else x_RL.new_empty(total, hidden),
    )


def _zeros_where_idle(like: Tensor, rows: PaddedRowMap) -> Tensor:
    """A buffer for a gradient; zeros for experts without rows."""
    grad = torch.empty_like(like)
    for expert, size in enumerate(rows.sizes):
        if not size:
            grad[expert].zero_()
    return grad


def _buffer(like: Tensor, tiles: list[ExpertTile], dim: int) -> Tensor:
    """A buffer for the rows of the largest tile."""
    return like.new_empty(max((sum(tile.sizes) for tile in tiles), default=0), dim)


def _take(x_RL: Tensor, rows: PaddedRowMap, tile: ExpertTile, buffer: Tensor) -> Tensor:
    return torch.index_select(x_RL, 0, rows.received_P[tile.span], out=buffer[: sum(tile.sizes)])


def _matmuls(
    rows_PX: Tensor,
    weight_eYX: Tensor,
    bias_eY: Tensor | None,
    out_PY: Tensor,
    tile: ExpertTile,
    multiply: Multiply,
) -> None:
    """out[e] = rows[e] @ weight[e].T + bias[e]"""
    weights = weight_eYX[tile.experts].unbind()
    biases = [None] * len(weights) if bias_eY is None else bias_eY[tile.experts].unbind()
    for rows, weight, bias, out in zip(
        rows_PX.split(tile.sizes), weights, biases, out_PY.split(tile.sizes), strict=True
    ):
        if rows.shape[0]:
            multiply(rows, weight.to(rows.dtype).t(), out, None if bias is None else bias.to(rows.dtype))


def _input_gradients(grad_PY: Tensor, weight_eYX: Tensor, out_PX: Tensor, tile: ExpertTile, multiply: Multiply) -> None:
    """out[e] = grad[e] @ weight[e]"""
    weights = weight_eYX[tile.experts].unbind()
    for grad, weight, out in zip(grad_PY.split(tile.sizes), weights, out_PX.split(tile.sizes), strict=True):
        if grad.shape[0]:
            multiply(grad, weight.to(grad.dtype), out)


def _weight_gradients(left_PX: Tensor, right_PY: Tensor, out_eXY: Tensor, tile: ExpertTile, multiply: Multiply) -> None:
    """out[e] = left[e].T @ right[e], in the dtype of ``out``."""
    outs = out_eXY[tile.experts].unbind()
    for left, right, out in zip(left_PX.split(tile.sizes), right_PY.split(tile.sizes), outs, strict=True):
        if left.shape[0]:
            multiply(left.t(), right, out)


def _down_bias_gradients(
    dout_tile: Tensor, prob_tile: Tensor, bias_eL: Tensor, grads: Backward, tile: ExpertTile, dprob_tile: Tensor
) -> None:
    """The prob multiplies the bias too, so its gradient has a term from the bias."""
    assert grads.ddown_bias_eL is not None
    biases, sums = bias_eL[tile.experts].unbind(), grads.ddown_bias_eL[tile.experts].unbind()
    parts = (dout_tile.split(tile.sizes), prob_tile.split(tile.sizes), dprob_tile.split(tile.sizes))
    for bias, sum_, dout, weight, dweight in zip(biases, sums, *parts, strict=True):
        dweight += dout @ bias.to(dout.dtype)
        sum_.copy_(weight.to(dout.dtype) @ dout)


class CpuFusedExperts:
    def __init__(
        self,
        gate: GLU,
        weight_grads: WeightGradQueue | None = None,
        retain: Retention = KEEP_ALL,
        multiply: Multiply = multiply_in_compute,
    ) -> None:
        """``retain``: the rows and the first GEMM's output can be offloaded; the activation is never kept."""
        self.gate, self.weight_grads, self.retain, self.multiply = gate, weight_grads, retain, multiply

    def __call__(self, expert_in: ExpertInput, weights: ExpertWeights) -> Tensor:
        down_bias = None if weights.down_bias is None else weights.down_bias * weights.bias_scale
        out: Tensor = _Fused.apply(
            self.retain.received("rows", expert_in.rows_RL),
            expert_in.assignments.probs,
            weights.gate_up,
            weights.down,
            weights.gate_up_bias,
            down_bias,
            pad_rows(expert_in.assignments, _rows_per_expert(expert_in, weights)),
            self.gate,
            self.weight_grads,
            self.retain,
            self.multiply,
        )
        return out


def _rows_per_expert(expert_in: ExpertInput, weights: ExpertWeights) -> list[int]:
    """Padding is not computed, so with a capacity the real rows are counted."""
    if expert_in.capacity is None:
        return expert_in.host_rows
    counted: list[int] = count_assignments(expert_in.assignments, weights.gate_up.shape[0]).tolist()
    return counted


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RL: Tensor,
        prob_RK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        rows: PaddedRowMap,
        gate: GLU,
        weight_grads: WeightGradQueue | None,
        retain: Retention,
        multiply: Multiply,
    ) -> Tensor:
        weights = _fused_weights(gate_up, down, gate_up_bias, down_bias)
        y_RL, gate_up_PG = fused_forward(x_RL, prob_RK, weights, rows, gate, multiply)
        gate_up_PG = retain.received("gate_up", gate_up_PG)
        _, *maps = rows
        ctx.save_for_backward(x_RL, prob_RK, gate_up_PG, gate_up, down, gate_up_bias, down_bias, *maps)
        ctx.sizes, ctx.gate, ctx.weight_grads, ctx.multiply = rows.sizes, gate, weight_grads, multiply
        # Under recomputation saved_tensors returns a copy; keep the nn.Parameter so that .grad accumulates on it.
        ctx.parameters = gate_up, down
        return y_RL

    @staticmethod
    def backward(ctx: Any, dout_RL: Tensor) -> tuple[Tensor | None, ...]:
        x_RL, prob_RK, gate_up_PG, gate_up, down, gate_up_bias, down_bias, *maps = ctx.saved_tensors
        rows, weight_grads, multiply = PaddedRowMap(ctx.sizes, *maps), ctx.weight_grads, ctx.multiply
        # The weights of a clone are no leaves: their gradients go home through autograd, with this backward.
        deferred = weight_grads is not None and weight_grads.active and ctx.parameters[0].is_leaf
        now = (ctx.needs_input_grad[2] and not deferred, ctx.needs_input_grad[3] and not deferred)
        weights, dout_RL = _fused_weights(gate_up, down, gate_up_bias, down_bias), dout_RL.contiguous()
        grads = fused_backward(dout_RL, x_RL, prob_RK, gate_up_PG, weights, rows, ctx.gate, now, multiply)
        if deferred:
            dgate_up_PG, act_PF = grads.dgate_up_PG, grads.act_PF
            assert dgate_up_PG is not None and act_PF is not None
            gate_up_param, down_param = ctx.parameters
            weight_grads.put(down_param, lambda: down_gradient(dout_RL, act_PF, rows, down, multiply))
            weight_grads.put(
                gate_up_param,
                lambda: gate_up_gradient(x_RL, dgate_up_PG, rows, weights.gate_up_eGL, multiply).view(gate_up.shape),
            )
        return (
            grads.dx_RL,
            grads.dprob_RK,
            None if grads.dgate_up_eGL is None else grads.dgate_up_eGL.view(gate_up.shape),
            grads.ddown_eLF,
            None if grads.dgate_up_bias_eG is None else grads.dgate_up_bias_eG.view(gate_up_bias.shape),
            grads.ddown_bias_eL,
            *[None] * 5,
        )


def _fused_weights(
    gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None
) -> FusedWeights:
    return FusedWeights(
        gate_up.flatten(1, 2), down, None if gate_up_bias is None else gate_up_bias.flatten(1), down_bias
    )
