"""The C pass is the reference, bit for bit, on the values that are hard to narrow."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.precision.cast_inputs import Kind, hard_values
from tests.precision.record_oracles import BLOCKWISE, HADAMARD, MX, NVFP4, PER_TENSOR
from torch import Tensor

from moefold.config.casts import Cast
from moefold.precision.quantize import FLOAT8, dequantize, fake_quantize, quantize
from moefold.precision.quantize_native import dequantize_native, fake_quantize_native, quantize_native

NEAREST = [*MX, *BLOCKWISE, *PER_TENSOR, *NVFP4, HADAMARD, Cast("e2m1", (1, 32), "e8m0_rceil")]
CASTS = [*NEAREST, *(replace(cast, rounding="stochastic") for cast in (NVFP4[0], HADAMARD, MX[0], MX[2]))]


def bits(tensor: Tensor) -> Tensor:
    """Of what was stored; all NaN are one."""
    if tensor.is_floating_point():
        tensor = torch.where(torch.isnan(tensor.float()), torch.nan, tensor.float())
    return tensor.contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int32)


def assert_same(x: Tensor, cast: Cast, amax: Tensor | None = None) -> None:
    expected, found = (function(x, cast, seed=11 << 50, amax=amax) for function in (quantize, quantize_native))
    assert torch.equal(bits(found.codes_MK), bits(expected.codes_MK))
    assert (
        torch.equal(bits(found.scale_rc), bits(expected.scale_rc)) and found.scale_rc.dtype == expected.scale_rc.dtype
    )
    if cast.scale == "two_level":
        assert found.tensor_scale is not None and expected.tensor_scale is not None
        assert torch.equal(bits(found.tensor_scale), bits(expected.tensor_scale))
    assert torch.equal(bits(dequantize_native(expected)), bits(dequantize(expected)))
    values = fake_quantize_native(x, cast, seed=11 << 50, amax=amax)
    assert torch.equal(bits(values), bits(fake_quantize(x, cast, seed=11 << 50, amax=amax)))


@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "narrow range"])
def test_a_million_values(cast: Cast, kind: Kind) -> None:
    assert_same(hard_values(kind), cast)


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_transposed_stacked_partial_empty_and_not_finite(cast: Cast) -> None:
    x = hard_values("narrow range")
    assert_same(x.t(), cast)
    assert_same(x.bfloat16(), cast)
    assert_same(x.double(), cast)
    assert_same(x[:640, :576].unflatten(0, (2, 320)), cast)
    assert_same(x[:640, :576].unflatten(0, (2, 320)).transpose(1, 2), cast)
    assert_same(x[:0, :576], cast)
    spoilt = x[:256, :256].clone()
    spoilt[3, 5], spoilt[100, 200], spoilt[255, 0] = math.inf, math.nan, -math.inf
    assert_same(spoilt, cast)
    if cast.block is None or cast.scale == "two_level":
        assert_same(spoilt, cast, amax=torch.tensor(3.0))
        assert_same(x[:64].unflatten(0, (2, 32)), cast, amax=torch.tensor([3.0, 0.0]))


@pytest.mark.parametrize("cast", [MX[0], PER_TENSOR[0], PER_TENSOR[1], NVFP4[0]], ids=str)
def test_every_code_is_its_number(cast: Cast) -> None:
    """Also those that no cast writes: torch's infinities of E5M2."""
    codes = torch.arange(256, dtype=torch.uint8) & (15 if cast.element == "e2m1" else 255)
    seen = quantize(torch.ones(4, 64), cast)
    typed = codes.view(4, 64) if cast.element == "e2m1" else codes.view(FLOAT8[cast.element]).view(4, 64)
    every = replace(seen, codes_MK=typed)
    assert torch.equal(bits(dequantize_native(every)), bits(dequantize(every)))
