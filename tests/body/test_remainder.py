"""float32 as a bfloat16 weight and 16 bits: no value is lost, and the weight is the nearest one."""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.optim.remainder import join, rounded_weight, split_into


def halves(main: Tensor) -> tuple[Tensor, Tensor]:
    weight, remainder = torch.empty_like(main, dtype=torch.bfloat16), torch.empty_like(main, dtype=torch.int16)
    split_into(main, weight, remainder)
    return weight, remainder


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def all_bfloat16() -> Tensor:
    """Every finite one, as float32."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).bitwise_left_shift(16).view(torch.float32)
    return values[values.isfinite()]


def test_every_tie_is_kept_and_every_neighbour_of_one() -> None:
    for offset in (-32769, -32768, -32767, -1, 0, 1, 32767, 32768, 32769):
        main = (bits(all_bfloat16()) + offset).view(torch.float32)
        main = main[main.isfinite()]
        weight, remainder = halves(main)
        assert torch.equal(bits(join(weight, remainder)), bits(main)), offset
        assert torch.equal(weight, rounded_weight(main))


def test_a_million_values_are_kept() -> None:
    """Of all exponents and signs, subnormal ones too."""
    main = torch.randint(-(1 << 31), 1 << 31, (1_000_000,), generator=torch.Generator().manual_seed(1))
    values = main.to(torch.int32).view(torch.float32)
    values = values[values.isfinite()]
    assert torch.equal(bits(join(*halves(values))), bits(values))


def test_the_weight_is_a_cast_except_at_ties() -> None:
    """A cast takes the even neighbour of a tie; here it is the one further from zero. No other is nearer."""
    random = torch.randint(0, 1 << 16, (200_000,), generator=torch.Generator().manual_seed(2)).to(torch.int32)
    upper = bits(all_bfloat16())[torch.arange(200_000) % all_bfloat16().numel()]
    main = (upper + random).view(torch.float32)
    main = main[main.isfinite() & (main.abs() < 3e38)]
    weight, cast = halves(main)[0], main.bfloat16()
    different = weight != cast
    assert torch.equal(bits(main[different]) & 0xFFFF, torch.full_like(bits(main[different]), 0x8000))
    gap, gap_of_cast = (weight.double() - main.double()).abs(), (cast.double() - main.double()).abs()
    assert torch.equal(gap, gap_of_cast)


def test_cutting_bits_off_would_be_biased() -> None:
    """Why the weight is rounded: upper halves are too small in size by half a unit on average, nearest ones are not."""
    main = torch.rand(100_000, generator=torch.Generator().manual_seed(3)) + 1.0
    cut = (bits(main) & -65536).view(torch.float32)
    unit = 2.0**-7
    assert abs(float((cut - main).double().mean()) / unit + 0.5) < 0.01
    assert abs(float((halves(main)[0].float() - main).double().mean()) / unit) < 0.01
