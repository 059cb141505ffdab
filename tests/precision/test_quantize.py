"""Casts against other libraries' own quantisers on a million values, and the rules that have no such oracle."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tests.precision.cast_inputs import hard_values
from tests.precision.record_oracles import (
    COMPARED,
    HADAMARD,
    MX,
    NVFP4,
    RECORDED,
    Compared,
    digest,
    without_sign_of_zero,
)
from torch import Tensor

from moefold.config.casts import Cast
from moefold.precision.quantize import (
    FLOAT8,
    HADAMARD_SIGNS,
    TOP,
    Quantized,
    block_noise,
    dequantize,
    fake_quantize,
    from_codes,
    hadamard,
    pack_e2m1,
    quantize,
    swizzle_scales,
    to_codes,
    unpack_e2m1,
)

CASTS = sorted({compared.cast for compared in COMPARED}, key=str)


def stored(quantized: Quantized, unsigned_zeros: bool) -> tuple[Tensor, Tensor]:
    """Scales and codes as oracles have them."""
    if quantized.cast.element != "e2m1":
        return quantized.scale_rc, quantized.codes_MK
    packed = pack_e2m1(quantized.codes_MK)
    return quantized.scale_rc, without_sign_of_zero(packed) if unsigned_zeros else packed


@pytest.mark.parametrize("compared", COMPARED, ids=lambda each: f"{each.library} {each.cast} {each.kind}")
def test_bits_are_those_of_other_libraries(compared: Compared) -> None:
    key = {"library": compared.library, "cast": str(compared.cast), "inputs": compared.kind}
    (row,) = [row for row in json.loads(RECORDED.read_text()) if row.items() >= key.items()]
    scale, codes = stored(quantize(hard_values(compared.kind), compared.cast), compared.unsigned_zeros)
    assert (digest(scale), digest(codes)) == (row["scales"], row["codes"])


@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_its_block_nan(cast: Cast, value: float) -> None:
    x = torch.ones(256, 256)
    x[200, 130] = value
    found = fake_quantize(x, cast)
    rows, columns = (256, 256) if cast.block is None or cast.scale == "two_level" else cast.block
    block = torch.zeros(256, 256, dtype=torch.bool)
    row, column = 200 // rows * rows, 130 // columns * columns
    block[row : row + rows, column : column + columns] = True
    assert torch.equal(torch.isnan(found), block)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_under_a_given_scale_a_value_that_is_not_finite_is_nan_alone(element: str) -> None:
    cast = Cast(element, None, "float32", delayed=True)  # type: ignore[arg-type]
    x = torch.tensor([[1.0, math.inf, -math.inf, math.nan, 5.0, -5.0]])
    found = fake_quantize(x, cast, amax=torch.tensor(2.0))
    assert torch.isnan(found[0, 1:4]).all()
    # What exceeds the amax of earlier steps saturates.
    assert found[0, [0, 4, 5]].tolist() == [1.0, 2.0, -2.0]


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_stacks_and_partial_blocks_are_narrowed_as_their_parts(cast: Cast) -> None:
    """A stack is its matrices; a last block is the block of the values that are there; no rows are no codes."""
    stack = hard_values("narrow range")[:640, :576].view(2, 320, 576)
    whole = fake_quantize(stack, cast)
    assert torch.equal(whole, torch.stack([fake_quantize(matrix, cast) for matrix in stack]))
    if cast.scale != "two_level" and cast.block is not None:
        assert torch.equal(whole[:, 256:, 512:], fake_quantize(stack[:, 256:, 512:], cast))
    assert quantize(stack[:, :0], cast).codes_MK.shape == (2, 0, 576)
    assert fake_quantize(stack[:, :0], cast).shape == (2, 0, 576)


def test_a_transposed_square_block_has_the_same_values() -> None:
    x = hard_values("narrow range")
    for cast in (Cast("e4m3", (128, 128), "power_of_two"), NVFP4[1]):
        assert torch.equal(fake_quantize(x.t(), cast), fake_quantize(x, cast).t())


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_stochastic_rounding_is_unbiased_and_takes_neighbours(element: str) -> None:
    cast = Cast(element, (1, 16), "power_of_two", rounding="stochastic")  # type: ignore[arg-type]
    x = torch.linspace(-1, 1, 16).repeat(4096, 1)
    x[:, 0] = TOP[cast.element]
    # Equal blocks would be rounded alike.
    x[:, 14:] = torch.rand(4096, 2, generator=torch.Generator().manual_seed(0))
    found = fake_quantize(x, cast, seed=3)
    codes = torch.arange(16 if element == "e2m1" else 256, dtype=torch.uint8)
    numbers = from_codes(codes if element == "e2m1" else codes.view(FLOAT8[cast.element]), cast.element)
    numbers = numbers[torch.isfinite(numbers)]
    for column in range(1, 14):
        value = float(x[0, column])
        below, above = numbers[numbers <= value].max(), numbers[numbers >= value].min()
        assert set(found[:, column].tolist()) <= {float(below), float(above)}
        # Four standard deviations of a mean of 4,096 draws.
        assert abs(float(found[:, column].mean()) - value) <= 4 * float(above - below) / 2 / 64 + 1e-12


def test_noise_is_uniform_and_belongs_to_blocks() -> None:
    """Rows in another order, or a shard of the columns, keep their noise; so do values that differ in the last bits."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1000, 304, generator=generator)
    blocks = x.view(1000, 1, 19, 16)
    noise = block_noise(blocks, 5).view(1000, 304)
    assert noise.min() >= 0 and noise.max() < 1 and abs(float(noise.mean()) - 0.5) < 0.003
    assert abs(float(noise.var()) - 1 / 12) < 0.001
    # Neither neighbours, nor other seeds, nor the values that are rounded are correlated with it.
    centred = noise - 0.5
    for other in (
        centred.roll(1, 0),
        centred.roll(1, 1),
        centred.roll(16, 1),
        block_noise(blocks, 6).view(1000, 304) - 0.5,
        x,
    ):
        assert abs(float((centred * other).mean())) < 0.0025
    order = torch.randperm(1000, generator=generator)
    assert torch.equal(block_noise(blocks[order][:, :, 7:], 5).view(1000, -1), noise[order, 112:])
    assert torch.equal(block_noise(blocks.bfloat16().float() * (1 + 2**-20), 5).view(1000, 304), noise)


