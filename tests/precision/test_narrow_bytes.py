"""Bytes that follow from casts, against tensors that quantisers make and against figures of the formats' papers."""

from __future__ import annotations

import pytest
import torch

from moefold.blueprint.narrow_bytes import (
    cast_bytes,
    casts_of,
    gathered_bytes,
    matmul_bits,
    saved_bytes,
    sent_bytes,
    serves_both,
    weight_copy_bytes,
)
from moefold.config.casts import Cast
from moefold.config.precision_recipes import PRECISION_RECIPES, RECIPE_NAMES, LinearCasts, RecipeName
from moefold.precision.quantize import dequantize, pack_e2m1, quantize
from moefold.precision.quantize_native import quantize_native

CASTS = sorted(
    {
        cast
        for recipe in PRECISION_RECIPES.values()
        for _, cast in recipe.casts.items()
        if cast is not None and cast.element != "bf16" and cast.rounding == "nearest"
    },
    key=str,
)


def casts(name: RecipeName) -> LinearCasts:
    found = casts_of(name)
    assert found is not None
    return found


@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("shape", [(2, 128, 256), (1, 48, 80), (3, 130, 272)], ids=str)
def test_bytes_of_a_matrix_are_those_of_its_tensors(cast: Cast, shape: tuple[int, int, int]) -> None:
    """Partial blocks included."""
    made = quantize(torch.randn(shape), cast)
    codes = pack_e2m1(made.codes_MK) if cast.element == "e2m1" else made.codes_MK
    tensors = [codes, made.scale_rc, *([] if made.tensor_scale is None else [made.tensor_scale])]
    assert cast_bytes(cast, shape[1], shape[2], shape[0]) == sum(each.nbytes for each in tensors)


def test_bytes_per_value_are_the_formats() -> None:
    """As the table of mechanisms has them: a byte per value, and a float32 per 128 or a byte per 32 or 16 values."""
    expected = {
        "bf16": 2.0,
        "fp8_tensor": 1.0,
        "fp8_delayed": 1.0,
        "fp8_rowwise": 1.0,
        "fp8_blockwise": 1.03125,
        "mxfp8": 1.03125,
        "nvfp4": 0.5625,
    }
    assert {name: saved_bytes(casts_of(name), 2.0) for name in RECIPE_NAMES} == expected
    assert {name: sent_bytes(casts_of(name), 2.0) for name in RECIPE_NAMES} == expected
    assert saved_bytes(None, 2.0) == 2.0 and sent_bytes(None, 4.0) == 4.0
    assert gathered_bytes(casts("fp8_blockwise"), 4.0) == 1 + 4 / 16384


def test_copies_of_weights() -> None:
    """MXFP8 has two whose scales differ. Transformer Engine holds NVFP4's square blocks with a scale per row, twice."""
    both = {name: weight_copy_bytes(casts(name), one_order=True) for name in RECIPE_NAMES}
    once = {name: weight_copy_bytes(casts(name), one_order=False) for name in RECIPE_NAMES}
    assert (both["mxfp8"], once["mxfp8"]) == (2.0625, 2.0625)
    assert (both["fp8_tensor"], once["fp8_tensor"]) == (2.0, 1.0)
    assert (both["fp8_blockwise"], once["fp8_blockwise"]) == (2 + 8 / 16384, 1 + 4 / 16384)
    assert both["nvfp4"] == 1.125
    assert [name for name in RECIPE_NAMES if not serves_both(casts(name))] == ["fp8_rowwise", "mxfp8"]


def test_matmuls_run_at_the_rate_of_their_widest_operand() -> None:
    found = {name: matmul_bits(casts_of(name)) for name in RECIPE_NAMES}
    assert found == {name: {"bf16": 16, "nvfp4": 4}.get(name, 8) for name in RECIPE_NAMES}
    assert matmul_bits(None) == 16 and matmul_bits(None, 32) == 32


def test_a_scale_per_row_spans_the_row() -> None:
    """Its equation in a loop: the scale is a power of two, rounded up from amax / 448."""
    cast = Cast("e4m3", (1, 0), "power_of_two")
    x_MK = torch.randn(5, 37) * torch.logspace(-3, 3, 5)[:, None]
    made = quantize(x_MK, cast)
    assert made.scale_rc.shape == (5, 1) and str(cast) == "e4m3 1xrow power_of_two"
    for row, scale, values in zip(x_MK, made.scale_rc[:, 0], dequantize(made)):
        assert scale == 2.0 ** torch.ceil(torch.log2(row.abs().max() / 448))
        assert torch.equal(values, (row / scale).to(torch.float8_e4m3fn).float() * scale)
    native = quantize_native(x_MK, cast)
    assert torch.equal(native.scale_rc, made.scale_rc)
    assert torch.equal(native.codes_MK.view(torch.uint8), made.codes_MK.view(torch.uint8))
