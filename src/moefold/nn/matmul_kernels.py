"""The matmuls of linear layers and of experts, by name: torch's, and those of other libraries.

``LinearKernels`` are the three matmuls of a linear layer (``kernels.linear``). Their operands are what `Operands` of
`precision/operands.py` gives: tensors, a weight with all of its dims, of which all but the last are rows.

Experts use a grouped GEMM, one matrix per expert applied to that expert's rows: P rows sorted by expert, X dim in, Y
dim out. ``sequential`` is the reference, one matmul per expert in any dtype. ``grouped`` is one call for all experts
and needs no row count on the host. Both leave a zero gradient for an expert without rows, and stay connected to rows
and weights when there are no rows at all: another rank may be waiting for this rank's part of the backward pass.
``GroupedKernels`` are the three matmuls of one call, made of a grouped GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.nn.grouped_deepgemm import deepgemm, deepgemm_weight_grad
from moefold.nn.grouped_mxfp8 import mxfp8
from moefold.nn.te_matmul import (
    te_grouped,
    te_grouped_weight_grad,
    te_linear,
    te_linear_input_grad,
    te_linear_weight_grad,
)

# rows_PX, weight_eYX as [out, in], rows per expert on the device, the same on the host if known there.
GroupedMatmul = Callable[[Tensor, Tensor, Tensor, list[int] | None], Tensor]
# grad_PY, rows_PX, rows per expert on the device and on the host, to [e, Y, X].
GroupedWeightGrad = Callable[[Tensor, Tensor, Tensor, list[int] | None], Tensor]


def sequential(rows_PX: Tensor, weight_eYX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None) -> Tensor:
    """Rows past the last expert's are zeros; other grouped GEMMs leave them undefined."""
    sizes = rows_per_expert_e.tolist() if host is None else host
    *parts, rest = rows_PX.split([*sizes, rows_PX.shape[0] - sum(sizes)])
    outputs = [part @ weight.t() for part, weight in zip(parts, weight_eYX.unbind(), strict=True)]
    past = [rest.new_zeros(rest.shape[0], weight_eYX.shape[1])] if rest.shape[0] else []
    return torch.cat([*outputs, *past])


def grouped(rows_PX: Tensor, weight_eYX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None) -> Tensor:
    """torch's grouped GEMM: float32 and narrower, and rows of X and Y entries that fill a multiple of 16 bytes."""
    ends_e = rows_per_expert_e.cumsum(0, dtype=torch.int32)
    return F.grouped_mm(rows_PX, weight_eYX.transpose(-2, -1), offs=ends_e)


def sequential_weight_grad(
    grad_PY: Tensor, rows_PX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None
) -> Tensor:
    sizes = rows_per_expert_e.tolist() if host is None else host
    rows = sum(sizes)
    pairs = zip(grad_PY[:rows].split(sizes), rows_PX[:rows].split(sizes), strict=True)
    return torch.stack([grad.t() @ rows for grad, rows in pairs])


def torch_grouped_weight_grad(
    grad_PY: Tensor, rows_PX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None
) -> Tensor:
    ends_e = rows_per_expert_e.cumsum(0, dtype=torch.int32)
    return F.grouped_mm(grad_PY.t(), rows_PX, offs=ends_e)


def grouped_weight_grad(
    matmul: GroupedMatmul, grad_PY: Tensor, rows_PX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None
) -> Tensor:
    """[e, Y, X]: each expert's weight gradient, from its rows and their outputs' gradients."""
    return WEIGHT_GRADS[matmul](grad_PY, rows_PX, rows_per_expert_e, host)


GROUPED_MATMULS: dict[str, GroupedMatmul] = {"sequential": sequential, "grouped": grouped}
# Of other libraries, imported when first called: on GPUs, and not in tests that run every grouped GEMM.
ENGINE_MATMULS: dict[str, GroupedMatmul] = {"deepgemm": deepgemm, "mxfp8": mxfp8, "transformer_engine": te_grouped}
WEIGHT_GRADS: dict[GroupedMatmul, GroupedWeightGrad] = {
    sequential: sequential_weight_grad,
    grouped: torch_grouped_weight_grad,
    deepgemm: deepgemm_weight_grad,
    # torchao computes it in bfloat16 too (``wgrad_with_hp``).
    mxfp8: torch_grouped_weight_grad,
    te_grouped: te_grouped_weight_grad,
}


class GroupedKernels(NamedTuple):
    """The three matmuls of experts' rows; a weight is [e, ..., X]."""

    forward: Callable[..., Tensor]
    input_grad: Callable[..., Tensor]
    # Of the gradient of the output and of rows, and how many each expert has, where padding has changed that.
    weight_grad: Callable[..., Tensor]


GroupedMaker = Callable[[GroupedMatmul, Tensor, list[int] | None], GroupedKernels]


def grouped_kernels(matmul: GroupedMatmul, rows_per_expert_e: Tensor, host: list[int] | None) -> GroupedKernels:
    if matmul is grouped:
        return _torch_grouped_kernels(rows_per_expert_e)

    def forward(rows_PX: Tensor, weight: Tensor) -> Tensor:
        return matmul(rows_PX, weight.flatten(1, -2), rows_per_expert_e, host)

    def input_grad(grad_PY: Tensor, weight: Tensor) -> Tensor:
        return matmul(grad_PY, weight.flatten(1, -2).transpose(1, 2), rows_per_expert_e, host)

    def weight_grad(grad_PY: Tensor, rows_PX: Tensor, padded: list[int] | None) -> Tensor:
        if padded is None:
            return grouped_weight_grad(matmul, grad_PY, rows_PX, rows_per_expert_e, host)
        counts_e = torch.tensor(padded, device=rows_per_expert_e.device)
        return grouped_weight_grad(matmul, grad_PY, rows_PX, counts_e, padded)

    return GroupedKernels(forward, input_grad, weight_grad)


def _torch_grouped_kernels(rows_per_expert_e: Tensor) -> GroupedKernels:
    """torch's grouped GEMM takes ends of groups: computed once for its three matmuls."""
    ends_e = rows_per_expert_e.cumsum(0, dtype=torch.int32)

    def forward(rows_PX: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(rows_PX, weight.flatten(1, -2).transpose(1, 2), offs=ends_e)

    def input_grad(grad_PY: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(grad_PY, weight.flatten(1, -2), offs=ends_e)

    def weight_grad(grad_PY: Tensor, rows_PX: Tensor, padded: list[int] | None) -> Tensor:
        if padded is None:
            return F.grouped_mm(grad_PY.t(), rows_PX, offs=ends_e)
        return torch_grouped_weight_grad(grad_PY, rows_PX, torch.tensor(padded, device=ends_e.device), padded)

    return GroupedKernels(forward, input_grad, weight_grad)


class LinearKernels(NamedTuple):
    """The three matmuls of a linear layer; a weight is [..., X], and of inputs all dims but the last are rows."""

    forward: Callable[..., Tensor]
    # Of the gradient of the output and the weight; of the gradient of the output and the input, to [Y, X].
    input_grad: Callable[..., Tensor]
    weight_grad: Callable[..., Tensor]


def _torch_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.flatten(0, -2))


def _torch_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    return grad @ weight.flatten(0, -2)


def _torch_weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


TORCH_LINEAR = LinearKernels(_torch_linear, _torch_input_grad, _torch_weight_grad)
# By name (``kernels.linear``).
LINEAR_KERNELS: dict[str, LinearKernels] = {
    "torch": TORCH_LINEAR,
    "transformer_engine": LinearKernels(te_linear, te_linear_input_grad, te_linear_weight_grad),
}
