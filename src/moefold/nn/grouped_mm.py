"""Grouped GEMM: one matrix per expert, applied to that expert's rows. P rows sorted by expert, X dim in, Y dim out.

``sequential`` is the reference: one matmul per expert, in any dtype. ``grouped`` is one call for all experts and needs
no row count on the host. Both leave a zero gradient for an expert without rows, and stay connected to rows and weights
when there are no rows at all: another rank may be waiting for this rank's part of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# rows_RD, weight_eFD as [out, in], rows per expert on the device, the same on the host if known there.
GroupedMatmul = Callable[[Tensor, Tensor, Tensor, list[int] | None], Tensor]


def sequential(rows_PX: Tensor, weight_eYX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None) -> Tensor:
    parts = rows_PX.split(rows_per_expert_e.tolist() if host is None else host)
    return torch.cat([part @ weight.t() for part, weight in zip(parts, weight_eYX.unbind(), strict=True)])


def grouped(rows_PX: Tensor, weight_eYX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None) -> Tensor:
    """torch's grouped GEMM: float32 and narrower, and rows of X and Y entries that fill a multiple of 16 bytes."""
    ends_e = rows_per_expert_e.cumsum(0).to(torch.int32)
    return F.grouped_mm(rows_PX, weight_eYX.transpose(-2, -1), offs=ends_e)


def grouped_weight_grad(
    matmul: GroupedMatmul, grad_PY: Tensor, rows_PX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None
) -> Tensor:
    """[e, Y, X]: each expert's weight gradient, from its rows and their outputs' gradients."""
    if matmul is grouped:
        ends_e = rows_per_expert_e.cumsum(0).to(torch.int32)
        return F.grouped_mm(grad_PY.t(), rows_PX, offs=ends_e)
    sizes = rows_per_expert_e.tolist() if host is None else host
    pairs = zip(grad_PY.split(sizes), rows_PX.split(sizes), strict=True)
    return torch.stack([grad.t() @ rows for grad, rows in pairs])


BACKENDS: dict[str, GroupedMatmul] = {"sequential": sequential, "grouped": grouped}
