"""Operands as codes: values and gradients have the bits of the operands that are widened before the matmul."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from moefold.config.precision_recipes import PRECISION_RECIPES, RecipeName
from moefold.nn.matmul_kernels import TORCH_LINEAR, GroupedMatmul, grouped, grouped_kernels, sequential
from moefold.nn.matmul_policy import ParameterMatmul, WeightGradQueue
from moefold.nn.narrow_gemms import EMULATED, NarrowGemm, grouped_maker, linear_kernels
from moefold.precision.code_operands import CodeOperands, CodeWeights, split_columns
from moefold.precision.narrow_inputs import NarrowInputs
from moefold.precision.operands import NarrowOperands, NarrowWeights, Operands
from moefold.precision.quantize import quantize

NAMES: tuple[RecipeName, ...] = ("fp8_tensor", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4")
# The last has matrices whose rows end inside of a block.
SHAPES = {"one matrix": (96, 192), "gate and up": (2, 128, 64), "cut blocks": (2, 40, 72)}
ROWS = {"aligned": [128, 0, 256], "ragged": [5, 0, 131]}


@dataclass(frozen=True)
class Case:
    recipe: RecipeName
    shape: tuple[int, ...]
    rows: list[int] | None
    kept: bool
    deferred: bool = False


def policy_of(operands: Operands, gemm: NarrowGemm | None, queue: WeightGradQueue | None) -> ParameterMatmul:
    if gemm is None:
        return ParameterMatmul(queue, TORCH_LINEAR, operands=operands, grouped=grouped_kernels)
    return ParameterMatmul(queue, linear_kernels(gemm), operands=operands, grouped=grouped_maker(gemm))


def uneven(x: Tensor) -> Tensor:
    """Neighbouring blocks have other magnitudes, and so other scales, in both directions and in stacked matrices."""
    flat = x.reshape(-1, x.shape[-1])
    rows, columns = torch.arange(len(flat))[:, None] // 32, torch.arange(flat.shape[1])[None, :] // 32
    return (flat * torch.exp2(((rows * 3 + columns) % 7 - 3).float())).view(x.shape)


def outcome(case: Case, gemm: NarrowGemm | None, matmul: GroupedMatmul = sequential) -> list[Tensor]:
    """Output, gradient of the input, gradient of the weight, twice: the second time from kept codes."""
    torch.manual_seed(7)
    recipe, inputs = PRECISION_RECIPES[case.recipe], NarrowInputs() if case.kept else None
    queue = WeightGradQueue() if case.deferred else None
    if gemm is None:
        policy = policy_of(NarrowOperands(recipe, NarrowWeights(), seed=3, inputs=inputs), None, queue)
    else:
        policy = policy_of(CodeOperands(recipe, CodeWeights(), seed=3, inputs=inputs), gemm, queue)
    experts = () if case.rows is None else (len(case.rows),)
    weight = nn.Parameter(uneven(torch.randn(*experts, *case.shape) / 8))
    found = []
    for _ in range(2):
        weight.grad = None
        lead = (3, 32) if case.rows is None else (sum(case.rows),)
        x = uneven(torch.randn(*lead, case.shape[-1])).requires_grad_()
        if case.rows is None:
            out = policy.linear(x, weight)
        else:
            out = policy.grouped(matmul, x, weight, torch.tensor(case.rows), case.rows)
        if queue is None:
            out.backward(uneven(torch.randn_like(out)))
        else:
            with queue.deferring("microbatch"):
                out.backward(uneven(torch.randn_like(out)))
            queue.run_all()
        assert x.grad is not None and weight.grad is not None
        found += [out.detach(), x.grad, weight.grad]
    return found


def assert_equal(case: Case, gemm: NarrowGemm = EMULATED, matmul: GroupedMatmul = sequential) -> None:
    names = ("output", "gradient of the input", "gradient of the weight")
    for name, got, wanted in zip(names * 2, outcome(case, gemm, matmul), outcome(case, None, matmul), strict=True):
        # Products of stacked matrices are summed one by one, in another order than those of one matrix.
        assert got.shape == wanted.shape and torch.isfinite(got).all()
        assert torch.allclose(got, wanted, rtol=2e-5, atol=2e-5 * float(wanted.abs().max())), (name, case)


@pytest.mark.parametrize("kept", [False, True], ids=["wide inputs", "kept codes"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("recipe", NAMES)
def test_linear(recipe: RecipeName, shape: tuple[int, ...], kept: bool) -> None:
    if recipe == "fp8_rowwise" and kept:
        pytest.skip("a scale per row of all tokens is not kept narrow")
    assert_equal(Case(recipe, shape, None, kept))


@pytest.mark.parametrize("kept", [False, True], ids=["wide inputs", "kept codes"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("recipe", NAMES)
def test_experts(recipe: RecipeName, shape: tuple[int, ...], rows: list[int], kept: bool) -> None:
    if recipe == "fp8_rowwise" and kept:
        pytest.skip("a scale per row of all tokens is not kept narrow")
    assert_equal(Case(recipe, shape, rows, kept))


@pytest.mark.parametrize("recipe", NAMES)
def test_deferred_weight_gradients(recipe: RecipeName) -> None:
    assert_equal(Case(recipe, (2, 128, 64), None, kept=recipe != "fp8_rowwise", deferred=True))
    assert_equal(
        Case(recipe, (2, 128, 64), ROWS["aligned"], kept=recipe != "fp8_rowwise", deferred=True), matmul=grouped
    )


@pytest.mark.parametrize("recipe", NAMES)
def test_a_weight_is_laid_out_once_and_again_when_it_changes(recipe: RecipeName) -> None:
    casts, weights = PRECISION_RECIPES[recipe].casts, CodeWeights()
    operands, weight = CodeOperands(PRECISION_RECIPES[recipe], weights), nn.Parameter(torch.randn(2, 128, 64))
    x = torch.randn(4, 64)
    first, second = operands.fprop(x, weight)[1], operands.fprop(x, weight)[1]
    assert all(a.codes_MK.data_ptr() == b.codes_MK.data_ptr() for a, b in zip(first, second, strict=True))
    assert casts.w_fprop is not None
    with torch.no_grad():
        weight.mul_(3)
    expected = quantize(weight.detach(), casts.w_fprop)
    changed = torch.cat([each.codes_MK[0] for each in operands.fprop(x, weight)[1]])
    assert torch.equal(changed.view(torch.uint8), expected.codes_MK.flatten(0, 1).view(torch.uint8))
    held = sum(copy.nbytes for copy in weights.copies())
    operands.dgrad(torch.randn(4, 256), weight)
    assert sum(copy.nbytes for copy in weights.copies()) >= held + weight.numel() * (0 if casts.w_dgrad is None else 1)
    weights.forget()
    assert not list(weights.copies())


def test_columns_are_split_where_blocks_end() -> None:
    cast = PRECISION_RECIPES["mxfp8"].casts.x_wgrad
    assert cast is not None
    with pytest.raises(AssertionError, match="cut blocks"):
        split_columns(quantize(torch.randn(4, 64), cast), [16, 48])
