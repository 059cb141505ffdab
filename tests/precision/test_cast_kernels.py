"""Cast kernels, interpreted, have the bits of the reference: codes, scales and values; broken ones do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels are an extra")

import triton
import triton.language as tl
from tests.body.kernel_cases import poisoned_memory
from tests.body.kernel_memory import watching
from tests.precision.cast_draws import assert_same, draw, multiple_of

from moefold.config.casts import Cast
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.ops.kernels import interpret
from moefold.ops.kernels.interpret import interpreting
from moefold.precision.cast_kernels import cast_triton, narrow_numbers_triton
from moefold.precision.cast_kernels.cast_triton import fake_quantize_triton, quantize_triton
from moefold.precision.quantize import fake_quantize, quantize

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

_RECIPES = ("fp8_tensor", "fp8_blockwise", "mxfp8", "nvfp4")
_USED = [cast for name in _RECIPES for _, cast in PRECISION_RECIPES[name].casts.items() if cast is not None]
# Those of recipes, and rules that no recipe has.
CASTS = [
    *dict.fromkeys(_USED),
    Cast("e5m2", (1, 32), "e8m0_floor"),
    Cast("e4m3", (1, 128), "float32"),
    Cast("e4m3", (1, 32), "e8m0_rceil", rounding="stochastic"),
]
SEED = 2**63 + 5


def one_way(cast: Cast, seed: int) -> None:
    x = draw(seed, multiple_of(cast))
    amax = None
    if seed % 3 == 0 and (cast.block is None or cast.scale == "two_level"):
        amax = torch.full(x.shape[:-2], 3.0)
    with interpreting(), poisoned_memory():
        found = quantize_triton(x, cast, seed=SEED, amax=amax)
        values = fake_quantize_triton(x, cast, seed=SEED, amax=amax)
    expected = quantize(x, cast, seed=SEED, amax=amax)
    what = f"{cast} {tuple(x.shape)} {x.dtype}"
    assert_same(found.codes_MK, expected.codes_MK, f"codes of {what}")
    assert_same(found.scale_rc, expected.scale_rc, f"scales of {what}")
    if expected.tensor_scale is not None:
        assert found.tensor_scale is not None
        assert_same(found.tensor_scale, expected.tensor_scale, f"tensor scale of {what}")
    assert_same(values, fake_quantize(x, cast, seed=SEED, amax=amax), f"values of {what}")


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_one_way(cast: Cast) -> None:
    one_way(cast, 1)


def test_amaxes_are_given_for_stacks_of_stacks() -> None:
    """One per matrix, in the shape of the leading dims, or one for all of them."""
    x, cast = torch.randn(2, 3, 16, 32, generator=torch.Generator().manual_seed(1)), Cast("e4m3", None, "float32")
    for amax in (torch.rand(2, 3) + 1, torch.tensor(2.0)):
        with interpreting(), poisoned_memory():
            found = quantize_triton(x, cast, amax=amax)
        expected = quantize(x, cast, amax=amax.expand(2, 3))
        assert_same(found.codes_MK, expected.codes_MK, "codes")
        assert_same(found.scale_rc, expected.scale_rc, "scales")


@pytest.mark.nightly
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_one_way_on_fifty_shapes(cast: Cast) -> None:
    for seed in range(50):
        one_way(cast, seed)


def test_noise_of_a_whole_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="a hash of a block"):
        quantize_triton(torch.randn(4, 4), replace(CASTS[0], rounding="stochastic"))


def test_no_races_and_nothing_outside() -> None:
    """Every program writes its own places, and inside of its tensors."""
    x = torch.randn(2, 33, 48)
    with watching() as watch:
        quantize_triton(x, PRECISION_RECIPES["nvfp4"].casts.dy_wgrad)  # type: ignore[arg-type]
        fake_quantize_triton(x.mT, PRECISION_RECIPES["mxfp8"].casts.x_wgrad)  # type: ignore[arg-type]
    assert watch.launches == 3


# ---- broken kernels ----


@triton.jit
def _ties_away(scaled, ELEMENT: tl.constexpr):
    size = tl.abs(scaled)
    code = (size >= 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size >= 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size >= 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size >= 5.0).to(tl.int32)
    return (code + (scaled < 0).to(tl.int32) * 8).to(tl.uint8)


@triton.jit
def _floor(bits, ELEMENT: tl.constexpr, RULE: tl.constexpr):
    return tl.maximum(((bits >> 23) & 0xFF) - 8, 0)


@triton.jit
def _one_noise(x, amax, seed, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of the place in the block alone: every block is rounded by the same numbers."""
    place = tl.arange(0, x.shape[0])[:, None] * 0 + tl.arange(0, x.shape[1])[None, :] % COLUMNS
    return (place * 37 % 16).to(tl.float32) / 16


