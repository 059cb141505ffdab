"""A linear layer computed in float32 on bfloat16 input, which saves the input in bfloat16.

Routers compute logits in float32 from a bfloat16 input, because a rounded score may change the top-k. Autograd would
save the upcast input, twice the bytes. Backward has no top-k to protect: it uses the bfloat16 input, and its gradients
round as those of every other matmul. ``fp32_linear_reference`` is the plain form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def fp32_linear(x_tD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x W^T + b, computed and returned in ``dtype``."""
    if x_tD.dtype == dtype:
        return fp32_linear_reference(x_tD, weight_ED, bias_E, dtype)
    out_tE: Tensor = _FP32Linear.apply(x_tD, weight_ED, dtype)
    return out_tE if bias_E is None else out_tE + bias_E.to(dtype)


def fp32_linear_reference(x_tD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
    return F.linear(x_tD.to(dtype), weight_ED.to(dtype), None if bias_E is None else bias_E.to(dtype))


class _FP32Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, weight_ED: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_tD, weight_ED)
        return F.linear(x_tD.to(dtype), weight_ED.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad_tE: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_tD, weight_ED = ctx.saved_tensors
        dx_tD = dweight_ED = None
        grad_tE = grad_tE.to(x_tD.dtype)
        if ctx.needs_input_grad[0]:
            dx_tD = grad_tE @ weight_ED.to(x_tD.dtype)
        if ctx.needs_input_grad[1]:
            dweight_ED = (grad_tE.t() @ x_tD).to(weight_ED.dtype)
        return dx_tD, dweight_ED, None


def upcast(x: Tensor) -> Tensor:
    """To float32, for sums, exponentials and square roots; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()
