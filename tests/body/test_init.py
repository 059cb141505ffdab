"""Initial values are a function of (seed, name, global index), and look like a normal distribution."""

from __future__ import annotations

import pytest
import torch

from moefold.nn.init import normal_part

SHAPE = (6, 5, 7)


def filled(box: tuple[slice, ...], seed: int = 0, name: str = "w", dtype: torch.dtype = torch.float64) -> torch.Tensor:
    into = torch.empty([part.stop - part.start for part in box], dtype=dtype)
    normal_part(seed, name, SHAPE, box, 0.5, into)
    return into


WHOLE = tuple(slice(0, size) for size in SHAPE)


@pytest.mark.parametrize(
    "box",
    [
        (slice(2, 4), slice(0, 5), slice(0, 7)),
        (slice(0, 6), slice(1, 2), slice(0, 7)),
        (slice(5, 6), slice(4, 5), slice(3, 7)),
        (slice(3, 3), slice(0, 5), slice(0, 7)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_part_has_the_bits_of_the_whole(box: tuple[slice, ...], dtype: torch.dtype) -> None:
    assert torch.equal(filled(box, dtype=dtype), filled(WHOLE, dtype=dtype)[box])


def test_seed_and_name_matter() -> None:
    assert not torch.equal(filled(WHOLE), filled(WHOLE, seed=1))
    assert not torch.equal(filled(WHOLE), filled(WHOLE, name="v"))


def test_the_numbers_are_normal_enough() -> None:
    into = torch.empty(400, 500, dtype=torch.float64)
    normal_part(3, "big", (400, 500), (slice(0, 400), slice(0, 500)), 2.0, into)
    z = into.flatten() / 2.0
    assert abs(z.mean().item()) < 0.01 and abs(z.std().item() - 1) < 0.01
    assert abs((z.abs() < 1).double().mean().item() - 0.683) < 0.01
    assert abs((z.abs() < 2).double().mean().item() - 0.954) < 0.01
    # Neighbours are not correlated.
    assert abs((into[:, 1:] * into[:, :-1]).mean().item() / 4) < 0.01
