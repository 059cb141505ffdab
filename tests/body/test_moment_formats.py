"""Stored moments: rounding is right on average or nearest, and depends on the element alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moefold.optim.element_noise import element_hash, global_indices, noise, noise_key
from moefold.optim.moment_formats import (
    BLOCK,
    E4M3,
    FORMATS,
    Float8,
    block_exponents,
    stochastic_bfloat16,
    stochastic_e4m3,
)

WHOLE = (slice(0, 6), slice(0, 10), slice(0, 8))
BOXES = (
    WHOLE,
    (slice(2, 4), slice(0, 10), slice(0, 8)),
    (slice(1, 3), slice(2, 7), slice(0, 8)),
    (slice(1, 3), slice(2, 7), slice(3, 5)),
    (slice(5, 6), slice(5, 10), slice(0, 8)),
)


def zeros(size: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(size, dtype=dtype)


def random_bits(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 1 << 16, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def test_the_hash_is_murmurs_finalizer() -> None:
    """MurmurHash3 of nothing is the finalizer of its seed: published values of its test suites."""
    seeds = torch.tensor([0, 1, 0xFFFFFFFF])
    assert [value % (1 << 32) for value in element_hash(seeds, 0, 3).tolist()] == [0, 0x514E28B7, 0x81F16F39]
    hashed = element_hash(torch.tensor([1]), 0, 3)
    assert [int(noise(hashed, number)) for number in range(2)] == [0x28B7, 0x514E]
    far = torch.tensor([5, 5 + (1 << 32)])
    assert len(element_hash(far, 7, 1 << 34).unique()) == 2


@pytest.mark.parametrize("box", BOXES)
def test_indices_are_those_of_the_global_tensor(box: tuple[slice, ...]) -> None:
    want = torch.arange(480).view(6, 10, 8)[box].reshape(-1)
    assert torch.equal(global_indices((6, 10, 8), [box], 0, want.numel(), "cpu"), want)
    assert torch.equal(global_indices((6, 10, 8), [box], 3, want.numel() - 2, "cpu"), want[3:-2])


def test_indices_of_several_boxes_follow_each_other() -> None:
    """A flat range: the end of a row, whole rows, the beginning of another."""
    boxes = [(slice(1, 2), slice(3, 5)), (slice(2, 4), slice(0, 5)), (slice(4, 5), slice(0, 1))]
    assert torch.equal(global_indices((6, 5), boxes, 0, 13, "cpu"), torch.arange(8, 21))
    assert torch.equal(global_indices((6, 5), boxes, 1, 12, "cpu"), torch.arange(9, 20))


def test_noise_differs_by_seed_step_name_and_moment() -> None:
    keys = [noise_key(*each) for each in ((0, 1, "a"), (1, 1, "a"), (0, 2, "a"), (0, 1, "b"))]
    drawn = [noise(element_hash(torch.arange(4096), key, 4096), number) for key in keys for number in (0, 1)]
    for first in range(len(drawn)):
        assert abs(float(drawn[first].float().mean()) / 65535 - 0.5) < 0.02
        for second in range(first):
            assert float((drawn[first] == drawn[second]).float().mean()) < 0.01


@pytest.mark.parametrize("value", [1.03, 0.0013, -3.3, 100.0, 0.0, 1.0, -448.0])
def test_stochastic_rounding_is_right_on_average(value: float) -> None:
    count = 1 << 16
    values, bits = torch.full((count,), value), torch.arange(count, dtype=torch.int32)
    for rounded, narrow in ((stochastic_bfloat16(values, bits), torch.bfloat16), (stochastic_e4m3(values, bits), E4M3)):
        assert torch.equal(rounded.to(narrow).float(), rounded)
        low, high = float(rounded.min()), float(rounded.max())
        assert low <= value <= high and len(rounded.unique()) <= 2
        # All 2**16 random numbers once: the mean is exact up to their resolution.
        assert float(rounded.double().mean()) == pytest.approx(value, abs=(high - low) * 2**-15)


def test_scales_are_the_smallest_powers_of_two() -> None:
    largest = torch.tensor([448.0, 448.1, 224.0, 224.1, 1.75, 3e38, 1e-30, 0.0])
    blocks = torch.zeros(len(largest), BLOCK)
    blocks[:, 7] = -largest
    exponents = block_exponents(blocks)
    assert exponents.tolist()[:6] == [0, 1, -1, 0, -8, 120]
    assert exponents[6] == -48, "smaller blocks become zeros"
    largest[6] = 0
    assert bool((largest <= 448 * torch.pow(2.0, exponents.double())).all())


@pytest.mark.parametrize("lead", [0, 5])
@pytest.mark.parametrize("moment", [0, 1])
def test_float8_is_near_and_what_was_read_is_stored_without_loss(lead: int, moment: int) -> None:
    format = FORMATS["float8"][moment]
    values = torch.randn(1000, generator=torch.Generator().manual_seed(4)) * torch.logspace(-6, 2, 1000)
    values = values.square() if moment else values
    for bits, error in ((None, 2**-4), (random_bits(1000), 2**-3)):
        stored = format.allocate(1000, lead, zeros)
        format.write(values, stored, lead, bits)
        read = format.read(stored, lead)
        # A block's small values have an absolute error: the smallest code of the block's scale.
        peak = torch.nn.functional.max_pool1d(values.abs().sqrt()[None] if moment else values.abs()[None], 255, 1, 127)[
            0
        ]
        allowed = peak * 2**-17 + (values.abs().sqrt() if moment else values.abs()) * error
        gap = (read.sqrt() - values.sqrt()).abs() if moment else (read - values).abs()
        assert bool((gap <= allowed * 1.001).all())
        saved = read.to(format.saved_dtype)
        again = format.allocate(1000, lead, zeros)
        format.write(saved.float(), again, lead, random_bits(1000, seed=1))
        assert torch.equal(format.read(again, lead), read)
        assert stored[""].element_size() == stored["_scale"].element_size() == 1


def test_a_second_moment_in_float8_is_never_zero() -> None:
    """Next to a large one in its block; a zero beside a first moment that is not zero would make the update huge."""
    values = torch.full((BLOCK,), 1e-12)
    values[0], values[1] = 1.0, 0.0
    for bits in (None, torch.zeros(BLOCK, dtype=torch.int32)):
        stored = Float8(root=True).allocate(BLOCK, 0, zeros)
        Float8(root=True).write(values, stored, 0, bits)
        read = Float8(root=True).read(stored, 0)
        assert bool((read[2:] > 0).all()) and read[1] == 0


def test_squares_of_rounded_roots_are_right_on_average() -> None:
    for value in (1.03, 0.3, 17.1, 0.0047):
        bits = torch.arange(1 << 16, dtype=torch.int32)
        rounded = stochastic_e4m3(torch.full((1 << 16,), value), bits, squared=True)
        assert torch.equal(rounded.to(E4M3).float(), rounded)
        assert float(rounded.double().square().mean()) == pytest.approx(value**2, rel=1e-4)


def test_which_formats_follow_when_gradients_become_small() -> None:
    """The reason for stochastic rounding: gradients fall to a tenth, and the second moment has to fall with them."""
    size, beta2, ratios = 256, 0.999, {}
    for name, stochastic in (("bfloat16", False), ("bfloat16", True), ("float8", True)):
        format, generator = FORMATS[name][1], torch.Generator().manual_seed(0)
        stored, exact = format.allocate(size, 0, zeros), torch.zeros(size)
        for step in range(2000):
            square = torch.randn(size, generator=generator).mul_(1.0 if step < 300 else 0.1).square_()
            exact.lerp_(square, 1 - beta2)
            bits = random_bits(size, seed=step) if stochastic else None
            format.write(format.read(stored, 0).lerp(square, 1 - beta2), stored, 0, bits)
        ratios[name, stochastic] = float((format.read(stored, 0) / exact).mean())
    assert ratios["bfloat16", True] == pytest.approx(1.0, abs=0.02)
    assert ratios["float8", True] == pytest.approx(1.0, abs=0.08)
    assert ratios["bfloat16", False] > 2
