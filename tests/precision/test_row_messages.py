"""Rows as bytes: codes, then scales; narrowing a row that was narrowed before changes nothing."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from moefold.blueprint.narrow_bytes import cast_bytes
from moefold.config.casts import Cast
from moefold.config.precision_recipes import DISPATCH_CASTS
from moefold.precision.cast_backends import QUANTIZERS
from moefold.precision.quantize import quantize
from moefold.precision.row_messages import NarrowRowCodec

DIM = 200  # 6 blocks of 32 and one of 8; 1 block of 128 and one of 72


def rows_of(number: int, dim: int = DIM, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of many magnitudes, with a block of zeros."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randn(number, dim, generator=generator) * torch.logspace(-6, 6, dim)
    rows[:, 32:64] = 0
    return rows.to(dtype)


def e4m3_bits(value: float) -> int:
    """One sign, four exponent bits with bias 7, three of the fraction; nearest, ties to even. Written out."""
    sign, size = (0x80, -value) if math.copysign(1, value) < 0 else (0, value)
    if size == 0:
        return sign
    exponent = max(math.frexp(size)[1] - 1, -6)
    steps = round(size / 2.0 ** (exponent - 3))
    if steps == 16:
        exponent, steps = exponent + 1, 8
    return sign | (steps if steps < 8 else ((exponent + 7) << 3) | (steps - 8))


def bytes_of(row: list[float], block: int, stored: str) -> bytes:
    """The message of one row by its equations: the scale is the smallest power of two with amax / scale <= 448."""
    codes, scales = bytearray(), bytearray()
    for start in range(0, len(row), block):
        values = row[start : start + block]
        fraction, exponent = math.frexp(max(map(abs, values)) / 448)
        power = exponent - 1 if fraction == 0.5 else exponent
        if fraction == 0:
            # A block of zeros has the scale 1, or the smallest exponent.
            power = 0 if stored == "<f" else -127
        scales += struct.pack("<f", 2.0**power) if stored == "<f" else bytes([power + 127])
        codes += bytes(e4m3_bits(value / 2.0**power) for value in values)
    return bytes(codes + scales)


@pytest.mark.parametrize("casts", ["torch", "native"])
@pytest.mark.parametrize(("name", "block", "stored"), [("mxfp8", 32, "B"), ("fp8_blockwise", 128, "<f")])
def test_a_message_is_codes_and_scales(name: str, block: int, stored: str, casts: str) -> None:
    cast, rows = DISPATCH_CASTS[name].forward, rows_of(5)
    packed = NarrowRowCodec(cast, QUANTIZERS[casts]).pack(rows)
    assert packed.dtype == torch.uint8 and packed.shape == (5, cast_bytes(cast, 1, DIM))
    for row, message in zip(rows.tolist(), packed, strict=True):
        assert bytes(message.tolist()) == bytes_of(row, block, stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("number", [0, 1, 7])
@pytest.mark.parametrize("name", DISPATCH_CASTS)
def test_what_arrives_is_what_the_cast_makes(name: str, number: int, dtype: torch.dtype) -> None:
    codec, rows = NarrowRowCodec(DISPATCH_CASTS[name].forward), rows_of(number, dtype=dtype)
    received = codec.unpack(codec.pack(rows), rows)
    assert received.dtype == dtype and torch.equal(received, codec.round(rows))
    assert number == 0 or not torch.equal(received, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", DISPATCH_CASTS)
def test_narrowing_again_changes_no_value(name: str, dtype: torch.dtype) -> None:
    """The recipe's own cast of received rows, and a second exchange, are exact. Codes are the same too, unless the
    largest value of a block was rounded down to a power of two: then all codes and the scale move by one exponent."""
    cast, rows = DISPATCH_CASTS[name].forward, rows_of(300, dtype=dtype)
    codec = NarrowRowCodec(cast)
    received = codec.round(rows)
    assert torch.equal(codec.round(received), received)
    first, again = quantize(rows, cast), quantize(received, cast)
    assert cast.block is not None
    same_NK = (first.scale_rc == again.scale_rc).repeat_interleave(cast.block[1], 1)[:, :DIM]
    assert same_NK.float().mean() > 0.9
    assert torch.equal(first.codes_MK.view(torch.uint8)[same_NK], again.codes_MK.view(torch.uint8)[same_NK])


@pytest.mark.parametrize("name", DISPATCH_CASTS)
def test_bytes_of_rows(name: str) -> None:
    """Both casts of a name have equal bytes, and at whole blocks those of ``bytes_per_value``: 0.516 of bfloat16."""
    casts = DISPATCH_CASTS[name]
    assert cast_bytes(casts.forward, 1, DIM) == DIM + {"mxfp8": 7, "fp8_blockwise": 8}[name]
    assert cast_bytes(casts.backward, 1, DIM) == cast_bytes(casts.forward, 1, DIM)
    assert cast_bytes(casts.forward, 1, 1024) == 1024 * casts.forward.bytes_per_value < 0.52 * 2048


def test_only_casts_of_rows_are_messages() -> None:
    with pytest.raises(AssertionError, match="not a cast of rows"):
        NarrowRowCodec(Cast("e4m3", (128, 128), "power_of_two"))
