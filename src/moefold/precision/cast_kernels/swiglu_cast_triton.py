"""SwiGLU and both casts of its output in one pass: the matmul behind it reads codes, and nothing reads it to narrow it.

A program has a square tile of the activation. It reads gates and ups, activates, multiplies by the rows' probs, rounds
to the dtype of its input and writes that, then narrows the rounded tile along features and along tokens. So the output
and both copies have the bits of `ops/kernels/swiglu_triton.py` and `cast_both_triton.py` one after the other, which
read the output once more. Gradients are those of `swiglu_triton.py`.

Scales that need the amax of the whole matrix are refused: the activation would have to be known before.

Shapes: X rows, F hidden dim, G = 2F.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moefold.config.casts import Cast
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.ops.kernels.aot_specs import Build, Traffic
from moefold.ops.kernels.swiglu_triton import activate, is_clamped, weighted_activation
from moefold.precision.both_directions import BothWays, quantize_both_reference, share_a_read
from moefold.precision.cast_kernels.cast_both_triton import (
    constants_of_pair,
    empty_copies,
    narrow_both,
    output_types,
    side_of,
)
from moefold.precision.cast_kernels.cast_triton import warps_of


@triton.jit
def swiglu_cast_kernel(
    gate_up, weight, out, row_codes, row_scales, column_codes, column_scales, num_rows, F,
    WEIGHTED: tl.constexpr, CLAMPED: tl.constexpr, ELEMENT: tl.constexpr, RULE: tl.constexpr, C: tl.constexpr,
    STOCHASTIC: tl.constexpr, COLUMN_STOCHASTIC: tl.constexpr, HADAMARD: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """One tile of the activation."""
    m = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    k = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    inside = (m[:, None] < num_rows) & (k[None, :] < F)
    at = m[:, None] * (2 * F) + k[None, :]
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + F, mask=inside, other=0.0).to(tl.float32)
    act, _, _ = activate(gate, up, CLAMPED)
    if WEIGHTED:
        act *= tl.load(weight + m, mask=m < num_rows, other=0.0).to(tl.float32)[:, None]
    act = act.to(out.dtype.element_ty)
    tl.store(out + m[:, None] * F + k[None, :], act, mask=inside)
    tile = tl.where(inside, act.to(tl.float32), 0.0)
    narrow_both(
        tile, 0.0, 0.0, row_codes, row_scales, column_codes, column_scales, 0, tl.program_id(2), m, k, num_rows, F,
        ELEMENT, RULE, C, STOCHASTIC, COLUMN_STOCHASTIC, HADAMARD, SIDE,
    )  # fmt: skip


def swiglu_both_triton(
    gate_up_XG: Tensor, weight_X: Tensor | None, activation: str, row: Cast, column: Cast
) -> tuple[Tensor, BothWays]:
    """The weighted activation, and both copies of it."""
    if not share_a_read(row, column) or row.scales_whole_matrix or "stochastic" in (row.rounding, column.rounding):
        raise ValueError(f"{row} and {column}: an activation is narrowed by scales of one block, to nearest")
    made: list[BothWays] = []

    def launch(gate_up_XG: Tensor, weight_X: Tensor | None, activation: str) -> Tensor:
        out_XF, both = _launch(gate_up_XG, weight_X, activation, row, column)
        made.append(both)
        return out_XF

    out_XF = weighted_activation(gate_up_XG, weight_X, activation, launch)
    return out_XF, made[0]


def _launch(
    gate_up_XG: Tensor, weight_X: Tensor | None, activation: str, row: Cast, column: Cast
) -> tuple[Tensor, BothWays]:
    num_rows, dim = gate_up_XG.shape[0], gate_up_XG.shape[1] // 2
    out_XF, side, clamped = gate_up_XG.new_empty(num_rows, dim), side_of(row), is_clamped(activation)
    if not out_XF.numel():
        return out_XF, quantize_both_reference(out_XF, row, column)
    both, outputs = empty_copies(out_XF, row, column)
    swiglu_cast_kernel[(triton.cdiv(num_rows, side), triton.cdiv(dim, side), 1)](
        gate_up_XG.contiguous(), weight_X, out_XF, *outputs, num_rows, dim, WEIGHTED=weight_X is not None,
        CLAMPED=clamped, **constants_of_pair(row, column), SIDE=side, num_warps=warps_of((side, side)),
    )  # fmt: skip
    return out_XF, both


# ---- builds and traffic ----


def swiglu_cast_traffic(dim: int, cast: Cast) -> Traffic:
    """Per row of bfloat16 with a prob in float32: gates and ups are read; the activation and both copies written."""
    assert cast.block is not None
    scales = 2 * (4 if cast.scale == "power_of_two" else 1) * dim / cast.block[1]
    moved = 4 * dim + 4 + 2 * dim + 2 * dim + scales
    return Traffic("8F + 4 + scales", moved, moved)


def _build(name: str, dim: int, row: Cast | None, column: Cast | None) -> Build:
    assert row is not None and column is not None
    side = side_of(row)
    return Build(
        f"weighted swiglu, casts both ways, {name}", swiglu_cast_kernel,
        {"gate_up": "*bf16", "weight": "*fp32", "out": "*bf16", **output_types(row), "num_rows": "i32:16",
         "F": "i32:16"},
        {**constants_of_pair(row, column), "WEIGHTED": True, "CLAMPED": False, "SIDE": side},
        swiglu_cast_traffic(dim, row), warps_of((side, side)), page="precision",
    )  # fmt: skip


_CASTS = PRECISION_RECIPES["mxfp8"].casts
BUILDS = (_build("mxfp8, DeepSeek-V3", 2048, _CASTS.x_fprop, _CASTS.x_wgrad),)
