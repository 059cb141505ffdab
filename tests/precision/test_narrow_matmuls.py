"""Recipes on the matmul seam: their equations by loops, bands of gradient errors, and what must not change a bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import moefold
from moefold.blueprint.narrow_matmuls import matmuls
from moefold.config.casts import Cast
from moefold.config.precision_recipes import PRECISION_RECIPES, LinearCasts, PrecisionRecipe, RecipeName
from moefold.nn.matmul_kernels import grouped, sequential
from moefold.nn.matmul_policy import ParameterMatmul, WeightGradQueue
from moefold.ops.padded_runs import move_rows
from moefold.precision.amax import SharedAmaxes, amax_of
from moefold.precision.amax_history import AmaxHistory
from moefold.precision.cast_backends import QUANTIZERS
from moefold.precision.operands import NarrowOperands, NarrowWeights
from moefold.precision.quantize import HADAMARD_SIGNS, block_noise, quantize

TRAINED: tuple[RecipeName, ...] = ("bf16", "fp8_tensor", "fp8_delayed", "fp8_blockwise", "mxfp8", "nvfp4")

SEED = 41


def policy_for(
    recipe: PrecisionRecipe, weight_grads: WeightGradQueue | None = None, casts: str = "torch"
) -> ParameterMatmul:
    return ParameterMatmul(weight_grads, operands=NarrowOperands(recipe, NarrowWeights(), QUANTIZERS[casts], SEED))


# ---- the equation, block by block ----


def by_blocks(x_MK: Tensor, rows: int, columns: int, cast: Cast) -> Tensor:
    """Narrowed values by the text of a recipe: each block over its scale, in the element's format, times the scale."""
    top = {"e4m3": 448.0, "e5m2": 57344.0}[cast.element]
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[cast.element]
    out = torch.empty_like(x_MK)
    for i in range(0, x_MK.shape[0], rows):
        for j in range(0, x_MK.shape[1], columns):
            block = x_MK[i : i + rows, j : j + columns]
            scale = float(block.abs().max()) / top
            if cast.scale == "float32":
                # Transformer Engine multiplies by top / amax in float32, and keeps the inverse of that.
                encode = torch.tensor(top) / block.abs().max()
                out[i : i + rows, j : j + columns] = (block * encode).to(dtype).float() * (1.0 / encode)
                continue
            scale = 2.0 ** torch.tensor(scale).double().log2().ceil().item()
            out[i : i + rows, j : j + columns] = (block / scale).to(dtype).float() * scale
    return out


