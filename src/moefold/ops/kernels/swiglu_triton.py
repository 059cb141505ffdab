"""The weighted SwiGLU of an expert, forward and backward, each in one pass over the rows.

A row has 2F entries: its gates, then its ups.

    out = act(gate, up) * weight        act = silu(gate) * up, or the clamped one of gpt-oss

A chain of torch operations writes silu(gate), the product and the weighted product to memory and saves most of them for
backward. Here the only tensors are the input and the output, and only the input is saved. Backward recomputes the
activation, which is cheap in a memory-bound kernel, and in the same pass

- writes d(gate), d(up);
- sums d(weight) = sum of d(out) * act over the row, in float32, because it is the router's gradient;
- optionally writes ``out``, for the weight gradient of the down projection, so that ``out`` need not be saved.

All arithmetic is float32; each result is rounded once, when it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
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
def activate(gate, up, CLAMPED: tl.constexpr):
    """The activation, and its derivatives by gate and up."""
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
    row = tl.program_id(0).to(tl.int64)  # rows times dim exceeds 2**31 in real runs
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < F
    gate = tl.load(gate_up + row * (2 * F) + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * F) + F + col, mask=mask, other=0.0).to(tl.float32)
    act, _, _ = activate(gate, up, CLAMPED)
    if WEIGHTED:
        act *= tl.load(weight + row).to(tl.float32)
    tl.store(out + row * F + col, act.to(out.dtype.element_ty), mask=mask)


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
    """One row, block by block, so that one program computes the row's sum."""
    row = tl.program_id(0).to(tl.int64)
    factor = 1.0
    if WEIGHTED:
        factor = tl.load(weight + row).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, F, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < F
        gate = tl.load(gate_up + row * (2 * F) + col, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * (2 * F) + F + col, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dout + row * F + col, mask=mask, other=0.0).to(tl.float32)
        act, slope_gate, slope_up = activate(gate, up, CLAMPED)
        sums += grad * act
        grad *= factor
        tl.store(dgate_up + row * (2 * F) + col, (grad * slope_gate).to(dgate_up.dtype.element_ty), mask=mask)
        tl.store(dgate_up + row * (2 * F) + F + col, (grad * slope_up).to(dgate_up.dtype.element_ty), mask=mask)
        if RECOMPUTE:
            tl.store(out + row * F + col, (act * factor).to(out.dtype.element_ty), mask=mask)
    if WEIGHTED:
        tl.store(dweight + row, tl.sum(sums, 0))


# ---- launches ----


def block_of(dim: int) -> int:
    """A power of two that divides the dim if a large one does, so that no thread idles; else the next one above."""
    for block in (1024, 512, 256):
        if dim % block == 0:
            return block
    return min(1024, triton.next_power_of_2(dim))


def warps_of(block: int) -> int:
    """Eight entries per thread: one 16-byte load of bfloat16."""
    return max(1, min(8, block // 256))


def launch_forward(gate_up_XG: Tensor, weight_X: Tensor | None, activation: str) -> Tensor:
    num_rows, dim = gate_up_XG.shape[0], gate_up_XG.shape[1] // 2
    out_XF = gate_up_XG.new_empty(num_rows, dim)
    block = block_of(dim)
    forward_kernel[(num_rows, triton.cdiv(dim, block))](
        gate_up_XG.contiguous(),
        weight_X,
        out_XF,
        F=dim,
        WEIGHTED=weight_X is not None,
        CLAMPED=is_clamped(activation),
        BLOCK=block,
        num_warps=warps_of(block),
    )
    return out_XF


def launch_backward(
    dout_XF: Tensor, gate_up_XG: Tensor, weight_X: Tensor | None, activation: str, recompute: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """d(gate_up), d(weight) in float32 if there is a weight, and the forward's output with ``recompute``."""
    num_rows, dim = dout_XF.shape
    dgate_up_XG = torch.empty_like(gate_up_XG, memory_format=torch.contiguous_format)
    dweight_X = None if weight_X is None else dout_XF.new_empty(num_rows, dtype=torch.float32)
    out_XF = torch.empty_like(dout_XF, memory_format=torch.contiguous_format) if recompute else None
    block = block_of(dim)
    backward_kernel[(num_rows,)](
        dout_XF.contiguous(),
        gate_up_XG.contiguous(),
        weight_X,
        dgate_up_XG,
        dweight_X,
        out_XF,
        F=dim,
        WEIGHTED=weight_X is not None,
        CLAMPED=is_clamped(activation),
        RECOMPUTE=recompute,
        BLOCK=block,
        num_warps=warps_of(block),
    )
    return dgate_up_XG, dweight_X, out_XF


def is_clamped(activation: str) -> bool:
    if activation not in ACTIVATIONS:
        raise ValueError(f"no kernel for the activation {activation!r}; there is {', '.join(ACTIVATIONS)}")
    return activation == "clamped_swiglu"


Launch = Callable[[Tensor, Tensor | None, str], Tensor]


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_XG: Tensor, weight_X: Tensor | None, activation: str, launch: Launch) -> Tensor:
        ctx.save_for_backward(gate_up_XG, weight_X)
        ctx.activation = activation
        return launch(gate_up_XG, weight_X, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        gate_up_XG, weight_X = ctx.saved_tensors
        dgate_up_XG, dweight_X, _ = launch_backward(grads[0], gate_up_XG, weight_X, ctx.activation, recompute=False)
        return dgate_up_XG, None if dweight_X is None else dweight_X.to(weight_X.dtype), None, None


def weighted_activation(
    gate_up_XG: Tensor, weight_X: Tensor | None, activation: str = "swiglu", launch: Launch = launch_forward
) -> Tensor:
    """act(gate, up) of every row, times its weight if there is one. The reference is in ``ops/activations.py``.
    ``launch``: of a kernel that writes more than that."""
    return _WeightedActivation.apply(gate_up_XG, weight_X, activation, launch)


# ---- builds and traffic ----


def forward_traffic(dim: int, top_k: int, weighted: bool = True, entry: int = 2) -> Traffic:
    """Per token, whose K rows have entries of ``entry`` bytes, and a float32 weight or none. Nothing moves twice."""
    moved = top_k * (3 * dim * entry + 4 * weighted)
    return Traffic("6FK + 4K" if weighted else "6FK", moved, moved)


def backward_traffic(dim: int, top_k: int, weighted: bool = True, entry: int = 2) -> Traffic:
    """A weighted row's forward output is written as well; a dense layer's is not."""
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


# Expert hidden dim, experts per token, whether the activation is gpt-oss's clamped one, whether rows have weights.
_LAYERS = (
    ("DeepSeek-V3", 2048, 8, False, True),
    ("DeepSeek-V3 dense layer", 18432, 1, False, False),
    ("Qwen3-235B", 1536, 8, False, True),
    ("Mixtral-8x7B", 14336, 2, False, True),
    ("gpt-oss-120b", 2880, 4, True, True),
)
BUILDS = tuple(build for layer in _LAYERS for build in _builds(*layer))
