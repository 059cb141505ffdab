"""Transformer Engine's narrow GEMMs against a fake of them: values and gradients of the emulated matmuls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.engines import fake_te_gemm, fake_te_storage
from tests.precision.test_code_operands import ROWS, SHAPES, Case, outcome

from moefold.config.precision_recipes import PRECISION_RECIPES, RecipeName
from moefold.errors import BackendError
from moefold.nn import te_narrow_gemm
from moefold.nn.matmul_kernels import grouped, sequential
from moefold.nn.te_narrow_gemm import TE_GEMM, storage
from moefold.precision.quantize import dequantize, quantize

NAMES: tuple[RecipeName, ...] = ("fp8_tensor", "fp8_blockwise", "mxfp8", "nvfp4")


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules = {
        "transformer_engine_gemm": fake_te_gemm.fake_te_gemm(),
        "transformer_engine_storage": fake_te_storage.fake_te_storage(),
    }
    monkeypatch.setattr(te_narrow_gemm, "load_engine", modules.__getitem__)
    yield


@pytest.mark.parametrize("experts", [False, True], ids=["linear", "experts"])
@pytest.mark.parametrize("kept", [False, True], ids=["wide inputs", "kept codes"])
@pytest.mark.parametrize("shape", ["one matrix", "gate and up"])
@pytest.mark.parametrize("recipe", NAMES)
def test_values_and_gradients(recipe: RecipeName, shape: str, kept: bool, experts: bool) -> None:
    case = Case(recipe, SHAPES[shape], ROWS["aligned"] if experts else None, kept)
    for matmul in (grouped, sequential) if experts else (sequential,):
        for got, wanted in zip(outcome(case, TE_GEMM, matmul), outcome(case, None, matmul), strict=True):
            assert torch.allclose(got, wanted, rtol=2e-5, atol=2e-5 * float(wanted.abs().max())), case


@pytest.mark.parametrize("recipe", NAMES)
def test_storages_stand_for_the_values_of_the_codes(recipe: RecipeName) -> None:
    for name, cast in PRECISION_RECIPES[recipe].casts.items():
        assert cast is not None
        matrix = quantize(torch.randn(160, 192) * torch.exp2(torch.randint(-6, 6, (160, 1))), cast)
        wanted = dequantize(matrix)
        # NVFP4's scale of the matrix is rounded once more on the way to an amax and back.
        found = storage(matrix)
        assert isinstance(found, fake_te_storage.Storage)
        assert torch.allclose(found.values(), wanted, rtol=3e-7 if recipe == "nvfp4" else 0, atol=0), name


def test_matrices_of_other_sizes_are_refused() -> None:
    cast = PRECISION_RECIPES["mxfp8"].casts.x_fprop
    assert cast is not None
    with pytest.raises(BackendError, match="in multiples of 32, not 40 x 64; use scaled_mm"):
        storage(quantize(torch.randn(40, 64), cast))
    with pytest.raises(BackendError, match="not 64 x 40"):
        storage(quantize(torch.randn(64, 40), cast))