def expected(x_TX: Tensor, w_YX: Tensor, dy_TY: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Y, dX and dW as section 3.3 of DeepSeek-V3's report (1x128, 128x128), the OCP MX format (1x32) and scales per
    tensor with E5M2 gradients say it."""
    t, x = x_TX.shape
    y = w_YX.shape[0]
    e4m3, e5m2 = PRECISION_RECIPES[name].casts.x_fprop, PRECISION_RECIPES[name].casts.dy_dgrad  # type: ignore[index]
    assert e4m3 is not None and e5m2 is not None
    size = {"fp8_blockwise": 128, "mxfp8": 32}.get(name)
    row = (1, size) if size else None
    weight = (128, 128) if name == "fp8_blockwise" else row
    fprop = by_blocks(x_TX, *(row or (t, x)), e4m3) @ by_blocks(w_YX, *(weight or (y, x)), e4m3).t()
    dgrad = by_blocks(dy_TY, *(row or (t, y)), e5m2) @ by_blocks(w_YX.t(), *(weight or (x, y)), e4m3).t()
    wgrad = by_blocks(dy_TY.t(), *(row or (y, t)), e5m2) @ by_blocks(x_TX.t(), *(row or (x, t)), e4m3).t()
    return fprop, dgrad, wgrad


E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


def nvfp4(x_MK: Tensor, rows: int, hadamard: bool, seed: int | None) -> Tensor:
    """The NVFP4 pretraining report's two scales: S = 6 * 448 / amax of the matrix, and per block of ``rows`` x 16 the
    E4M3 number nearest to amax_b * S / 6. Values to the nearest of E2M1, even codes on ties, or up with the probability
    of the distance from below, by ``block_noise``, which is written out in test_quantize.py."""
    if hadamard:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < 16:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        signed = torch.tensor(HADAMARD_SIGNS)[:, None] * matrix / 4
        x_MK = (x_MK.double().unflatten(-1, (-1, 16)) @ signed).flatten(-2).bfloat16().float()
    # In float32, as Transformer Engine multiplies: ratios of bfloat16 numbers are ties now and then.
    whole, out = torch.tensor(6 * 448.0) / x_MK.abs().max(), torch.empty_like(x_MK)
    sixth = whole * (torch.tensor(1.0) / 6)
    for i in range(0, x_MK.shape[0], rows):
        for j in range(0, x_MK.shape[1], 16):
            block = x_MK[i : i + rows, j : j + 16]
            scale = (block.abs().max() * sixth).to(torch.float8_e4m3fn).float() * (1 / whole)
            size = (block.abs() * (1 / scale)).clamp(max=6)
            below = (size[..., None] >= E2M1).sum(-1) - 1
            low, high = E2M1[below], E2M1[(below + 1).clamp(max=7)]
            share = ((size - low) / (high - low).clamp(min=0.1)).nan_to_num()
            if seed is None:
                up = (share > 0.5) | ((share == 0.5) & (below % 2 == 1))
            else:
                up = share + block_noise(block[:, None, :], seed)[:, 0] >= 1
            out[i : i + rows, j : j + 16] = torch.where(up, high, low) * scale * block.sign()
    return out


def expected_nvfp4(x_TX: Tensor, w_YX: Tensor, dy_TY: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weight = nvfp4(w_YX, 16, False, None)
    fprop = nvfp4(x_TX, 1, False, None) @ weight.t()
    dgrad = nvfp4(dy_TY, 1, False, SEED) @ weight
    return fprop, dgrad, nvfp4(dy_TY.t(), 1, True, SEED) @ nvfp4(x_TX.t(), 1, True, None).t()


def spread(*shape: int, seed: int) -> Tensor:
    """Rows and columns of very different sizes, so that another block or direction has other bits."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [torch.exp2(torch.randint(-12, 12, (count,), generator=generator).float()) for count in shape]
    return torch.randn(shape, generator=generator) * sizes[0][:, None] * sizes[1]


def distances(recipe: PrecisionRecipe, name: RecipeName) -> list[float]:
    """Of Y, dX and dW from what the recipe of this name says; equal operands may be summed in another order."""
    x, weight, dy = spread(192, 256, seed=0), spread(160, 256, seed=1), spread(192, 160, seed=2)
    if name == "nvfp4":
        # One scale of the matrix allows fewer octaves; in bfloat16, the transform's sums are exact in every order.
        x, weight, dy = (
            torch.randn(each.shape, generator=torch.Generator().manual_seed(each.shape[0] + each.shape[1]))
            .bfloat16()
            .float()
            for each in (x, weight, dy)
        )
    x, weight = x.requires_grad_(), nn.Parameter(weight)
    y = policy_for(recipe).linear(x, weight)
    y.backward(dy)
    assert x.grad is not None and weight.grad is not None
    inputs = (x.detach(), weight.detach(), dy)
    wanted_three = expected_nvfp4(*inputs) if name == "nvfp4" else expected(*inputs, name)
    pairs = zip((y, x.grad, weight.grad), wanted_three, strict=True)
    return [float((found - wanted).abs().max() / wanted.abs().max()) for found, wanted in pairs]


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_blockwise", "mxfp8", "nvfp4"])
def test_the_three_matmuls_are_the_recipes_equations(name: RecipeName) -> None:
    assert max(distances(PRECISION_RECIPES[name], name)) < 1e-6


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("matmul", [sequential, grouped], ids=["sequential", "grouped"])
def test_experts_are_linear_layers_of_their_rows(name: RecipeName, matmul: object) -> None:
    """Rows of an expert do not reach the scales of another; an expert without rows has a gradient of zero."""
    if name == "fp8_delayed":
        pytest.skip("scales are those of the rows of all experts: test_amax_history.py")
    rows, counts = spread(96, 64, seed=3).requires_grad_(), [33, 0, 1, 62]
    weight, dy = nn.Parameter(torch.stack([spread(48, 64, seed=seed) for seed in range(4)])), spread(96, 48, seed=9)
    policy = policy_for(PRECISION_RECIPES[name])
    policy.grouped(matmul, rows, weight, torch.tensor(counts), counts).backward(dy)  # type: ignore[arg-type]
    assert weight.grad is not None and rows.grad is not None
    for expert, (part, grad) in enumerate(zip(rows.detach().split(counts), dy.split(counts), strict=True)):
        alone, its_rows = nn.Parameter(weight.detach()[expert].clone()), part.clone().requires_grad_()
        if not len(part):
            assert not weight.grad[expert].any()
            continue
        policy_for(PRECISION_RECIPES[name]).linear(its_rows, alone).backward(grad)
        assert its_rows.grad is not None and alone.grad is not None
        start = sum(counts[:expert])
        assert torch.allclose(rows.grad[start : start + len(part)], its_rows.grad, rtol=1e-5, atol=1e-6)
        assert torch.allclose(weight.grad[expert], alone.grad, rtol=1e-5, atol=1e-4)


def per_token(x_TX: Tensor) -> Tensor:
    """MegaScale-MoE's 1 x h quantisation, token by token: over its own largest magnitude, as E4M3."""
    out = torch.empty_like(x_TX)
    for token, row in enumerate(x_TX):
        encode = torch.tensor(448.0) / row.abs().max()
        out[token] = (row * encode).to(torch.float8_e4m3fn).float() * (1.0 / encode)
    return out


@pytest.mark.parametrize("casts", ["torch", "native"])
@pytest.mark.parametrize("mutant", ["", "the recipe's scale", "blocks of 128"])
def test_down_projections_may_read_a_scale_per_token(mutant: str, casts: str) -> None:
    """Of fp8_tensor: fprop alone has another operand, and experts' rows have no more to do with each other."""
    run = moefold.load_run("debug_mla", {"precision.recipe": "fp8_tensor", "precision.down_input": "per_token"})
    by_name = {matmul.weight.name.rpartition(".")[2]: matmul.casts for matmul in matmuls(run)}
    down, recipe = by_name["down"], PRECISION_RECIPES["fp8_tensor"]
    assert down is not None and by_name["gate_up"] == by_name["weight"] == recipe.casts
    assert str(down.x_fprop) == "e4m3 1xrow float32" and replace(down, x_fprop=recipe.casts.x_fprop) == recipe.casts
    wrong = {"the recipe's scale": recipe.casts.x_fprop, "blocks of 128": replace(down.x_fprop, block=(1, 128))}  # type: ignore[type-var]
    down = replace(down, x_fprop=wrong.get(mutant, down.x_fprop))
    hidden, counts = spread(70, 256, seed=3), [40, 0, 30]
    weight = torch.stack([spread(48, 256, seed=seed) for seed in range(3)])
    policy = policy_for(replace(recipe, casts=down), casts=casts)
    found = policy.grouped(sequential, hidden, nn.Parameter(weight), torch.tensor(counts), counts)
    parts = zip(per_token(hidden).split(counts), weight, strict=True)
    wanted = torch.cat([part @ by_blocks(each, 48, 256, recipe.casts.w_fprop).t() for part, each in parts])  # type: ignore[arg-type]
    distance = float((found - wanted).abs().max() / wanted.abs().max())
    assert (distance < 1e-6) == (not mutant), distance


# ---- what must not change a bit ----


def gradients_of(policy: ParameterMatmul, queue: WeightGradQueue | None = None) -> list[Tensor]:
    x, rows = spread(64, 96, seed=4).requires_grad_(), spread(64, 96, seed=5).requires_grad_()
    dense, experts = nn.Parameter(spread(80, 96, seed=6)), nn.Parameter(spread(3 * 32, 96, seed=7).view(3, 32, 96))
    counts = [20, 13, 31]
    y = policy.linear(x, dense).sum() + policy.grouped(sequential, rows, experts, torch.tensor(counts), counts).sum()
    if queue is None:
        y.backward()
    else:
        with queue.deferring("later"):
            y.backward()
        assert dense.grad is None
        queue.run_all()
    found = [x.grad, rows.grad, dense.grad, experts.grad]
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("name", TRAINED)
def test_deferred_weight_gradients_and_native_casts_have_the_same_bits(name: RecipeName) -> None:
    recipe, queue = PRECISION_RECIPES[name], WeightGradQueue()
    plain = gradients_of(policy_for(recipe))
    deferred = gradients_of(policy_for(recipe, queue), queue)
    native = gradients_of(policy_for(recipe, casts="native"))
    assert len(plain) == 4
    for one, two, three in zip(plain, deferred, native, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_padding_is_zeros_between_experts() -> None:
    rows = torch.arange(1.0, 6.0)[:, None]
    assert move_rows(rows, [2, 0, 3], [4, 0, 4])[:, 0].tolist() == [1, 2, 0, 0, 3, 4, 5, 0]


def test_weights_are_narrowed_once_and_again_when_they_change() -> None:
    recipe, calls = PRECISION_RECIPES["mxfp8"], []
    quantizers = QUANTIZERS["torch"]
    counting = quantizers._replace(
        quantize=lambda *args, **kwargs: calls.append(args) or quantizers.quantize(*args, **kwargs)
    )
    weights = NarrowWeights()
    policy = ParameterMatmul(operands=NarrowOperands(recipe, weights, counting))
    weight, x = nn.Parameter(spread(32, 64, seed=1)), spread(8, 64, seed=2).requires_grad_()
    before = policy.linear(x, weight)
    before.sum().backward()
    policy.linear(x, weight).sum().backward()
    assert len(calls) == 2  # for fprop and for dgrad
    with torch.no_grad():
        weight.mul_(3)
    tripled = policy.linear(x, weight)
    assert float((tripled - 3 * before).norm() / tripled.norm()) < 0.1 and len(calls) == 3
    weights.forget()
    policy.linear(x, weight)
    assert len(calls) == 4


@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4"])
@pytest.mark.parametrize("casts", ["torch", "native"])
def test_parts_of_a_matrix_that_agree_on_the_amax_have_the_bits_of_the_whole(name: RecipeName, casts: str) -> None:
    """The weight and the input are cut by columns, in two parts that end where a block does."""
    x, weight = spread(32, 128, seed=1), spread(32, 128, seed=2)
    right = PRECISION_RECIPES[name]
    recipe, quantizers = replace(right, casts=replace(right.casts, dy_dgrad=None, dy_wgrad=None)), QUANTIZERS[casts]
    whole = NarrowOperands(recipe, NarrowWeights(), quantizers).fprop(x, weight)
    assert right.casts.x_fprop is not None and right.casts.w_fprop is not None
    amaxes = {"x": amax_of(x, right.casts.x_fprop), "w": amax_of(weight, right.casts.w_fprop)}
    for part in (slice(0, 64), slice(64, 128)):
        # Instead of a collective: the amax of all parts.
        shared = SharedAmaxes({"x": lambda _: amaxes["x"][None], "w": lambda _: amaxes["w"]})
        parts = NarrowOperands(recipe, NarrowWeights(), quantizers, amaxes=shared).fprop(x[:, part], weight[:, part])
        alone = NarrowOperands(recipe, NarrowWeights(), quantizers).fprop(x[:, part], weight[:, part])
        assert all(torch.equal(one, both[:, part]) for one, both in zip(parts, whole, strict=True))
        assert not all(torch.equal(one, both[:, part]) for one, both in zip(alone, whole, strict=True)) or part.start


@pytest.mark.parametrize("hadamard", [False, True])
def test_an_amax_is_that_of_the_cast(hadamard: bool) -> None:
    x, cast = spread(16, 64, seed=3), Cast("e2m1", (1, 16), "two_level", hadamard)
    assert torch.equal(quantize(x, cast).codes_MK, quantize(x, cast, amax=amax_of(x, cast)).codes_MK)
    assert (
        amax_of(x[:0], cast) == 0 and amax_of(torch.tensor([[1.0, torch.inf]]), replace(cast, hadamard=False)).isnan()
    )


# ---- whole models: relative errors of all gradients at equal weights, against float32 ----

# Measured; a band of 4 % on both sides. The dense and the MLA model have experts in every layer.
ERRORS: dict[str, dict[RecipeName, float]] = {
    "debug_small": {
        "bf16": 0.00675,
        "fp8_tensor": 0.0979,
        "fp8_delayed": 0.0934,
        "fp8_blockwise": 0.0803,
        "mxfp8": 0.0804,
        "nvfp4": 0.309,
    },
    "debug_mla": {
        "bf16": 0.00691,
        "fp8_tensor": 0.0490,
        "fp8_delayed": 0.0489,
        "fp8_blockwise": 0.0424,
        "mxfp8": 0.0424,
        "nvfp4": 0.159,
    },
}
BAND = 0.04


@cache
def gradients(name: str, recipe: RecipeName | None) -> dict[str, Tensor]:
    run = moefold.load_run(name, {"precision.recipe": recipe, "kernels.casts": "native", "kernels.experts": "grouped"})
    model, generator = moefold.build_model(run), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, run.model.vocab_size, (4, 129), generator=generator)
    if recipe == "fp8_delayed":
        # A step before, on other tokens and equal weights.
        others = torch.randint(0, run.model.vocab_size, (4, 129), generator=generator)
        before = model(others[:, :-1], others[:, 1:]).loss
        assert before is not None
        before.backward()
        model.zero_grad()
        for module in model.modules():
            if isinstance(module, AmaxHistory):
                module.push(module.noted())
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    assert loss is not None
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def relative_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    squares = sum(float((found[name] - grad).double().square().sum()) for name, grad in wanted.items())
    return float((squares / sum(float(grad.double().square().sum()) for grad in wanted.values())) ** 0.5)


def is_within_band(name: str, recipe: RecipeName, error: float) -> bool:
    return abs(error / ERRORS[name][recipe] - 1) < BAND


@pytest.mark.parametrize("name", list(ERRORS))
@pytest.mark.parametrize("recipe", TRAINED)
def test_gradient_errors_lie_in_their_bands(name: str, recipe: RecipeName) -> None:
    error = relative_error(gradients(name, recipe), gradients(name, None))
    assert is_within_band(name, recipe, error), error


def nvfp4_mutants() -> dict[str, LinearCasts]:
    right = PRECISION_RECIPES["nvfp4"].casts
    x, w, dy = right.x_wgrad, right.w_fprop, right.dy_wgrad
    assert x is not None and w is not None and dy is not None
    changed: dict[str, dict[str, Cast | None]] = {
        "Hadamard on dY only": {"x_wgrad": replace(x, hadamard=False)},
        "Hadamard on X only": {"dy_wgrad": replace(dy, hadamard=False)},
        "no Hadamard": {"x_wgrad": replace(x, hadamard=False), "dy_wgrad": replace(dy, hadamard=False)},
        "gradients rounded to nearest in dgrad": {"dy_dgrad": right.x_fprop},
        "gradients rounded to nearest in wgrad": {"dy_wgrad": replace(dy, rounding="nearest")},
        "activations rounded stochastically": {"x_wgrad": replace(x, rounding="stochastic")},
        "weights in rows": {"w_fprop": replace(w, block=(1, 16)), "w_dgrad": replace(w, block=(1, 16))},
        "blocks of 32": {"x_fprop": replace(x, hadamard=False, block=(1, 32))},
        "MXFP4's scales": {"x_fprop": Cast("e2m1", (1, 32), "e8m0_rceil")},
    }
    changed |= {f"{operand} stays wide": {operand: None} for operand, _ in right.items()}
    return {name: replace(right, **fields) for name, fields in changed.items()}


@pytest.mark.parametrize("mutant", list(nvfp4_mutants()))
def test_the_equations_of_nvfp4_catch(mutant: str) -> None:
    wrong = replace(PRECISION_RECIPES["nvfp4"], casts=nvfp4_mutants()[mutant])
    assert max(distances(wrong, "nvfp4")) > 1e-3


def test_stochastic_rounding_does_not_depend_on_the_order_of_rows() -> None:
    """Nor on which rank has them: dX of a row is what it was. The mutant that numbers rows where they lie fails."""
    policy, generator = policy_for(PRECISION_RECIPES["nvfp4"]), torch.Generator().manual_seed(1)
    weight, dy = nn.Parameter(torch.randn(64, 32, generator=generator)), torch.randn(48, 64, generator=generator)
    order = torch.randperm(48, generator=generator)
    first, second = (policy.operands.dgrad(each, weight)[0] for each in (dy, dy[order]))
    assert torch.equal(first[order], second)
    other = NarrowOperands(PRECISION_RECIPES["nvfp4"], NarrowWeights(), seed=SEED + 1).dgrad(dy, weight)[0]
    assert 0.2 < float((other != first).float().mean()) < 0.8


def mutants() -> dict[str, LinearCasts]:
    """Of mxfp8."""
    right = PRECISION_RECIPES["mxfp8"].casts
    assert right.x_fprop is not None
    wide_range, four_bits = replace(right.x_fprop, element="e5m2"), replace(right.x_fprop, element="e2m1")
    floor, longer = replace(right.x_fprop, scale="e8m0_floor"), replace(right.x_fprop, block=(1, 64))
    changed = {"e5m2 in fprop": {"x_fprop": wide_range, "w_fprop": wide_range}}
    changed["MXFP4"] = dict.fromkeys(dict(right.items()), four_bits)
    changed |= {f"{operand} stays wide": {operand: None} for operand, _ in right.items()}
    changed |= {f"{operand} has blocks of 64": {operand: longer} for operand, _ in right.items()}
    changed |= {f"{operand} has a scale rounded down": {operand: floor} for operand, _ in right.items()}
    changed |= {
        f"{operand} has blocks the other way": {operand: replace(longer, block=(32, 1))} for operand, _ in right.items()
    }
    return {name: replace(right, **fields) for name, fields in changed.items()}


@pytest.mark.parametrize("mutant", list(mutants()))
def test_the_equations_catch(mutant: str) -> None:
    assert max(distances(replace(PRECISION_RECIPES["mxfp8"], casts=mutants()[mutant]), "mxfp8")) > 1e-6


@pytest.mark.parametrize(
    "mutant", ["e5m2 in fprop", "MXFP4", "x_fprop stays wide", "w_fprop stays wide", "dy_dgrad stays wide"]
)
def test_bands_catch(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(PRECISION_RECIPES["mxfp8"], casts=mutants()[mutant])
    monkeypatch.setitem(PRECISION_RECIPES, "mxfp8", wrong)
    error = relative_error(gradients.__wrapped__("debug_small", "mxfp8"), gradients("debug_small", None))
    assert not is_within_band("debug_small", "mxfp8", error), error


def test_the_page_has_the_measured_errors() -> None:
    page = (Path(__file__).parents[2] / "docs/precision.md").read_text()
    for recipe in TRAINED:
        small, mla = (ERRORS[name][recipe] for name in ("debug_small", "debug_mla"))
        assert f"| `{recipe}` | {small:.3g} | {mla:.3g} |" in page.replace("0.0490 |", "0.049 |")


# ---- which matmuls ----


def test_what_stays_wide() -> None:
    run = moefold.load_run(
        "qwen3_30b_a3b_proxy", {"precision.recipe": "mxfp8", "precision.wide": ["layers.0.*", "*.out"]}
    )
    found = {matmul.weight.name: matmul.casts for matmul in matmuls(run)}
    assert found["layers.1.attention.q.weight"] == PRECISION_RECIPES["mxfp8"].casts
    assert found["layers.1.feed_forward.experts.down"] is not None
    assert found["layers.0.attention.q.weight"] is None and found["layers.1.attention.out.weight"] is None
    assert not [name for name in found if "router" in name or "head" in name or "norm" in name or "embedding" in name]
