"""Who carries casts out, by ``kernels.casts``: the reference in torch, one pass in C for CPUs, kernels for GPUs.

All three have the same bits. Triton is an optional package, so its kernels are imported at the first cast;
`kernels.backend: triton`, without which they are refused, has said by then whether this machine can run them.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from moefold.config.casts import Cast
from moefold.precision.both_directions import BothWays
from moefold.precision.operands import REFERENCE, Quantizers
from moefold.precision.quantize import Quantized
from moefold.precision.quantize_native import dequantize_native, fake_quantize_native, quantize_native


def _quantize_triton(x_MK: Tensor, cast: Cast, *, seed: int = 0, amax: Tensor | None = None) -> Quantized:
    from moefold.precision.cast_kernels.cast_triton import quantize_triton

    return quantize_triton(x_MK, cast, seed=seed, amax=amax)


def _fake_quantize_triton(x_MK: Tensor, cast: Cast, *, seed: int = 0, amax: Tensor | None = None) -> Tensor:
    from moefold.precision.cast_kernels.cast_triton import fake_quantize_triton

    return fake_quantize_triton(x_MK, cast, seed=seed, amax=amax)


def _quantize_both_triton(x_MK: Tensor, row: Cast, column: Cast, *, seed: int = 0) -> BothWays:
    from moefold.precision.cast_kernels.cast_both_triton import quantize_both_triton

    return quantize_both_triton(x_MK, row, column, seed=seed)


def _swiglu_both_triton(
    gate_up_XG: Tensor, weight_X: Tensor | None, activation: str, row: Cast, column: Cast
) -> tuple[Tensor, BothWays]:
    from moefold.precision.cast_kernels.swiglu_cast_triton import swiglu_both_triton

    return swiglu_both_triton(gate_up_XG, weight_X, activation, row, column)


def _requantize_triton(row: Quantized, column: Cast) -> Quantized:
    from moefold.precision.cast_kernels.requantize_triton import requantize_triton

    return requantize_triton(row, column)


QUANTIZERS: Final = {
    "torch": REFERENCE,
    "native": Quantizers(quantize_native, fake_quantize_native, dequantize=dequantize_native),
    "triton": Quantizers(
        _quantize_triton, _fake_quantize_triton, _quantize_both_triton, _swiglu_both_triton, _requantize_triton
    ),
}
