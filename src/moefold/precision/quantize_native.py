"""``quantize``, ``fake_quantize`` and ``dequantize`` in one pass of C, for CPUs; the reference is quantize.py,
bit for bit.

A cast in torch reads and writes the matrix some thirty times. Here every block is read once, which makes training in
emulated formats about as fast as its matmuls. torch converts a float8 number in 7 ns on a CPU without such
instructions, which for weights is more than their matmul takes.
"""

from __future__ import annotations

import ctypes
from typing import Final, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moefold.config.casts import Cast, Element, ScaleRule
from moefold.ops.native.compile_c import load
from moefold.precision.quantize import (
    FLOAT8,
    SCALE_DTYPES,
    Quantized,
    decode_scales,
    dequantize,
    fake_quantize,
    quantize,
)

_ELEMENTS: Final = {name: index for index, name in enumerate(get_args(Element))}
_RULES: Final = {name: index for index, name in enumerate(get_args(ScaleRule))}


class _Cast(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("rows", "columns")),
        *((name, ctypes.c_int) for name in ("element", "rule", "hadamard", "stochastic")),
        ("seed", ctypes.c_uint64),
    )


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("m", "k", "row_stride", "column_stride")),
        ("is_bf16", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("amax", "values", "codes", "scales")),
        ("tensor_scale", ctypes.c_void_p),
    )


def quantize_native(x_MK: Tensor, cast: Cast, *, seed: int = 0, amax: Tensor | None = None) -> Quantized:
    if not x_MK.numel():
        return quantize(x_MK, cast, seed=seed, amax=amax)
    codes = torch.empty(x_MK.shape, dtype=torch.uint8)
    scales = torch.empty(cast.scale_shape(x_MK.shape), dtype=SCALE_DTYPES[cast.scale])
    tensor_scale = torch.empty(x_MK.shape[:-2]) if cast.scale == "two_level" else None
    _run(x_MK, cast, seed, amax, codes, scales, tensor_scale)
    typed = codes if cast.element == "e2m1" else codes.view(FLOAT8[cast.element])
    return Quantized(typed, scales, tensor_scale, cast)


def fake_quantize_native(x_MK: Tensor, cast: Cast, *, seed: int = 0, amax: Tensor | None = None) -> Tensor:
    if cast.element == "bf16" or not x_MK.numel():
        return fake_quantize(x_MK, cast, seed=seed, amax=amax)
    return _run(x_MK, cast, seed, amax, None, None, None)


def dequantize_native(quantized: Quantized) -> Tensor:
    codes_MK, cast = quantized.codes_MK, quantized.cast
    if isinstance(codes_MK, FakeTensor) or not codes_MK.numel():
        return dequantize(quantized)
    # The tensors live until the call has ended.
    codes, decode, values = codes_MK.contiguous(), decode_scales(quantized).contiguous(), torch.empty(codes_MK.shape)
    how = _Cast(*_block(codes_MK, cast), _ELEMENTS[cast.element], _RULES[cast.scale])
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in (codes, decode, values))
    m, k = codes.shape[-2:]
    sizes = (ctypes.c_long(size) for size in (codes.numel() // (m * k), m, k))
    load("quantize").dequantize_stack(*pointers, ctypes.byref(how), *sizes)
    return values


def _block(x_MK: Tensor, cast: Cast) -> tuple[int, int]:
    return cast.block_of(x_MK.shape[-2], x_MK.shape[-1])


def _run(
    x_MK: Tensor,
    cast: Cast,
    seed: int,
    amax: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    tensor_scale: Tensor | None,
) -> Tensor:
    """The values; codes and scales are written where they are given. One call for all matrices of a stack. Fake tensors
    (the dry run) have the shapes of all three and nothing to compute."""
    if x_MK.dtype not in (torch.float32, torch.bfloat16):
        x_MK = x_MK.float()
    stochastic = cast.rounding == "stochastic"
    if cast.hadamard and x_MK.shape[-1] % 16:
        raise ValueError(f"a Hadamard transform of groups of 16 cannot divide {x_MK.shape[-1]} columns")
    values, stack = torch.empty(x_MK.shape), _stack(x_MK)
    if isinstance(x_MK, FakeTensor):
        return values
    formats = (_ELEMENTS[cast.element], _RULES[cast.scale])
    how = _Cast(*_block(x_MK, cast), *formats, cast.hadamard, stochastic, seed % 2**64)
    given = None if amax is None else amax.float().contiguous()
    first = _Matrix(
        stack.data_ptr(),
        *stack.shape[1:],
        *stack.stride()[1:],
        stack.dtype == torch.bfloat16,
        0 if given is None else given.data_ptr(),
        values.data_ptr(),
        *(0 if each is None else each.data_ptr() for each in (codes, scales, tensor_scale)),
    )
    load("quantize").quantize_stack(
        ctypes.byref(first), ctypes.byref(how), ctypes.c_long(len(stack)), ctypes.c_long(stack.stride(0))
    )
    return values


def _stack(x_MK: Tensor) -> Tensor:
    """With one leading dim; a view where strides allow, which a transposed stack's do."""
    return x_MK.reshape(-1, *x_MK.shape[-2:]) if x_MK.dim() != 3 else x_MK
