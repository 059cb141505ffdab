"""The weighted gate of an expert, forward and backward, each in one walk over the rows.

R rows (one per token and expert), F hidden width of an expert, G = 2F: a row's gates, then its ups.

    out = act(gate, up) * weight        act = silu(gate) * up, or the clamped one of gpt-oss

A chain of torch operations writes silu(gate), the product and the weighted product to memory and keeps most of them for
backward. Here the only tensors are the input and the output, and only the input is kept. Backward computes the
activation again, which costs arithmetic that a memory-bound kernel has to spare, and while it has it at hand:

- writes d(gate), d(up);
- adds up d(weight) = sum of d(out) * act over the row, in float32, because the router listens to it;
- on request writes ``out`` again, for the gradient of the down projection that follows. Then nobody keeps ``out``.

All arithmetic is float32; each result is rounded once, where it is stored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.ops.activations import ACTIVATIONS
from moefold.ops.activations import LIMIT as _LIMIT
from moefold.ops.activations import STEEPNESS as _STEEPNESS
from moefold.ops.kernels.aot_specs import Build, Traffic

LIMIT = tl.constexpr(_LIMIT)
STEEPNESS = tl.constexpr(_STEEPNESS)


# ---- the kernels ----


@triton.jit
def _activate(gate, up, CLAMPED: tl.constexpr):
    """The activation, and its slope in either direction."""
    if CLAMPED:
        gate_moves = gate <= LIMIT
        up_moves = (up >= -LIMIT) & (up <= LIMIT)
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        opening = tl.sigmoid(gate * STEEPNESS)
        slope_gate = tl.where(gate_moves, up * opening * (1.0 + gate * STEEPNESS * (1.0 - opening)), 0.0)
        slope_up = tl.where(up_moves, gate * opening, 0.0)
    else:
        opening = tl.sigmoid(gate)
        slope_gate = up * opening * (1.0 + gate * (1.0 - opening))
        slope_up = gate * opening
    return gate * opening * up, slope_gate, slope_up


@triton.jit
def forward_kernel(
    gate_up, weight, out, F: tl.constexpr, WEIGHTED: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of one row."""
    row = tl.program_id(0).to(tl.int64)  # rows times width passes 2**31 in real runs
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = col < F
    gate = tl.load(gate_up + row * (2 * F) + col, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * F) + F + col, mask=here, other=0.0).to(tl.float32)
    act, _, _ = _activate(gate, up, CLAMPED)
    if WEIGHTED:
        act *= tl.load(weight + row).to(tl.float32)
    tl.store(out + row * F + col, act.to(out.dtype.element_ty), mask=here)


@triton.jit
def backward_kernel(
    dout,
    gate_up,
    weight,
    dgate_up,
    dweight,
    out,
    F: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CLAMPED: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row, block by block, so that one program sees all of the row's sum."""
    row = tl.program_id(0).to(tl.int64)
    factor = 1.0
    if WEIGHTED:
        factor = tl.load(weight + row).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, F, BLOCK):
        col = start + tl.arange(0, BLOCK)
        here = col < F
        gate = tl.load(gate_up + row * (2 * F) + col, mask=here, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * (2 * F) + F + col, mask=here, other=0.0).to(tl.float32)
        grad = tl.load(dout + row * F + col, mask=here, other=0.0).to(tl.float32)
        act, slope_gate, slope_up = _activate(gate, up, CLAMPED)
        sums += grad * act
        grad *= factor
        tl.store(dgate_up + row * (2 * F) + col, (grad * slope_gate).to(dgate_up.dtype.element_ty), mask=here)
        tl.store(dgate_up + row * (2 * F) + F + col, (grad * slope_up).to(dgate_up.dtype.element_ty), mask=here)
        if RECOMPUTE:
            tl.store(out + row * F + col, (act * factor).to(out.dtype.element_ty), mask=here)
    if WEIGHTED:
        tl.store(dweight + row, tl.sum(sums, 0))


# ---- how they are called ----


def block_of(dim: int) -> int:
    """A power of two that divides the width if a good one does, so that no lane idles; else the next one above."""
    for block in (1024, 512, 256):
        if dim % block == 0:
            return block
    return min(1024, triton.next_power_of_2(dim))


