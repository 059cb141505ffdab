"""GEMMs of codes and scales (``kernels.narrow_gemm``): the matmuls of linear layers and of experts, made of them.

A ``NarrowGemm`` multiplies two narrow matrices, A B^T with both [., K], and may have calls for all experts at once.
Their operands are those of `precision/code_operands.py`. ``EMULATED`` is the obvious twin: it widens both and
multiplies in float32. A run without ``kernels.narrow_gemm`` computes the same numbers and never has codes of rows
(`precision/operands.py`), which is faster on a CPU.

Shapes: M rows, N columns of the product, K summed; e experts, P rows sorted by expert, Y out, X in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.nn.matmul_kernels import GroupedKernels, GroupedMaker, GroupedMatmul, LinearKernels, sequential
from moefold.precision.code_operands import RowCodes, chunks_of_columns
from moefold.precision.quantize import Quantized, dequantize

# A [M, K], B [N, K], the dtype of the product.
Product = Callable[[Quantized, Quantized, torch.dtype], Tensor]


class NarrowGemm(NamedTuple):
    product: Product
    # Rows of experts and a stack [e, N, K], to [P, N]; columns of experts, [Y, P] and [X, P], to [e, Y, X]; both get
    # the ends of experts' rows, on the device. None, or an answer of None: one product per expert.
    grouped: Callable[[RowCodes, Quantized, Tensor], Tensor | None] | None = None
    grouped_weight_grad: Callable[[RowCodes, RowCodes, Tensor], Tensor | None] | None = None


def emulated_product(a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
    return (dequantize(a_MK) @ dequantize(b_NK).t()).to(dtype)


EMULATED = NarrowGemm(emulated_product)


def matrix_of(stack: Quantized, place: int) -> Quantized:
    tensor_scale = None if stack.tensor_scale is None else stack.tensor_scale[place]
    return Quantized(stack.codes_MK[place], stack.scale_rc[place], tensor_scale, stack.cast)


def linear_kernels(gemm: NarrowGemm) -> LinearKernels:
    def forward(x: RowCodes, weights: list[Quantized]) -> Tensor:
        parts = [gemm.product(x.each[0], matrix_of(weight, 0), x.dtype) for weight in weights]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def input_grad(grad: RowCodes, weights: list[Quantized]) -> Tensor:
        return _sum_of_products(
            lambda part, weight: gemm.product(part.each[0], matrix_of(weight, 0), part.dtype), grad, weights
        )

    def weight_grad(grad: RowCodes, x: RowCodes) -> Tensor:
        return gemm.product(grad.each[0], x.each[0], grad.dtype)

    return LinearKernels(forward, input_grad, weight_grad)


def grouped_maker(gemm: NarrowGemm) -> GroupedMaker:
    """With ``kernels.experts: sequential`` one product per expert, the reference."""

    def make(matmul: GroupedMatmul, rows_per_expert_e: Tensor, host: list[int] | None) -> GroupedKernels:
        chosen = gemm._replace(grouped=None, grouped_weight_grad=None) if matmul is sequential else gemm
        ends_e = rows_per_expert_e.cumsum(0, dtype=torch.int32)

        def forward(rows: RowCodes, weights: list[Quantized]) -> Tensor:
            parts = [_grouped(chosen, rows, weight, ends_e) for weight in weights]
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

        def input_grad(grad: RowCodes, weights: list[Quantized]) -> Tensor:
            return _sum_of_products(lambda part, weight: _grouped(chosen, part, weight, ends_e), grad, weights)

        def weight_grad(grad: RowCodes, rows: RowCodes, padded: list[int] | None) -> Tensor:
            # Padded for weight gradients alone: `narrow_gemms_have_whole_groups` refuses that.
            if chosen.grouped_weight_grad is not None and padded is None:
                made = chosen.grouped_weight_grad(grad, rows, ends_e)
                if made is not None:
                    return made
            pairs = zip(grad.each, rows.each, strict=True)
            return torch.stack([chosen.product(dy, x, grad.dtype) for dy, x in pairs])

        return GroupedKernels(forward, input_grad, weight_grad)

    return make


def _grouped(gemm: NarrowGemm, rows: RowCodes, weight: Quantized, ends_e: Tensor) -> Tensor:
    made = None if gemm.grouped is None else gemm.grouped(rows, weight, ends_e)
    if made is not None:
        return made
    return torch.cat([gemm.product(part, matrix_of(weight, place), rows.dtype) for place, part in enumerate(rows.each)])


def _sum_of_products(
    multiply: Callable[[RowCodes, Quantized], Tensor], grad: RowCodes, weights: list[Quantized]
) -> Tensor:
    """Of matrices that are side by side in the gradient; several are summed in float32."""
    if len(weights) == 1:
        return multiply(grad, weights[0])
    parts = chunks_of_columns(grad._replace(dtype=torch.float32), len(weights))
    return reduce(Tensor.add, [multiply(part, weight) for part, weight in zip(parts, weights, strict=True)])
