"""Codes along features to codes along tokens: the bits of widening and narrowing again, and which rows allow it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="kernels are an extra")

import triton
import triton.language as tl
from tests.body.kernel_cases import poisoned_memory
from tests.body.kernel_memory import watching
from tests.precision.cast_draws import ROW_CASTS, assert_same, draw

from moefold.config.casts import Cast
from moefold.config.precision_recipes import DISPATCH_CASTS, PRECISION_RECIPES, DispatchFormat
from moefold.ops.kernels.interpret import interpreting
from moefold.precision.both_directions import narrows_rows_alone, requantize_reference
from moefold.precision.cast_kernels import cast_both_triton, requantize_triton
from moefold.precision.cast_kernels.narrow_numbers_triton import e8m0_to_float
from moefold.precision.quantize import Quantized, dequantize, fake_quantize, quantize

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def columns_of(row: Quantized) -> Quantized:
    with interpreting(), poisoned_memory():
        return requantize_triton.requantize_triton(row, row.cast)


def compare(row: Quantized) -> None:
    found, expected = columns_of(row), requantize_reference(row, row.cast)
    what = f"{row.cast} {tuple(row.codes_MK.shape)}"
    assert found.cast == expected.cast and found.tensor_scale is None
    assert_same(found.codes_MK, expected.codes_MK, f"codes of {what}")
    assert_same(found.scale_rc, expected.scale_rc, f"scales of {what}")


def one_matrix(name: str, seed: int) -> None:
    compare(quantize(draw(seed), ROW_CASTS[name]))


@pytest.mark.parametrize("name", ROW_CASTS)
def test_the_bits_of_two_steps(name: str) -> None:
    for seed in (3, 8):
        one_matrix(name, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROW_CASTS)
def test_on_fifty_shapes(name: str) -> None:
    for seed in range(50):
        one_matrix(name, seed)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_block_that_is_nan_stays_in_its_columns(bad: float) -> None:
    """The last block of a row is partial, and its scale is NaN: nothing beyond the matrix is."""
    x = torch.randn(40, 40, generator=torch.Generator().manual_seed(1))
    x[5, 33] = bad
    row = quantize(x, ROW_CASTS["mxfp8"])
    compare(row)
    is_nan = torch.isnan(dequantize(columns_of(row)))
    # Eight columns had the block in common; of each, the block of 32 rows that row 5 is in.
    assert is_nan[32:, :32].all() and int(is_nan.sum()) == 8 * 32


def test_codes_may_lie_in_another_order() -> None:
    row = quantize(draw(3, stacks=False), ROW_CASTS["mxfp8"])
    turned = replace(row, codes_MK=row.codes_MK.mT.contiguous().mT, scale_rc=row.scale_rc.mT.contiguous().mT)
    assert_same(columns_of(turned).codes_MK, columns_of(row).codes_MK, "codes")


def test_no_races_and_nothing_outside() -> None:
    x = torch.randn(2, 33, 70)
    with watching() as watch:
        for name in ("mxfp8", "fp8_blockwise"):
            row = quantize(x, ROW_CASTS[name])
            requantize_triton.requantize_triton(row, row.cast)
    assert watch.launches == 2


def test_what_the_kernel_cannot_do_is_refused() -> None:
    fp4, square = PRECISION_RECIPES["nvfp4"].casts.x_fprop, PRECISION_RECIPES["fp8_blockwise"].casts.w_fprop
    assert fp4 is not None and square is not None
    mxfp8 = ROW_CASTS["mxfp8"]
    for cast, column in (
        (fp4, fp4),
        (square, square),
        (mxfp8, ROW_CASTS["fp8_blockwise"]),
        (mxfp8, replace(mxfp8, rounding="stochastic")),
    ):
        with pytest.raises(ValueError, match="one format and one block of a row"):
            requantize_triton.requantize_triton(quantize(torch.randn(32, 32), cast), column)
    mxfp4 = Cast("e2m1", (1, 32), "e8m0_rceil")
    with pytest.raises(ValueError, match="codes of 8 bits"):
        requantize_triton.requantize_triton(quantize(torch.randn(32, 32), mxfp4), mxfp4)


@triton.jit
def _untransposed(tile, HADAMARD: tl.constexpr):
    return tile


@triton.jit
def _largest_of_the_row(stored, RULE: tl.constexpr):
    largest = tl.max(stored.to(tl.int32), axis=1)
    return tl.broadcast_to(e8m0_to_float(largest)[:, None], stored.shape)


@pytest.mark.parametrize(
    ("module", "attribute", "broken"),
    [(cast_both_triton, "along_rows", _untransposed), (requantize_triton, "decode_of", _largest_of_the_row)],
    ids=["wrong direction", "another block's scale"],
)
def test_broken_kernels_are_caught(module: Any, attribute: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 64) * torch.exp2(torch.arange(64.0) / 4)
    monkeypatch.setattr(module, attribute, broken)
    with pytest.raises(AssertionError, match="differ"):
        compare(quantize(x, ROW_CASTS["mxfp8"]))


@pytest.mark.parametrize("name", DISPATCH_CASTS)
def test_rows_that_were_sent_are_numbers_of_their_cast(name: DispatchFormat) -> None:
    """Narrowing them once more changes no value, in their own dtype too: so what wgrad reads of the wide rows follows
    from their codes. Kernels have the bits of these references."""
    cast = DISPATCH_CASTS[name].forward
    for seed in range(50):
        x = draw(seed)
        received = fake_quantize(x, cast).to(x.dtype)
        found, expected = requantize_reference(quantize(received, cast), cast), quantize(received.mT, cast)
        assert_same(found.codes_MK, expected.codes_MK, f"codes of {seed}")
        assert_same(found.scale_rc, expected.scale_rc, f"scales of {seed}")


@pytest.mark.parametrize("name", ROW_CASTS)
def test_wide_rows_have_other_numbers_than_their_codes(name: str) -> None:
    """So codes along tokens are made of codes only where rows were sent as such."""
    generator, cast = torch.Generator().manual_seed(1), ROW_CASTS[name]
    x = torch.randn(128, 128, generator=generator) * torch.exp2(torch.randint(-9, 9, (128, 1), generator=generator))
    assert narrows_rows_alone(cast)
    found, expected = requantize_reference(quantize(x, cast), cast), quantize(x.mT, cast)
    assert int((dequantize(found) != dequantize(expected)).sum()) > 50
