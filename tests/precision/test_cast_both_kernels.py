"""Casts in both directions from one read: the kernel's bits, and layers that use it; broken ones are noticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="kernels are an extra")

import triton
import triton.language as tl
from tests.body.kernel_cases import poisoned_memory
from tests.body.kernel_memory import watching
from tests.marks import slow_except
from tests.precision.cast_draws import assert_same, draw

from moefold.config.casts import Cast
from moefold.config.precision_recipes import PRECISION_RECIPES, RecipeName
from moefold.nn.matmul_kernels import grouped
from moefold.nn.matmul_policy import ParameterMatmul, WeightGradQueue
from moefold.ops.kernels.interpret import interpreting
from moefold.precision import operands
from moefold.precision.amax import SharedAmaxes
from moefold.precision.both_directions import BothWays, WaitingCopies, quantize_both_reference, share_a_read
from moefold.precision.cast_backends import QUANTIZERS
from moefold.precision.cast_kernels import cast_both_triton
from moefold.precision.cast_kernels.cast_both_triton import quantize_both_triton
from moefold.precision.narrow_inputs import NarrowInputs
from moefold.precision.operands import NarrowOperands, NarrowWeights, Quantizers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SEED = 2**63 + 5
TRAINED: tuple[RecipeName, ...] = ("fp8_blockwise", "mxfp8", "nvfp4")
# Rowwise and columnwise cast by the operand, where one read makes both.
PAIRS: dict[str, tuple[Cast, Cast]] = {}
for _name in TRAINED:
    _casts = PRECISION_RECIPES[_name].casts
    for _operand, _row, _column in (
        ("x", _casts.x_fprop, _casts.x_wgrad),
        ("w", _casts.w_fprop, _casts.w_dgrad),
        ("dy", _casts.dy_dgrad, _casts.dy_wgrad),
    ):
        if share_a_read(_row, _column):
            assert _row is not None and _column is not None
            PAIRS[f"{_name} {_operand}"] = (_row, _column)
# Operands of a recipe may have the same casts: each pair once.
DISTINCT = [name for name in PAIRS if name == next(first for first in PAIRS if PAIRS[first] == PAIRS[name])]


# ---- the kernel ----


def both_ways(name: str, seed: int) -> None:
    row, column = PAIRS[name]
    x = draw(seed, (16, 16) if column.hadamard else (1, 1))
    with interpreting(), poisoned_memory():
        found = quantize_both_triton(x, row, column, seed=SEED)
    for way, ours, expected in zip(
        ("rowwise", "columnwise"), found, quantize_both_reference(x, row, column, seed=SEED), strict=True
    ):
        what = f"{way} {name} {tuple(x.shape)} {x.dtype}"
        assert ours.cast == expected.cast
        assert_same(ours.codes_MK, expected.codes_MK, f"codes of {what}")
        assert_same(ours.scale_rc, expected.scale_rc, f"scales of {what}")
        if expected.tensor_scale is not None:
            assert ours.tensor_scale is not None
            assert_same(ours.tensor_scale, expected.tensor_scale, f"tensor scale of {what}")


def test_pairs_are_those_of_rows() -> None:
    """Square blocks have one copy, scales per tensor too; a transform is of the columnwise copy alone."""
    assert set(PAIRS) == {
        "fp8_blockwise x",
        "fp8_blockwise dy",
        "mxfp8 x",
        "mxfp8 w",
        "mxfp8 dy",
        "nvfp4 x",
        "nvfp4 dy",
    }
    assert DISTINCT == ["fp8_blockwise x", "mxfp8 x", "nvfp4 x", "nvfp4 dy"]
    row, column = PAIRS["nvfp4 x"]
    assert not share_a_read(column, column) and not share_a_read(row, PAIRS["mxfp8 x"][1])
    assert not share_a_read(replace(row, block=(1, 0)), replace(row, block=(1, 0)))


@pytest.mark.parametrize("name", DISTINCT)
def test_both_ways(name: str) -> None:
    both_ways(name, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", DISTINCT)
def test_both_ways_on_fifty_shapes(name: str) -> None:
    for seed in range(50):
        both_ways(name, seed)


def test_who_keeps_one_copy_does_not_keep_the_other() -> None:
    row, column = PAIRS["mxfp8 w"]
    for copy in cast_both_triton.empty_copies(torch.randn(3, 64, 96), row, column)[0]:
        assert copy.codes_MK.untyped_storage().nbytes() == copy.codes_MK.nbytes
        assert copy.scale_rc.untyped_storage().nbytes() == copy.scale_rc.nbytes


def test_what_kernels_cannot_do_is_refused() -> None:
    row, column = PAIRS["nvfp4 x"]
    with pytest.raises(ValueError, match="cannot divide 33 columns"):
        quantize_both_triton(torch.randn(33, 32), row, column)
    with pytest.raises(ValueError, match="one format and one block"):
        quantize_both_triton(torch.randn(32, 32), row, PAIRS["mxfp8 x"][1])


def test_no_races_and_nothing_outside() -> None:
    x = torch.randn(2, 33, 48)
    with watching() as watch:
        quantize_both_triton(x[:, :32], *PAIRS["nvfp4 dy"])
        quantize_both_triton(x, *PAIRS["mxfp8 x"])
    assert watch.launches == 3


@triton.jit
def _untransposed(tile, HADAMARD: tl.constexpr):
    return tile


@triton.jit
def _untransformed(tile, HADAMARD: tl.constexpr):
    return tl.trans(tile)


@triton.jit
def _first_row_amax(tile, SIDE: tl.constexpr):
    return tl.max(tl.abs(tile)) * 0.5


@pytest.mark.parametrize(
    ("name", "attribute", "broken"),
    [
        ("mxfp8 x", "along_rows", _untransposed),
        ("nvfp4 x", "along_rows", _untransformed),
        ("nvfp4 dy", "_tile_amax", _first_row_amax),
    ],
    ids=["wrong direction", "no transform", "another amax"],
)
def test_broken_kernels_are_caught(name: str, attribute: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_both_triton, attribute, broken)
    with pytest.raises(AssertionError, match="differ"):
        both_ways(name, 2)


# ---- layers ----


def spread(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    octaves = torch.randint(-9, 9, shape[:1], generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(octaves)[(..., *[None] * (len(shape) - 1))]


class Counted:
    """Both copies by the reference, or by the kernel, interpreted; counted."""

    def __init__(self, quantize_both: Callable[..., BothWays] = quantize_both_reference) -> None:
        self.calls, self.quantize_both = 0, quantize_both

    def __call__(self, x: Tensor, row: Cast, column: Cast, *, seed: int = 0) -> BothWays:
        self.calls += 1
        return self.quantize_both(x, row, column, seed=seed)


def layer(
    recipe: RecipeName,
    quantizers: Quantizers,
    rows_per_expert: list[int],
    tokens: int = 128,
    later: bool = False,
    inputs: NarrowInputs | None = None,
    steps: int = 2,
) -> list[Tensor]:
    """Losses and every gradient of two layers of one input, one a stack of gates and ups, and of experts."""
    weights, queue = NarrowWeights(), WeightGradQueue()
    narrow = NarrowOperands(PRECISION_RECIPES[recipe], weights, quantizers, SEED, inputs)
    policy = ParameterMatmul(queue, operands=narrow)
    x = spread(tokens, 96, seed=4).requires_grad_()
    rows = spread(sum(rows_per_expert), 96, seed=5).requires_grad_()
    dense, gate_up = nn.Parameter(spread(40, 96, seed=6)), nn.Parameter(spread(2, 32, 96, seed=8))
    experts = nn.Parameter(spread(3 * 32, 96, seed=7).view(3, 32, 96))
    losses = []
    for _ in range(steps):
        both, received = x * 1, rows * 1
        loss = policy.linear(both, dense).square().sum() + policy.linear(both, gate_up).square().sum()
        loss = loss + policy.grouped(grouped, received, experts, torch.tensor(rows_per_expert), None).square().sum()
        if later:
            with queue.deferring("later"):
                loss.backward()
            queue.run_all()
        else:
            loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for weight in (dense, gate_up, experts):
                weight.mul_(1.7)
        weights.forget()
    return [*losses, *(each.grad for each in (x, rows, dense, gate_up, experts) if each.grad is not None)]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


WHOLE = [64, 0, 128]


@pytest.mark.parametrize("later", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("kept", [False, True], ids=["kept wide", "kept narrow"])
@pytest.mark.parametrize("recipe", TRAINED)
def test_layers_have_the_bits_of_two_casts(recipe: RecipeName, kept: bool, later: bool) -> None:
    wanted, counted = layer(recipe, operands.REFERENCE, WHOLE), Counted()
    quantizers = operands.REFERENCE._replace(quantize_both=counted)
    inputs = NarrowInputs() if kept else None
    assert same(layer(recipe, quantizers, WHOLE, later=later, inputs=inputs), wanted)
    # Per step, gradients: but those with a scale per expert (nvfp4), blocks over experts (fp8_blockwise, 128 rows) and
    # blocks over gate and up (fp8_blockwise, 128 columns). One input of two layers and experts' rows, if they are kept
    # narrow. Weights of mxfp8, which have two copies.
    grads = {"mxfp8": 3, "nvfp4": 2, "fp8_blockwise": 1}[recipe]
    copies = 0 if not kept else {"mxfp8": 2, "nvfp4": 1, "fp8_blockwise": 1}[recipe]
    assert counted.calls == 2 * (grads + copies + (3 if recipe == "mxfp8" else 0))


@pytest.mark.parametrize("recipe", slow_except(TRAINED, "mxfp8"))
def test_the_kernel_in_layers(recipe: RecipeName) -> None:
    wanted, kernel = layer(recipe, operands.REFERENCE, WHOLE, steps=1), Counted(quantize_both_triton)
    quantizers = QUANTIZERS["triton"]._replace(quantize_both=kernel)
    with interpreting():
        assert same(layer(recipe, quantizers, WHOLE, inputs=NarrowInputs(), steps=1), wanted)
    assert kernel.calls


@pytest.mark.parametrize("recipe", TRAINED)
def test_rows_that_fill_no_block_are_cast_one_by_one(recipe: RecipeName) -> None:
    counted, unaligned = Counted(), [20, 0, 45]
    quantizers = operands.REFERENCE._replace(quantize_both=counted)
    found = layer(recipe, quantizers, unaligned, 70, inputs=NarrowInputs())
    assert same(found, layer(recipe, operands.REFERENCE, unaligned, 70))
    assert counted.calls == (6 if recipe == "mxfp8" else 0)


# Interpreted noise takes long.
WITHOUT_NOISE: tuple[RecipeName, ...] = ("mxfp8", "fp8_blockwise")


def drawn_layer(seed: int) -> None:
    """Experts without rows and with one, rows that fill blocks and that do not: interpreted kernels, all casts."""
    dice = random.Random(seed)
    rows = [dice.choice((0, 1, 20, 32, 64)) for _ in range(3)]
    tokens, recipe = dice.choice((1, 32, 40, 64)), dice.choice(WITHOUT_NOISE)
    wanted = layer(recipe, operands.REFERENCE, rows, tokens, steps=1)
    with interpreting():
        found = layer(recipe, QUANTIZERS["triton"], rows, tokens, inputs=NarrowInputs(), steps=1)
    assert same(found, wanted), (recipe, rows, tokens)


def test_a_drawn_layer() -> None:
    drawn_layer(1)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_fifty_drawn_layers(first: int) -> None:
    for seed in range(first, first + 10):
        drawn_layer(seed)


def test_amaxes_of_other_ranks_are_not_passed_over() -> None:
    """A scale that other ranks have a part in is found before, and the casts are two."""
    counted, reduced = Counted(), SharedAmaxes({"dy": lambda amax: 2 * amax})
    weight, found = nn.Parameter(spread(32, 32, seed=1)), []
    for quantizers in (operands.REFERENCE, operands.REFERENCE._replace(quantize_both=counted)):
        narrow = NarrowOperands(PRECISION_RECIPES["nvfp4"], NarrowWeights(), quantizers, SEED, amaxes=reduced)
        found.append(narrow.dgrad(spread(128, 32, seed=2), weight)[0])
    assert torch.equal(*found) and not counted.calls


def test_a_copy_is_of_the_tensor_as_it_was() -> None:
    """One that was changed, or died, has none; a copy that is taken waits no longer."""
    x, copies, cast = spread(32, 32, seed=1), WaitingCopies(), PAIRS["mxfp8 x"][0]
    copy = quantize_both_reference(x, cast, cast).column
    copies.put(x, copy)
    assert copies.get(x, cast) is copy and copies.get(x, PAIRS["nvfp4 x"][0]) is None
    assert copies.take(x, cast) is copy and copies.take(x, cast) is None
    copies.put(x, copy)
    x.mul_(2)
    assert copies.get(x, cast) is None
    copies.put(x, copy)
    del x
    assert not len(copies._copies)


def _swapped(x: Tensor, row: Cast, column: Cast, *, seed: int = 0) -> BothWays:
    """The columnwise copy has blocks along columns."""
    rowwise = quantize_both_reference(x, row, column, seed=seed).row
    values = operands.dequantize(rowwise)
    return BothWays(rowwise, quantize_both_reference(values, row, column, seed=seed).column)


def _one_scale(x: Tensor, row: Cast, column: Cast, *, seed: int = 0) -> BothWays:
    """Scales of the block before."""
    found = quantize_both_reference(x, row, column, seed=seed)
    return BothWays(found.row, replace(found.column, scale_rc=found.column.scale_rc.roll(1, -1)))


MUTANTS: dict[str, tuple[Callable[..., BothWays], str | None, Any, list[int]]] = {
    "narrowed along columns first": (_swapped, None, None, WHOLE),
    "the next block's scale": (_one_scale, None, None, WHOLE),
    "another seed": (
        lambda x, row, column, seed: quantize_both_reference(x, row, column, seed=seed + 1), None, None, WHOLE,
    ),
    "blocks over experts": (quantize_both_reference, "rows_are_whole", lambda *_: True, WHOLE),
}  # fmt: skip


# Noise is in nvfp4 alone; 64 rows of an expert end inside of a block of 128.
RECIPES_OF_MUTANTS: dict[str, RecipeName] = {"another seed": "nvfp4", "blocks over experts": "fp8_blockwise"}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_change_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, attribute, value, rows = MUTANTS[name]
    recipe = RECIPES_OF_MUTANTS.get(name, "mxfp8")
    wanted = layer(recipe, operands.REFERENCE, rows)
    if attribute is not None:
        monkeypatch.setattr(operands, attribute, value)
    assert not same(layer(recipe, operands.REFERENCE._replace(quantize_both=broken), rows), wanted)


def test_stale_copies_change_bits() -> None:
    """Of weights, inputs and gradients as they were in the step before."""
    first: dict[tuple[int, ...], BothWays] = {}

    def stale(x: Tensor, row: Cast, column: Cast, *, seed: int = 0) -> BothWays:
        return first.setdefault(tuple(x.shape), quantize_both_reference(x, row, column, seed=seed))

    found = layer("mxfp8", operands.REFERENCE._replace(quantize_both=stale), WHOLE)
    assert not same(found, layer("mxfp8", operands.REFERENCE, WHOLE))
