"""Parts of a matrix, narrowed apart with one maximum between, have the codes and scales of the whole matrix."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moefold.blueprint.flat_layout import boxes_of_range
from moefold.config.casts import Cast
from moefold.precision import quantize_parts
from moefold.precision.quantize import quantize
from moefold.precision.quantize_parts import Box, codes_of, merge_amax, scales_of

SQUARE = Cast("e4m3", (128, 128), "power_of_two")
CASTS = {
    "blockwise": SQUARE,
    "float32 scales": Cast("e4m3", (128, 128), "float32"),
    "tensor": Cast("e4m3", None, "float32"),
    "e5m2": Cast("e5m2", None, "float32"),
    "small blocks": Cast("e4m3", (16, 16), "e8m0_rceil"),
}
# A partial block of columns (576 = 4.5 blocks), one of rows, stacks of experts, a matrix smaller than a block.
SHAPES = [(256, 576), (200, 130), (3, 2, 96, 160), (5, 24, 8), (1, 1)]


def matrix(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Magnitudes that differ from block to block, so that another block's scale is another number."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random) * torch.exp2(torch.randint(-9, 9, shape, generator=random))


def in_parts(x: Tensor, cast: Cast, ways: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of flat ranges, each narrowed by itself; the maximum is that of a loop."""
    flat, size = x.flatten(), x.numel()
    ends = [size * index // ways for index in range(ways + 1)]
    parts: list[list[tuple[Box, Tensor]]] = []
    for start, stop in pairwise(ends):
        at, boxes = start, []
        for box in boxes_of_range(x.shape, start, stop):
            sizes = [part.stop - part.start for part in box]
            count = torch.Size(sizes).numel()
            boxes.append((box, flat[at : at + count].view(sizes)))
            at += count
        parts.append(boxes)
    amaxes = []
    for boxes in parts:
        amaxes.append(torch.zeros(cast.scale_shape(tuple(x.shape))))
        for box, values in boxes:
            merge_amax(amaxes[-1], values, box, cast)
    scale, encode = scales_of(torch.stack(amaxes).amax(0), cast)
    codes = [codes_of(values, box, encode, cast).flatten() for boxes in parts for box, values in boxes]
    return torch.cat([each.view(torch.uint8) for each in codes]).view(x.shape), scale


def same_bits(x: Tensor, cast: Cast, ways: int) -> bool:
    codes, scale = in_parts(x, cast, ways)
    whole = quantize(x, cast)
    return torch.equal(codes, whole.codes_MK.view(torch.uint8)) and torch.equal(
        scale.view(torch.uint8), whole.scale_rc.view(torch.uint8)
    )


@pytest.mark.parametrize("cast", list(CASTS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_have_the_bits_of_the_whole(cast: str, shape: tuple[int, ...]) -> None:
    for kind, ways in ((torch.float32, 2), (torch.bfloat16, 4), (torch.float64, 7)):
        assert same_bits(matrix(shape).to(kind), CASTS[cast], ways)
    assert same_bits(torch.zeros(shape), CASTS[cast], 3)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [(0, 0), (100, 300), (255, 575)])
def test_a_block_with_a_value_that_is_not_finite_becomes_nan_on_every_rank(bad: float, place: tuple[int, int]) -> None:
    x = matrix((256, 576))
    x[place] = bad
    codes, scale = in_parts(x, SQUARE, 3)
    whole = quantize(x, SQUARE)
    assert torch.equal(scale.isnan(), whole.scale_rc.isnan()) and int(scale.isnan().sum()) == 1
    assert torch.equal(
        codes.view(torch.float8_e4m3fn).float().nan_to_num(nan=1e9),
        whole.codes_MK.float().nan_to_num(nan=1e9),
    )


def test_one_block_by_hand() -> None:
    """amax 1000 over parts of 3 and 1000: 448 / 1000 cut to a power of two is 1/4, so scale 4 and codes 0.75, 250."""
    x = torch.tensor([[3.0, 1000.0]])
    codes, scale = in_parts(x, SQUARE, 2)
    assert scale.tolist() == [[4.0]]
    assert codes.view(torch.float8_e4m3fn).float().tolist() == [[0.75, 256.0]]


def _shifted(touched: Callable[[Box, Cast], Box]) -> Callable[[Box, Cast], Box]:
    """The block before."""

    def changed(box: Box, cast: Cast) -> Box:
        *stack, rows, columns = touched(box, cast)
        back = min(1, columns.start)
        return (*stack, rows, slice(columns.start - back, columns.stop - back))

    return changed


def test_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    x = matrix((256, 576))
    # Ranges that start inside of a row, so that a part's first block is not the matrix's.
    assert same_bits(x, SQUARE, 7)
    with monkeypatch.context() as patch:
        patch.setattr(quantize_parts, "touched_blocks", _shifted(quantize_parts.touched_blocks))
        assert not same_bits(x, SQUARE, 7)
    with monkeypatch.context() as patch:
        patch.setattr(quantize_parts, "_corner", lambda box, cast: (0, 0))
        with pytest.raises((RuntimeError, AssertionError)):
            assert same_bits(x, SQUARE, 7)
    with monkeypatch.context() as patch:
        # Each part by its own magnitudes.
        patch.setattr(torch.Tensor, "amax", lambda self, dim=(): torch.amax(self, dim) if dim != 0 else self[0])
        assert not same_bits(x, SQUARE, 7)
