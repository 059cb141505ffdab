"""Experts on a CPU: gather, two products, the gate between them, and the sum per source row, one expert at a time.

S source rows, K choices per row, P rows with pads, r rows of one expert, e experts, L width of a row, F hidden width,
G = 2F.

Three things cost a CPU more than the products: fresh memory, planning a product for a shape it has not seen, and
passes over tensors that no cache holds. So an expert's rows are gathered, multiplied, gated and multiplied again
before the next expert begins, in buffers used by all experts in turn; row counts are rounded up (``expert_rows.py``);
and only the first product's result is kept for the backward, which gathers rows and computes the activation again. The
answers of a source row are added up in float32, each times its weight, in one pass (``embedding_bag``).

Weights may be wider than the rows: an expert's weight is cast when its turn comes. The twin of all this is the plain
layer: ``model/moe/sorted_experts.py`` with one product per expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.ops.add_up import add_up
from moefold.ops.expert_rows import ExpertRows, choices_of_rows, weights_of_choices, weights_of_rows
from moefold.ops.gates import Gate


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


def fused_forward(
    x_SL: Tensor, weight_SK: Tensor, weights: FusedWeights, rows: ExpertRows, gate: Gate
) -> tuple[Tensor, Tensor]:
    """Each source row's weighed answers, added up; and the first product, for the backward."""
    hidden = weights.down_eLF.shape[2]
    gate_up_PG = x_SL.new_empty(sum(rows.sizes), 2 * hidden)
    answer_PL = x_SL.new_empty(sum(rows.sizes), x_SL.shape[1])
    gathered, acts = _buffer(x_SL, rows, x_SL.shape[1]), _buffer(x_SL, rows, hidden)
    for expert, span in _turns(rows):
        x_rL, act_rF = _take(x_SL, rows.source_P[span], gathered), acts[: span.stop - span.start]
        _product(x_rL, weights.gate_up_eGL[expert], _of(weights.gate_up_bias_eG, expert), gate_up_PG[span])
        gate.forward(gate_up_PG[span], act_rF)
        _product(act_rF, weights.down_eLF[expert], _of(weights.down_bias_eL, expert), answer_PL[span])
    return add_up(answer_PL, rows.row_C, rows.first_S, weights_of_choices(weight_SK, rows)), gate_up_PG


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
    hidden = weights.down_eLF.shape[2]
    found = _room_for(x_SL, weights, rows, at_once)
    weight_P = weights_of_rows(weight_SK, rows)
    dweight_P = weight_P.new_empty(weight_P.shape)
    dx_PL = x_SL.new_empty(sum(rows.sizes), x_SL.shape[1])
    gathered = _buffer(x_SL, rows, x_SL.shape[1])
    acts, dacts, dgates = (_buffer(x_SL, rows, width) for width in (hidden, hidden, 2 * hidden))
    for expert, span in _turns(rows):
        count = span.stop - span.start
        dout_rL = _take(dout_SL, rows.source_P[span], gathered)
        dact_rF = torch.mm(dout_rL, weights.down_eLF[expert].to(x_SL.dtype), out=dacts[:count])
        dgate_rG = dgates[:count] if found.dgate_up_PG is None else found.dgate_up_PG[span]
        act_rF = acts[:count] if found.act_PF is None else found.act_PF[span]
        dweight_P[span] = gate.backward(gate_up_PG[span], dact_rF, weight_P[span], dgate_rG, act_rF)
        if weights.down_bias_eL is not None and found.ddown_bias_eL is not None:
            weighed_r = weight_P[span].to(x_SL.dtype)
            dweight_P[span] += dout_rL @ weights.down_bias_eL[expert].to(x_SL.dtype)
            found.ddown_bias_eL[expert] = weighed_r @ dout_rL
        if found.ddown_eLF is not None:
            _transposed_product(dout_rL, act_rF, found.ddown_eLF[expert])
        if found.dgate_up_bias_eG is not None:
            found.dgate_up_bias_eG[expert] = dgate_rG.sum(0)
        if found.dgate_up_eGL is not None:
            _transposed_product(dgate_rG, _take(x_SL, rows.source_P[span], gathered), found.dgate_up_eGL[expert])
        torch.mm(dgate_rG, weights.gate_up_eGL[expert].to(x_SL.dtype), out=dx_PL[span])
    return found._replace(
        dx_SL=add_up(dx_PL, rows.row_C, rows.first_S, None),
        dweight_SK=choices_of_rows(dweight_P, rows, weight_SK.shape),
    )


def gate_up_gradient(x_SL: Tensor, dgate_up_PG: Tensor, rows: ExpertRows, like_eGL: Tensor) -> Tensor:
    """The first weight's gradient, later."""
    made, gathered = _zeros_where_idle(like_eGL, rows), _buffer(x_SL, rows, x_SL.shape[1])
    for expert, span in _turns(rows):
        _transposed_product(dgate_up_PG[span], _take(x_SL, rows.source_P[span], gathered), made[expert])
    return made


def down_gradient(dout_SL: Tensor, act_PF: Tensor, rows: ExpertRows, like_eLF: Tensor) -> Tensor:
    """The second weight's gradient, later."""
    made, gathered = _zeros_where_idle(like_eLF, rows), _buffer(dout_SL, rows, dout_SL.shape[1])
    for expert, span in _turns(rows):
        _transposed_product(_take(dout_SL, rows.source_P[span], gathered), act_PF[span], made[expert])
    return made


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


def _turns(rows: ExpertRows) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and where those stand."""
    start = 0
    for expert, size in enumerate(rows.sizes):
        if size:
            yield expert, slice(start, start + size)
        start += size


def _buffer(like: Tensor, rows: ExpertRows, width: int) -> Tensor:
    """Room for the largest expert's rows."""
    return like.new_empty(max(rows.sizes, default=0), width)


def _take(x_SL: Tensor, source_r: Tensor, buffer: Tensor) -> Tensor:
    return torch.index_select(x_SL, 0, source_r, out=buffer[: source_r.shape[0]])


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    weight = weight.to(rows.dtype)
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias.to(rows.dtype), rows, weight.t(), out=out)


def _transposed_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """left^T right, in the format of ``out``."""
    if out.dtype == left.dtype:
        torch.mm(left.t(), right, out=out)
    else:
        out.copy_(torch.mm(left.t(), right))


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