def warps_of(block: int) -> int:
    """Eight entries per thread: one 16-byte load of bfloat16."""
    return max(1, min(8, block // 256))


def launch_forward(gate_up_RG: Tensor, weight_R: Tensor | None, activation: str) -> Tensor:
    num_rows, dim = gate_up_RG.shape[0], gate_up_RG.shape[1] // 2
    out_RF = gate_up_RG.new_empty(num_rows, dim)
    block = block_of(dim)
    forward_kernel[(num_rows, triton.cdiv(dim, block))](
        gate_up_RG.contiguous(),
        weight_R,
        out_RF,
        F=dim,
        WEIGHTED=weight_R is not None,
        CLAMPED=_is_clamped(activation),
        BLOCK=block,
        num_warps=warps_of(block),
    )
    return out_RF


def launch_backward(
    dout_RF: Tensor, gate_up_RG: Tensor, weight_R: Tensor | None, activation: str, recompute: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """d(gate_up), d(weight) in float32 if there is a weight, and the forward's output if it is asked for."""
    num_rows, dim = dout_RF.shape
    dgate_up_RG = torch.empty_like(gate_up_RG, memory_format=torch.contiguous_format)
    dweight_R = None if weight_R is None else dout_RF.new_empty(num_rows, dtype=torch.float32)
    out_RF = torch.empty_like(dout_RF, memory_format=torch.contiguous_format) if recompute else None
    block = block_of(dim)
    backward_kernel[(num_rows,)](
        dout_RF.contiguous(),
        gate_up_RG.contiguous(),
        weight_R,
        dgate_up_RG,
        dweight_R,
        out_RF,
        F=dim,
        WEIGHTED=weight_R is not None,
        CLAMPED=_is_clamped(activation),
        RECOMPUTE=recompute,
        BLOCK=block,
        num_warps=warps_of(block),
    )
    return dgate_up_RG, dweight_R, out_RF


def _is_clamped(activation: str) -> bool:
    if activation not in ACTIVATIONS:
        raise ValueError(f"no kernel for the activation {activation!r}; there is {', '.join(ACTIVATIONS)}")
    return activation == "clamped_swiglu"


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_RG: Tensor, weight_R: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up_RG, weight_R)
        ctx.activation = activation
        return launch_forward(gate_up_RG, weight_R, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate_up_RG, weight_R = ctx.saved_tensors
        dgate_up_RG, dweight_R, _ = launch_backward(grads[0], gate_up_RG, weight_R, ctx.activation, recompute=False)
        return dgate_up_RG, None if dweight_R is None else dweight_R.to(weight_R.dtype), None


def weighted_activation(gate_up_RG: Tensor, weight_R: Tensor | None, activation: str = "swiglu") -> Tensor:
    """act(gate, up) of every row, times the row's weight if there is one. The twin is in ``ops/activations.py``."""
    return _WeightedActivation.apply(gate_up_RG, weight_R, activation)


# ---- what it is built for, and what it moves ----


def forward_traffic(dim: int, top_k: int, weighted: bool = True, entry: int = 2) -> Traffic:
    """Per token, whose K rows have entries of ``entry`` bytes, and a float32 weight or none. Nothing moves twice."""
    moved = top_k * (3 * dim * entry + 4 * weighted)
    return Traffic("6FK + 4K" if weighted else "6FK", moved, moved)


def backward_traffic(dim: int, top_k: int, weighted: bool = True, entry: int = 2) -> Traffic:
    """A weighted row's forward output is written once more; a dense layer's is not asked for."""
    moved = top_k * ((6 * dim * entry + 8) if weighted else 5 * dim * entry)
    return Traffic("12FK + 8K" if weighted else "10FK", moved, moved)


def _builds(model: str, dim: int, top_k: int, clamped: bool, weighted: bool) -> tuple[Build, ...]:
    block = block_of(dim)
    constants: dict[str, Any] = {"F": dim, "WEIGHTED": weighted, "CLAMPED": clamped, "BLOCK": block}
    forward = {"gate_up": "*bf16", "out": "*bf16", "weight": "*fp32"}
    backward = forward | {"dout": "*bf16", "dgate_up": "*bf16", "dweight": "*fp32"}
    absent: dict[str, Any] = {} if weighted else {"weight": None}
    absent_back: dict[str, Any] = {} if weighted else {"weight": None, "dweight": None, "out": None}
    name = f"weighted swiglu{{}}, {model}" if weighted else f"swiglu{{}}, {model}"
    return (
        Build(
            name.format(""), forward_kernel, _without(forward, absent), constants | absent,
            forward_traffic(dim, top_k, weighted), warps_of(block), registers=40,
        ),
        Build(
            name.format(" backward"), backward_kernel,
            _without(backward, absent_back), constants | absent_back | {"RECOMPUTE": weighted},
            backward_traffic(dim, top_k, weighted), warps_of(block), registers=64,
        ),
    )  # fmt: skip


def _without(signature: dict[str, str], absent: dict[str, Any]) -> dict[str, str]:
    return {name: kind for name, kind in signature.items() if name not in absent}


# Hidden width of an expert, choices per token, whether the gate is gpt-oss's, whether rows have weights.
_LAYERS = (
    ("DeepSeek-V3", 2048, 8, False, True),
    ("DeepSeek-V3 dense layer", 18432, 1, False, False),
    ("Qwen3-235B", 1536, 8, False, True),
    ("Mixtral-8x7B", 14336, 2, False, True),
    ("gpt-oss-120b", 2880, 4, True, True),
)
BUILDS = tuple(build for layer in _LAYERS for build in _builds(*layer))
