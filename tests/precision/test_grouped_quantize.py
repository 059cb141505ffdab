"""Rows of all experts through a cast in one call, against a call per expert, in torch and in C."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moefold.config.casts import Cast
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.ops.padded_runs import move_rows
from moefold.precision import grouped_quantize
from moefold.precision.cast_backends import QUANTIZERS
from moefold.precision.grouped_quantize import (
    along_features,
    along_features_reference,
    along_tokens,
    along_tokens_reference,
)

WAYS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "features": (along_features, along_features_reference),
    "tokens": (along_tokens, along_tokens_reference),
}
# Of every operand that has rows: x and dy.
CASTS = {
    str(cast): replace(cast, delayed=False)
    for recipe in PRECISION_RECIPES.values()
    for operand, cast in recipe.casts.items()
    if cast is not None and operand[0] in "xd"
}
SEGMENTS = [48, 0, 16, 160, 32]


def rows_of(segments: list[int], columns: int = 32, seed: int = 0) -> Tensor:
    """Experts of very different magnitudes, so that the scale of another has other bits."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, columns, generator=generator) * 10.0 ** (3 - i) for i, size in enumerate(segments)]
    return torch.cat(parts)


def equal(one: Tensor, two: Tensor) -> bool:
    return torch.equal(one.isnan(), two.isnan()) and torch.equal(one.nan_to_num(), two.nan_to_num())


@pytest.mark.parametrize("casts", ["torch", "native"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("cast", list(CASTS))
def test_one_call_has_the_bits_of_a_call_per_expert(cast: str, way: str, casts: str) -> None:
    calls, fake_quantize = [], QUANTIZERS[casts].fake_quantize

    def counted(*args: object, **kwargs: object) -> Tensor:
        calls.append(args)
        return fake_quantize(*args, **kwargs)

    grouped, reference = WAYS[way]
    # A transform takes whole groups of 16 rows.
    all_segments = [SEGMENTS, [0, 0], [32], [0, 16]] + ([] if CASTS[cast].hadamard else [[7, 130, 0, 33]])
    for segments in all_segments:
        for rows in (rows_of(segments), rows_of(segments).bfloat16()):
            calls.clear()
            found = grouped(rows, CASTS[cast], segments, counted, 5)
            assert len(calls) == 1 or "row" in cast
            assert torch.equal(found, reference(rows, CASTS[cast], segments, fake_quantize, 5)), segments


@pytest.mark.parametrize("casts", ["torch", "native"])
@pytest.mark.parametrize("cast", list(CASTS))
def test_what_is_not_finite_stays_in_its_expert(cast: str, casts: str) -> None:
    rows, chosen, fake_quantize = rows_of(SEGMENTS), CASTS[cast], QUANTIZERS[casts].fake_quantize
    rows[50, 3], rows[70, 1] = torch.nan, torch.inf
    for grouped, reference in WAYS.values():
        found = grouped(rows, chosen, SEGMENTS, fake_quantize)
        assert equal(found, reference(rows, chosen, SEGMENTS, fake_quantize))
        first, _, _, _, last = found.split(SEGMENTS)
        assert bool(first.isfinite().all() and last.isfinite().all()) and not found[50].isfinite().all()


@pytest.mark.parametrize("mutant", ["one magnitude for all experts", "blocks over experts"])
def test_mutants_change_bits(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cast = CASTS["e4m3 tensor float32" if mutant.startswith("one") else "e4m3 1x128 power_of_two"]
    rows, fake_quantize = rows_of(SEGMENTS), QUANTIZERS["torch"].fake_quantize
    wanted = along_tokens_reference(rows, cast, SEGMENTS, fake_quantize)
    assert torch.equal(along_tokens(rows, cast, SEGMENTS, fake_quantize), wanted)
    if mutant == "one magnitude for all experts":
        own = grouped_quantize._amax_of_pieces
        monkeypatch.setattr(grouped_quantize, "_amax_of_pieces", lambda p, c, n: own(p, c, [sum(n)]))
        found = along_tokens(rows, cast, SEGMENTS, fake_quantize)
    else:
        found = along_tokens(rows, cast, [sum(SEGMENTS)], fake_quantize)
    assert not torch.equal(found, wanted)


def test_rows_are_moved_between_segments_of_other_sizes() -> None:
    rows = torch.arange(1.0, 6.0)[:, None]
    assert move_rows(rows, [2, 0, 3], [4, 2, 1])[:, 0].tolist() == [1, 2, 0, 0, 0, 0, 3]
    assert move_rows(rows, [2, 0, 3], [2, 0, 3]) is rows
    assert move_rows(rows[:0], [0, 0], [1, 0])[:, 0].tolist() == [0]


def cast_of(element: str) -> Cast:
    return next(cast for cast in CASTS.values() if cast.element == element)


def test_a_stack_in_c_is_its_matrices_one_by_one() -> None:
    """Strides of a transposed stack, of bfloat16 and of float32, codes and scales."""
    for dtype in (torch.float32, torch.bfloat16):
        stack = torch.randn(5, 48, 32, generator=torch.Generator().manual_seed(1)).to(dtype)[1:, 8:].transpose(1, 2)
        for cast in (cast_of("e4m3"), cast_of("e2m1"), CASTS["e4m3 1x32 e8m0_rceil"]):
            amax = torch.arange(1.0, 5.0) if cast.scales_whole_matrix else None
            one, two = (QUANTIZERS[name].quantize(stack, cast, amax=amax) for name in ("torch", "native"))
            assert torch.equal(one.codes_MK.view(torch.uint8), two.codes_MK.view(torch.uint8))
            assert torch.equal(one.scale_rc.float(), two.scale_rc.float())