def test_noise_is_the_hash_written_out() -> None:
    """splitmix64's finaliser by Python's integers; zeros and what is far below the largest count for nothing."""
    mask, values = 2**64 - 1, (0.0, -1.5, 3.0, 1e-10, -0.0, 1e-3)

    def mix(word: int) -> int:
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return word ^ (word >> 31)

    content = 1 << 63
    for place, value in enumerate(values, 1):
        bits = int(torch.tensor(value).bfloat16().view(torch.int16)) & 0xFFFF
        if abs(value) > 3.0 / 2**32:
            content += mix((bits + place * 0xD1B54A32D192ED03) & mask)
    wanted = [(mix((content + place * 0x9E3779B97F4A7C15) & mask) >> 40) * 2.0**-24 for place in range(1, 7)]
    found = block_noise(torch.tensor(values).view(1, 2, 1, 3), 1 << 63)
    assert found.flatten().tolist() == wanted


def test_the_hadamard_transform_is_orthogonal_and_is_the_matrix_of_the_paper() -> None:
    matrix = torch.ones(1, 1)
    while len(matrix) < 16:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = torch.tensor(HADAMARD_SIGNS)[:, None] * matrix / 4
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))
    assert torch.equal(hadamard(torch.eye(16)), matrix)
    x, y = hard_values("narrow range")[:64, :64].double(), hard_values("narrow range")[64:128, :64].double()
    ours = hadamard(x.float()).double() @ hadamard(y.float()).double().t()
    assert torch.allclose(ours, x @ y.t(), rtol=1e-5, atol=1e-3)


def test_codes_of_e2m1_and_their_pairs() -> None:
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = to_codes(torch.cat([numbers, -numbers]), "e2m1")
    assert codes.tolist() == list(range(16))
    assert torch.equal(unpack_e2m1(pack_e2m1(codes)), codes) and pack_e2m1(codes)[0] == 0x10
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    assert to_codes(ties, "e2m1").tolist() == [0, 2, 2, 4, 4, 6, 6, 7]


def test_scales_in_the_order_of_tensor_cores() -> None:
    """Entry (row, column) of a tile of 128 x 4 is at (row % 32) * 16 + row // 32 * 4 + column, as cuBLAS documents."""
    scale_rc = torch.arange(300 * 10, dtype=torch.int32).view(300, 10)
    found = swizzle_scales(scale_rc)
    for row, column in ((0, 0), (31, 3), (32, 4), (127, 7), (128, 0), (299, 9)):
        tile, r, c = row // 128 * 3 + column // 4, row % 128, column % 4
        assert found[tile * 512 + r % 32 * 16 + r // 32 * 4 + c] == scale_rc[row, column]
    assert found.shape == (3 * 3 * 512,)


def test_errors_of_one_cast_are_the_known_ones() -> None:
    """Relative errors of normal values, two-sided: a cast that does nothing fails as one that is too coarse."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 1024, generator=generator)
    expected = {
        Cast("e4m3", None, "float32"): 0.0263,
        Cast("e5m2", None, "float32"): 0.0526,
        Cast("e4m3", (1, 128), "power_of_two"): 0.0263,
        MX[0]: 0.0266,
        NVFP4[0]: 0.095,
        NVFP4[1]: 0.111,
    }
    for cast, error in expected.items():
        found = float((fake_quantize(x, cast) - x).norm() / x.norm())
        assert abs(found - error) < 0.05 * error, (str(cast), found)
    found = float((dequantize(quantize(x, HADAMARD)) - hadamard(x)).norm() / x.norm())
    assert abs(found - 0.095) < 0.005


def test_the_page_lists_every_comparison() -> None:
    page, rows = (Path(__file__).parents[2] / "docs/precision.md").read_text(), json.loads(RECORDED.read_text())
    columns = ("library", "version", "cast", "inputs")
    lines = [
        " | ".join(["", *(row[name] for name in columns), f"{row.get('zeros_without_sign', 0):,}", ""]) for row in rows
    ]
    lines = [line.strip() for line in lines]
    assert len(rows) == len(COMPARED) and not [line for line in lines if line not in page], "\n".join(lines)
