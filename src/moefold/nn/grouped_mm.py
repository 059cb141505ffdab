"""One matrix per expert, applied to that expert's rows.

R rows sorted by expert, e experts, D width in, F width out.

``sequential`` is the twin: one product per expert, in any number format. ``grouped`` is one call for all experts and
needs no row count on the host. Both leave a zero gradient for an expert without rows, and stay connected to rows and
weights when there are no rows at all: another rank may be waiting for this rank's part of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# rows_RD, weight_eFD as [out, in], rows per expert on the device, the same on the host if known there.
GroupedMatmul = Callable[[Tensor, Tensor, Tensor, list[int] | None], Tensor]


def sequential(rows_RD: Tensor, weight_eFD: Tensor, rows_per_expert_e: Tensor, host: list[int] | None) -> Tensor:
    parts = rows_RD.split(rows_per_expert_e.tolist() if host is None else host)
    return torch.cat([part_rD @ weight_FD.t() for part_rD, weight_FD in zip(parts, weight_eFD.unbind(), strict=True)])


def grouped(rows_RD: Tensor, weight_eFD: Tensor, rows_per_expert_e: Tensor, host: list[int] | None) -> Tensor:
    """torch's grouped GEMM: float32 and narrower, and rows of D and F entries that fill a multiple of 16 bytes."""
    ends_e = rows_per_expert_e.cumsum(0).to(torch.int32)
    return F.grouped_mm(rows_RD, weight_eFD.transpose(-2, -1), offs=ends_e)


def grouped_weight_grad(
    matmul: GroupedMatmul, grad_RF: Tensor, rows_RD: Tensor, rows_per_expert_e: Tensor, host: list[int] | None
) -> Tensor:
    """[e, F, D]: each expert's weight gradient, from its rows and their outputs' gradients."""
    if matmul is grouped:
        ends_e = rows_per_expert_e.cumsum(0).to(torch.int32)
        return F.grouped_mm(grad_RF.t(), rows_RD, offs=ends_e)
    sizes = rows_per_expert_e.tolist() if host is None else host
    pairs = zip(grad_RF.split(sizes), rows_RD.split(sizes), strict=True)
    return torch.stack([grad_rF.t() @ rows_rD for grad_rF, rows_rD in pairs])


BACKENDS: dict[str, GroupedMatmul] = {"sequential": sequential, "grouped": grouped}
