"""Matmuls of 16-bit operands in float32, for CPUs that have no instructions for 16-bit numbers.

Without them torch converts bfloat16 and float16 number by number inside its matmuls, which takes several times as long
as a float32 matmul. Here operands are widened once, multiplied in float32, and the product is rounded to their dtype: a
16-bit matmul adds up in float32 too, so the two differ in the order of sums alone. What is saved for the backward stays
16 bits wide. Which of the two a run has is ``kernels.cpu_matmul``.

``Multiply`` is the product of fused experts, which write into buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from moefold.checks.kernels import cpu_matmul_in_use
from moefold.config.run import RunConfig
from moefold.nn.matmul_kernels import GroupedKernels, GroupedMatmul, LinearKernels, grouped_kernels
from moefold.ops.host_probe import cpu_name_and_features

_NARROW = (torch.bfloat16, torch.float16)


class Multiply(Protocol):
    def __call__(self, left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None = None) -> object:
        """``out`` = left @ right + bias, rounded to the dtype of ``left`` first; ``out`` may be wider."""
        ...


def multiply_in_compute(left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None = None) -> object:
    """In the dtype of the operands."""
    if out.dtype != left.dtype:
        assert bias is None
        return out.copy_(torch.mm(left, right))
    return torch.mm(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out)


def multiply_in_float32(left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None = None) -> object:
    if left.dtype not in _NARROW:
        return multiply_in_compute(left, right, out, bias)
    wide = left.float(), right.float()
    product = torch.mm(*wide) if bias is None else torch.addmm(bias.float(), *wide)
    return out.copy_(product if out.dtype == left.dtype else product.to(left.dtype))


# By ``kernels.cpu_matmul``.
MULTIPLY: dict[str, Multiply] = {"compute": multiply_in_compute, "float32": multiply_in_float32}


def cpu_matmul_here(run: RunConfig, device: str) -> Literal["compute", "float32"]:
    """How this machine multiplies in the format of the run."""
    _, cpu_features = cpu_name_and_features()
    return cpu_matmul_in_use(run, device, cpu_features)


def linear_in_float32(kernels: LinearKernels) -> LinearKernels:
    return LinearKernels(*map(_widened, kernels))


def grouped_in_float32(matmul: GroupedMatmul, rows_per_expert_e: Tensor, host: list[int] | None) -> GroupedKernels:
    return GroupedKernels(*map(_widened, grouped_kernels(matmul, rows_per_expert_e, host)))


def _widened(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same product of two operands, the first arguments, in float32."""

    def multiply(left: Tensor, right: Tensor, *others: object) -> Tensor:
        if left.dtype not in _NARROW:
            return product(left, right, *others)
        return product(left.float(), right.float(), *others).to(left.dtype)

    return multiply
