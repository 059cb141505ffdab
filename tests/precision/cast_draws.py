"""Random matrices for tests of cast kernels: sizes that fill no block, stacks, strides, dtypes, any magnitudes."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from moefold.config.casts import Cast
from moefold.config.precision_recipes import PRECISION_RECIPES

# Casts that narrow each row by itself: those of two recipes, and others that kernels take.
ROW_CASTS: dict[str, Cast] = {
    **{
        name: cast for name in ("mxfp8", "fp8_blockwise") if (cast := PRECISION_RECIPES[name].casts.x_fprop) is not None
    },  # type: ignore[index]
    "scales in float32": Cast("e4m3", (1, 128), "float32"),
    "e5m2, floor": Cast("e5m2", (1, 32), "e8m0_floor"),
}


def draw(seed: int, multiple: tuple[int, int] = (1, 1), stacks: bool = True) -> Tensor:
    """Sides are multiples of ``multiple``. A row of zeros; in one of four matrices, values that are not finite."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sides = [
        -(-dice.choice(sizes) // each) * each
        for sizes, each in zip(((0, 1, 5, 32, 33, 70, 129), (1, 16, 40, 128, 130)), multiple, strict=True)
    ]
    stack = dice.choice(((), (), (2,), (1, 2))) if stacks else ()
    turned = dice.random() < 0.3
    shape = (*stack, *(reversed(sides) if turned else sides))
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp2(torch.randint(-20, 20, (*shape[:-1], 1), generator=generator).float())
    if x.numel():
        x[..., 0, :] *= dice.choice((0.0, 1.0, 2.0**-120))
        if dice.random() < 0.25:
            x.view(-1)[dice.randrange(x.numel())] = dice.choice((math.inf, -math.inf, math.nan))
    x = x.bfloat16() if dice.random() < 0.5 else x
    return x.mT if turned else x


def multiple_of(cast: Cast) -> tuple[int, int]:
    return (1, 16) if cast.hadamard else (1, 1)


def assert_same(found: Tensor, expected: Tensor, what: str) -> None:
    """The same bits; all NaN are one."""
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    if found.is_floating_point():
        found, expected = (torch.where(torch.isnan(x.float()), torch.nan, x.float()) for x in (found, expected))
        found, expected = found.contiguous().view(torch.int32), expected.contiguous().view(torch.int32)
    differ = int((found != expected).sum())
    assert not differ, f"{what}: {differ} of {found.numel()} differ"
