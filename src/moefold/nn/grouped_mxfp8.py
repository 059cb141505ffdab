"""Grouped GEMM by torchao in MXFP8: operands in float8 with a scale per 32 values, outputs in bfloat16.

Rows and weights stay in bfloat16 and are quantised for each GEMM: forward and input gradient. The weight gradient is
computed in bfloat16 (torchao's ``wgrad_with_hp``), which is the more careful of its recipes, and the same whether a
schedule defers weight gradients or not. Each expert's rows must fill blocks of 32; torchao pads them where the host's
counts do not say that they do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.errors import BackendError
from moefold.ops.engines import load_engine

# Values that share a scale.
BLOCK = 32


def mxfp8(rows_PX: Tensor, weight_eYX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None) -> Tensor:
    if not rows_PX.dtype == weight_eYX.dtype == torch.bfloat16:
        raise BackendError(
            f"kernels.experts: mxfp8 takes bfloat16 rows and weights, not {rows_PX.dtype}; use precision.compute "
            "bfloat16, or kernels.experts grouped"
        )
    library = load_engine("mxfp8")
    ends_e = rows_per_expert_e.cumsum(0).to(torch.int32)
    out: Tensor = library._to_mxfp8_then_scaled_grouped_mm(
        rows_PX.contiguous(),
        weight_eYX.contiguous().transpose(-2, -1),
        offs=ends_e,
        out_dtype=rows_PX.dtype,
        wgrad_with_hp=True,
        pad_token_groups_for_grouped_mm=host is None or any(rows % BLOCK for rows in host),
    )
    return out