@triton.jit
def _no_nan(x):
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits >= 0x7F800000, 0, bits)


@triton.jit
def _unscaled_hadamard(x):
    """The transform in float32, without the rounding to bfloat16."""
    return x * 1.0


def _mx() -> None:
    one_way(PRECISION_RECIPES["mxfp8"].casts.x_fprop, 4)  # type: ignore[arg-type]


def _fp4(cast: Cast | None, x: Tensor) -> None:
    assert cast is not None
    with interpreting():
        found = quantize_triton(x, cast, seed=SEED)
    assert_same(found.codes_MK, quantize(x, cast, seed=SEED).codes_MK, str(cast))


NVFP4 = PRECISION_RECIPES["nvfp4"].casts
# Halves between numbers of E2M1: 6 * 448 is the matrix's amax, and every block has a 6.
TIES = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -1.25, -2.5, -5.0, 0.0, 1.0, 2.0, 4.0])
# What is broken, the module and name, what is there instead, and the comparison that must notice.
MUTANTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "ties away from zero": (
        narrow_numbers_triton, "to_codes", _ties_away, lambda: _fp4(NVFP4.x_fprop, TIES.repeat(4, 2)),
    ),
    "a carry is lost": (interpret, "_convert", interpret._plain_convert, _mx),
    "floor instead of rceil": (narrow_numbers_triton, "_e8m0", _floor, _mx),
    "one noise for all blocks": (
        narrow_numbers_triton, "block_noise", _one_noise, lambda: _fp4(NVFP4.dy_dgrad, torch.randn(8, 64)),
    ),
    "infinities are skipped": (
        narrow_numbers_triton, "magnitude_bits", _no_nan,
        lambda: _fp4(NVFP4.x_fprop, torch.tensor([[torch.inf, *range(31)]])),
    ),
    "no Hadamard transform": (
        cast_triton, "hadamard", _unscaled_hadamard, lambda: _fp4(NVFP4.x_wgrad, torch.randn(8, 64)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, broken, compare = MUTANTS[name]
    torch.manual_seed(0)
    compare()
    monkeypatch.setattr(module, attribute, broken)
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match="differ"):
        compare()


# ---- the interpreter ----


@triton.jit
def _convert(x, y, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(y + place, tl.load(x + place).to(y.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_interpreter_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    """Random bits: every exponent, infinities and NaN. Float8 saturates."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31 - 1, (2**14,), generator=generator).int().view(torch.float32)
    x[:6] = torch.tensor([1.99999, 1.0625, 1.1875, 448.0, 3.0e38, torch.inf])
    y, back = torch.empty(x.shape, dtype=dtype), torch.empty(x.shape)
    with interpreting():
        _convert[1,](x, y, N=x.numel())
        _convert[1,](y, back, N=x.numel())
    top = 57344.0 if dtype == torch.float8_e5m2 else torch.inf
    assert_same(y, x.clamp(-top, top).to(dtype), "narrowed")
    assert_same(back, y.float(), "widened")
