"""torch's narrow GEMMs: exact on a CPU where it has them; else operands are read back as the calls document them.

On fake CUDA tensors the calls are held to torch's own rules (`tests/gpu_lab/lab_cases.py`). Here stand-ins for them
read codes and scales entry by entry, by cuBLAS's formula for the order of scales, and multiply.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from tests.precision.test_code_operands import ROWS, SHAPES, Case, outcome
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from moefold.api.runs import load_run
from moefold.checks.kernels import experts_in_use
from moefold.config.loading import override
from moefold.config.precision_recipes import RecipeName
from moefold.errors import BackendError
from moefold.moe.moe_kernels import kernels_for
from moefold.nn import scaled_mm
from moefold.nn.matmul_kernels import GroupedMatmul, grouped, sequential
from moefold.nn.scaled_mm import SCALED_MM
from moefold.ops.backends import resolve
from moefold.ops.host_probe import probe_host

ON_CPU: tuple[RecipeName, ...] = ("fp8_tensor", "fp8_rowwise")
NAMES: tuple[RecipeName, ...] = (*ON_CPU, "fp8_blockwise", "mxfp8", "nvfp4")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def compare(case: Case, matmul: GroupedMatmul = sequential) -> None:
    """Products under scales of rows are bfloat16, and so are those of grouped GEMMs; gate and up may be two of them."""
    rounded = case.recipe == "fp8_rowwise" or matmul is grouped
    for got, wanted in zip(outcome(case, SCALED_MM, matmul), outcome(case, None, matmul), strict=True):
        assert got.shape == wanted.shape
        error = float((got - wanted).abs().max() / wanted.abs().max())
        assert error < (2.0**-7 if rounded else 2e-5), (case, error)


@pytest.mark.parametrize("experts", [False, True], ids=["linear", "experts"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("recipe", ON_CPU)
def test_torch_on_a_cpu(recipe: RecipeName, shape: tuple[int, ...], experts: bool) -> None:
    compare(Case(recipe, shape, ROWS["aligned"] if experts else None, kept=False))


# ---- stand-ins that read operands as the calls document them ----


def unswizzled(flat: Tensor, rows: int, columns: int) -> Tensor:
    """cuBLAS's 1D block scaling factors: in a tile of 128 x 4, entry (r, c) is at (r % 32) * 16 + (r // 32) * 4 + c."""
    tiles_across = -(-columns // 4)
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    tile = row // 128 * tiles_across + column // 4
    return flat.flatten()[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]


def codes_of(matrix: Tensor) -> Tensor:
    if matrix.dtype != torch.float4_e2m1fn_x2:
        return matrix.float()
    packed = matrix.view(torch.uint8)
    values = torch.empty(packed.shape[0], 2 * packed.shape[1])
    values[:, ::2], values[:, 1::2] = E2M1[(packed & 15).int()], E2M1[(packed >> 4).int()]
    return values


def values_of(matrix: Tensor, scales: list[Tensor], kinds: list[ScalingType], is_b: bool) -> Tensor:
    """[M, K]; B is given as its transpose."""
    values, kind = codes_of(matrix), kinds[0]
    rows, columns = values.shape
    if kind == ScalingType.TensorWise:
        return values * scales[0]
    if kind == ScalingType.RowWise:
        return values * (scales[0].t() if is_b else scales[0])
    if kind == ScalingType.BlockWise1x128:
        assert scales[0].stride(0) == 1 and (scales[0].stride(1) == rows or scales[0].shape[1] == 1)
        return values * scales[0][:, torch.arange(columns) // 128]
    if kind == ScalingType.BlockWise128x128:
        return values * scales[0].t()[torch.arange(rows) // 128][:, torch.arange(columns) // 128]
    block = 32 if kind == ScalingType.BlockWise1x32 else 16
    scale = unswizzled(scales[0].view(torch.uint8), rows, columns // block)
    if block == 32:
        decode = torch.exp2(scale.float() - 127)
    else:
        decode = scale.view(torch.float8_e4m3fn).float() * scales[1]
    return values * decode[:, torch.arange(columns) // block]


def stand_in(
    a: Tensor, b: Tensor, scale_a: list[Tensor], kind_a: list[ScalingType], scale_b: list[Tensor],
    kind_b: list[ScalingType], swizzle_a: list[SwizzleType], swizzle_b: list[SwizzleType], output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0 and a.stride(1) == 1 and b.stride(0) == 1
    tiled = {ScalingType.BlockWise1x16, ScalingType.BlockWise1x32}
    for kinds, swizzles in ((kind_a, swizzle_a), (kind_b, swizzle_b)):
        assert [each == SwizzleType.SWIZZLE_32_4_4 for each in swizzles] == [each in tiled for each in kinds]
    left, right = values_of(a, scale_a, kind_a, False), values_of(b.t(), scale_b, kind_b, True)
    return (left @ right.t()).to(output_dtype)


def grouped_stand_in(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Rows with experts' matrices, or columns with columns; scales of each expert are apart, in tiles of their own."""
    ends = [0, *offs.tolist()]
    mx = scale_a.dtype == torch.float8_e8m0fnu
    bytes_a, bytes_b = (
        each.view(torch.uint8).flatten(0 if each.dim() < 3 else 1) if mx else each for each in (scale_a, scale_b)
    )
    parts, place_a, place_b = [], 0, 0
    for expert, (first, end) in enumerate(pairwise(ends)):
        along_k = b.dim() == 2
        left, right = (a[:, first:end], b[first:end].t()) if along_k else (a[first:end], b[expert].t())
        blocks = -(-left.shape[1] // 32)
        if mx:
            size_a, size_b = (-(-len(each) // 128) * 128 * (-(-blocks // 4) * 4) for each in (left, right))
            of_b = bytes_b[place_b : place_b + size_b] if along_k else bytes_b.view(b.shape[0], -1)[expert]
            decode = [
                torch.exp2(unswizzled(flat, len(each), blocks).float() - 127)[:, torch.arange(each.shape[1]) // 32]
                for flat, each in ((bytes_a[place_a : place_a + size_a], left), (of_b, right))
            ]
            place_a, place_b = place_a + size_a, place_b + size_b
        else:
            of_a = scale_a.view(len(ends) - 1, -1)[expert] if along_k else scale_a[first:end]
            of_b = scale_b.view(len(ends) - 1, -1)[expert]
            decode = [of_a[:, None], of_b[:, None]]
        parts.append((left.float() * decode[0]) @ (right.float() * decode[1]).t())
    return (torch.stack(parts) if b.dim() == 2 else torch.cat(parts)).to(out_dtype)


@contextmanager
def stand_ins() -> Iterator[None]:
    with patch.object(scaled_mm.F, "scaled_mm", stand_in), patch.object(torch, "_scaled_grouped_mm", grouped_stand_in):
        yield


@pytest.mark.parametrize("kept", [False, True], ids=["wide inputs", "kept codes"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("recipe", NAMES)
def test_linear(recipe: RecipeName, shape: tuple[int, ...], kept: bool) -> None:
    with stand_ins():
        compare(Case(recipe, shape, None, kept and recipe != "fp8_rowwise"))


@pytest.mark.parametrize("matmul", [sequential, grouped])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("recipe", NAMES)
def test_experts(recipe: RecipeName, shape: tuple[int, ...], matmul: GroupedMatmul) -> None:
    with stand_ins():
        compare(Case(recipe, shape, ROWS["aligned"], kept=recipe == "mxfp8"), matmul)


def test_one_call_for_all_experts_where_there_is_one() -> None:
    for recipe, expected in (("mxfp8", 6), ("fp8_rowwise", 6), ("fp8_blockwise", 0)):
        with stand_ins(), patch.object(torch, "_scaled_grouped_mm", side_effect=grouped_stand_in) as calls:
            outcome(Case(recipe, (96, 64), ROWS["aligned"], False), SCALED_MM, grouped)  # type: ignore[arg-type]
        assert calls.call_count == expected, recipe


# ---- mutants ----


def not_swizzled(scale_rc: Tensor) -> Tensor:
    rows, columns = scale_rc.shape
    return torch.nn.functional.pad(scale_rc, (0, -columns % 4, 0, -rows % 128)).flatten()


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_scales_in_their_own_order_are_noticed(recipe: RecipeName) -> None:
    with stand_ins(), patch.object(scaled_mm, "swizzle_scales", not_swizzled), pytest.raises(AssertionError):
        compare(Case(recipe, (96, 64), None, False))


def test_scales_of_experts_that_share_tiles_are_noticed() -> None:
    def together(scales: list[Tensor]) -> Tensor:
        flat = scaled_mm.swizzle_scales(torch.cat(scales))
        return flat.view(-1, -(-scales[0].shape[1] // 4) * 4).view(torch.float8_e8m0fnu)

    case = Case("mxfp8", (96, 64), [32, 0, 64], False)
    with stand_ins():
        compare(case, grouped)
        with patch.object(scaled_mm, "blocked_rows", together), pytest.raises((AssertionError, IndexError)):
            compare(case, grouped)


# ---- what cannot run is refused ----


def test_recipes_that_a_cpu_has_no_gemm_for_are_refused() -> None:
    with pytest.raises(BackendError, match=r"scaled_mm cannot do narrow_gemm: takes fp8_tensor .* not mxfp8"):
        resolve("narrow_gemm", "scaled_mm", "cpu", probe_host(), "mxfp8")
    resolve("narrow_gemm", "scaled_mm", "cpu", probe_host(), "fp8_delayed")


def test_emulated_recipes_are_given_no_grouped_gemm_on_a_gpu() -> None:
    changes = {"precision.recipe": "mxfp8", "precision.compute": "bfloat16"}
    run = load_run("debug_small", changes | {"kernels.experts": "grouped"})
    with pytest.raises(BackendError, match=r"use kernels\.narrow_gemm scaled_mm, or kernels\.experts sequential"):
        kernels_for(run, "cuda")
    auto = load_run("debug_small", changes | {"kernels.experts": "auto"})
    assert experts_in_use(auto, "cuda") == "sequential"
    codes = override(auto, {"kernels.narrow_gemm": "scaled_mm", "kernels.row_padding": "permute"})
    assert experts_in_use(codes, "cuda") == "grouped"
