"""Permute, pad and narrow in one pass: the bits of the steps one after the other; experts that use it, and where its
codes become codes along tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.body.model_inputs import batch_of, fill
from torch import Tensor, nn

pytest.importorskip("triton", reason="kernels are an extra")

import triton
import triton.language as tl
from tests.body.kernel_cases import counting_bytes, poisoned_memory
from tests.body.kernel_memory import watching
from tests.precision.cast_draws import ROW_CASTS, assert_same

import moefold
from moefold.config.casts import Cast
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.narrow_modules import narrow_modules
from moefold.moe.dispatch.base import LocalDispatcher, Routing, row_codecs
from moefold.moe.experts import Experts
from moefold.moe.grouped_experts import NarrowingPermutation
from moefold.moe.kernels import moe_references, permute_cast_triton, permute_triton, row_map_triton
from moefold.moe.kernels.moe_references import RowMap, map_padded, map_rows
from moefold.moe.moe_kernels import MOE_IN_TORCH, MoEKernels
from moefold.ops.kernels.interpret import interpreting
from moefold.precision import cast_backends
from moefold.precision.amax import OWN_AMAXES
from moefold.precision.both_directions import WaitingCopies, quantize_both_reference, requantize_reference
from moefold.precision.cast_kernels.narrow_numbers_triton import cast_tile
from moefold.precision.narrow_inputs import NarrowInputs
from moefold.precision.operands import REFERENCE, NarrowOperands, NarrowWeights, Quantizers
from moefold.precision.quantize import Quantized, fake_quantize, quantize

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EXPERTS = 5


# ---- the kernel ----


def drawn_map(seed: int) -> tuple[RowMap, Tensor]:
    """Assignments that are dropped, tokens and experts without any; rows that are known, or their upper bound."""
    generator, dice = torch.Generator().manual_seed(seed), random.Random(seed)
    tokens, top_k, multiple = dice.choice((0, 1, 7, 12, 33)), dice.choice((1, 3)), dice.choice((1, 4, 16, 32))
    # The last expert has none in every other map.
    experts_tK = torch.rand(tokens, EXPERTS - seed % 2, generator=generator).argsort(1)[:, :top_k]
    kept_tK = torch.rand(tokens, top_k, generator=generator) > 0.2 if dice.random() < 0.7 else None
    routing = Routing(experts_tK, torch.rand(tokens, top_k, generator=generator), kept_tK)
    if dice.random() < 0.2:
        return map_padded(routing, EXPERTS, 4), routing.probs
    rows = map_rows(routing, EXPERTS, multiple)
    if dice.random() < 0.5:
        rows = map_rows(routing, EXPERTS, multiple, int(rows.start_E[-1]))
    return rows, routing.probs


def drawn_tokens(rows: RowMap, seed: int) -> Tensor:
    generator, dice, tokens = torch.Generator().manual_seed(seed), random.Random(seed), len(rows.row_tK)
    x = torch.randn(tokens, dice.choice((16, 40, 130, 1030)), generator=generator)
    x = x * torch.exp2(torch.randint(-20, 20, (tokens, 1), generator=generator))
    if tokens and seed % 3 == 0:
        x[0, 3] = dice.choice((torch.nan, torch.inf, -torch.inf))
    return x.bfloat16() if dice.random() < 0.5 else x


def outcome(permute: Callable[..., Any], x: Tensor, prob: Tensor | None, seed: int) -> list[Tensor | None]:
    """Rows and their probs, and the gradients of tokens and probs."""
    given, probs = x.clone().requires_grad_(), None if prob is None else prob.clone().requires_grad_()
    rows, prob_P = permute(given, probs)
    generator = torch.Generator().manual_seed(seed + 1)
    outputs = [rows] if prob_P is None else [rows, prob_P]
    grads = [torch.randn(each.shape, generator=generator).to(each.dtype) for each in outputs]
    if len(x):
        torch.autograd.backward(outputs, grads)
    return [rows.detach(), prob_P, given.grad, None if probs is None else probs.grad]


def one_pass(name: str, seed: int) -> None:
    (rows, prob), cast, made = drawn_map(seed), ROW_CASTS[name], list[Quantized]()
    x, probs = drawn_tokens(rows, seed), prob if seed % 4 else None

    def fused(given: Tensor, prob_tK: Tensor | None) -> tuple[Tensor, Tensor | None]:
        rows_PL, prob_P, quantized = permute_cast_triton.permute_cast(given, rows, prob_tK, cast)
        made.append(quantized)
        return rows_PL, prob_P

    with interpreting(), poisoned_memory():
        found = outcome(fused, x, probs, seed)
        wanted = outcome(lambda given, prob_tK: permute_triton.permute(given, rows, prob_tK), x, probs, seed)
    what = f"{name} {tuple(x.shape)} {x.dtype} to {rows.num_rows} rows"
    names = ("rows", "probs", "gradient of tokens", "gradient of probs")
    for part, ours, expected in zip(names, found, wanted, strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None and expected is not None:
            assert_same(ours.detach(), expected.detach(), f"{part} of {what}")
    reference, _, copy = moe_references.permute_cast(x, rows, probs, cast)
    assert_same(made[0].codes_MK, copy.codes_MK, f"codes of {what}")
    assert_same(made[0].scale_rc, copy.scale_rc, f"scales of {what}")
    assert found[0] is not None
    assert_same(found[0], reference, f"rows of {what}")


@pytest.mark.parametrize("name", ROW_CASTS)
def test_the_bits_of_two_steps(name: str) -> None:
    for seed in (3, 6, 9):
        one_pass(name, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROW_CASTS)
def test_on_fifty_shapes(name: str) -> None:
    for seed in range(50):
        one_pass(name, seed)


def test_draws_have_every_kind() -> None:
    """Fifty maps: with dropped assignments, tokens without any, experts without rows, padding, rows of no expert."""
    found = Counter[str]()
    for seed in range(50):
        rows, _ = drawn_map(seed)
        found["dropped"] += bool((rows.row_tK < 0).any())
        found["a token without rows"] += bool(len(rows.row_tK) and (rows.row_tK < 0).all(1).any())
        found["an expert without rows"] += bool(len(rows.row_tK) and (rows.count_E == 0).any())
        found["padding"] += bool((rows.start_E.diff() > rows.count_E).any())
        found["beyond the experts"] += rows.num_rows > int(rows.start_E[-1])
        found["no tokens"] += not len(rows.row_tK)
    assert len(found) == 6 and min(found.values()) >= 3, found


def a_map(multiple: int = 16) -> RowMap:
    generator = torch.Generator().manual_seed(3)
    experts_tK = torch.rand(9, EXPERTS - 1, generator=generator).argsort(1)[:, :2]
    return map_rows(
        Routing(experts_tK, torch.rand(9, 2), torch.rand(9, 2, generator=generator) > 0.2), EXPERTS, multiple
    )


def test_no_races_and_nothing_outside() -> None:
    rows = a_map()
    with watching() as watch:
        for name in ("mxfp8", "fp8_blockwise"):
            permute_cast_triton.permute_cast(torch.randn(9, 1060), rows, torch.rand(9, 2), ROW_CASTS[name])
    assert watch.launches == 2


def test_bytes_are_those_of_the_formula() -> None:
    """Without padding; the map is read once per token, and experts' programs read where their rows begin and end."""
    experts_tK, cast = torch.rand(8, EXPERTS).argsort(1)[:, :2], ROW_CASTS["mxfp8"]
    rows = map_rows(Routing(experts_tK, torch.rand(8, 2), None), EXPERTS, 1, 16)
    with counting_bytes() as moved:
        permute_cast_triton.permute_cast(torch.randn(8, 64).bfloat16(), rows, torch.rand(8, 2), cast)
    told = permute_cast_triton.permute_cast_traffic(64, 2, cast).moved * 8
    assert told <= moved[0] <= told + 4 * (2 * EXPERTS + 1)


def test_pads_are_zeros_of_blocks_of_their_own() -> None:
    rows = a_map()
    is_pad = torch.ones(rows.num_rows, dtype=torch.bool)
    is_pad[rows.row_tK[rows.row_tK >= 0].long()] = False
    for name, of_zeros in (("mxfp8", 0), ("fp8_blockwise", 1)):
        with interpreting(), poisoned_memory():
            found, _, copy = permute_cast_triton.permute_cast(torch.full((9, 64), 1e4), rows, None, ROW_CASTS[name])
        codes = copy.codes_MK.view(torch.uint8)
        assert is_pad.any() and not codes[is_pad].any() and codes[~is_pad].all() and not found[is_pad].any()
        assert (copy.scale_rc[is_pad] == of_zeros).all() and (copy.scale_rc[~is_pad] != of_zeros).all()


def test_what_the_kernel_cannot_do_is_refused() -> None:
    for cast in (
        PRECISION_RECIPES["nvfp4"].casts.x_fprop,
        PRECISION_RECIPES["fp8_tensor"].casts.x_fprop,
        PRECISION_RECIPES["fp8_blockwise"].casts.w_fprop,
        replace(ROW_CASTS["mxfp8"], rounding="stochastic"),
    ):
        assert cast is not None
        with pytest.raises(ValueError, match="scales of its own blocks"):
            permute_cast_triton.permute_cast(torch.randn(9, 32), a_map(), None, cast)


@triton.jit
def _no_padding(expert, start_E, count_E, num_experts, num_rows):
    return num_rows, num_rows


@triton.jit
def _largest_scale(
    x, tensor_amax, seed, ELEMENT: tl.constexpr, RULE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    code, stored, value = cast_tile(x, tensor_amax, seed, ELEMENT, RULE, ROWS, COLUMNS, STOCHASTIC)
    return code, tl.broadcast_to(tl.max(stored, axis=1)[:, None], stored.shape), value


@triton.jit
def _blocks_of_half(
    x, tensor_amax, seed, ELEMENT: tl.constexpr, RULE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    code, _, value = cast_tile(x, tensor_amax, seed, ELEMENT, RULE, ROWS, COLUMNS // 2, STOCHASTIC)
    _, stored, _ = cast_tile(x, tensor_amax, seed, ELEMENT, RULE, ROWS, COLUMNS, STOCHASTIC)
    return code, stored, value


@pytest.mark.parametrize(
    ("attribute", "broken"),
    [("padding_of", _no_padding), ("cast_tile", _largest_scale), ("cast_tile", _blocks_of_half)],
    ids=["pads as they were", "another block's scale", "blocks of half"],
)
def test_broken_kernels_are_caught(attribute: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permute_cast_triton, attribute, broken)
    with pytest.raises(AssertionError, match="differ"):
        one_pass("mxfp8", 7)


# ---- experts ----


class Steps:
    """Kernels and casts by references, counted."""

    def __init__(self, requantize: Callable[[Quantized, Cast], Quantized] = requantize_reference) -> None:
        self.calls, self.requantized = Counter[str](), requantize

    def permute(self, x: Tensor, rows: RowMap, prob: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        self.calls["permute"] += 1
        return moe_references.permute(x, rows, prob)

    def permute_cast(
        self, x: Tensor, rows: RowMap, prob: Tensor | None, cast: Cast
    ) -> tuple[Tensor, Tensor | None, Quantized]:
        self.calls["permute_cast"] += 1
        return moe_references.permute_cast(x, rows, prob, cast)

    def requantize(self, row: Quantized, column: Cast) -> Quantized:
        self.calls["requantize"] += 1
        return self.requantized(row, column)

    def kernels(self) -> MoEKernels:
        return replace(MOE_IN_TORCH, permute=self.permute, permute_cast=self.permute_cast)

    def quantizers(self) -> Quantizers:
        return REFERENCE._replace(quantize_both=quantize_both_reference, requantize=self.requantize)


def step_of_training(
    changes: dict[str, object], casts: str, kernels: MoEKernels, layers: int = 2, seq_len: int = 64
) -> tuple[list[Tensor], list[object]]:
    """Loss and gradients of a model, and the permutations of its experts."""
    settings: dict[str, object] = {
        "precision.recipe": "mxfp8",
        "kernels.casts": casts,
        "kernels.experts": "grouped",
        "kernels.row_padding": "permute",
        "model.num_layers": layers,
    }
    run = moefold.load_run("debug_small", settings | changes)
    interfaces = local_interfaces("grouped", kernels)
    codecs = row_codecs(run)
    interfaces = replace(interfaces, dispatcher=lambda moe: LocalDispatcher(moe.num_experts, codecs=codecs))
    decoder = build_decoder(run.model, torch.float32, interfaces)
    fill(decoder)
    narrow_modules(decoder, run)
    loss = decoder(batch_of(2, seq_len, run.model.vocab_size), None).loss_sum
    loss.backward()
    used = [module.backend.permutation for module in decoder.modules() if isinstance(module, Experts)]
    return [loss.detach(), *(each.grad for each in decoder.parameters() if each.grad is not None)], used


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(torch.equal(*each) for each in zip(found, wanted, strict=True))


QUANTIZED = {"memory.retain.rows": "quantize"}
# What a run changes, and how often each of its MoE layers narrows in its permutation, and from codes.
USED: dict[str, tuple[dict[str, object], int, int]] = {
    "rows kept wide": ({}, 1, 0),
    "rows padded in wgrad": ({"kernels.row_padding": "wgrad"}, 1, 0),
    "blockwise": ({"precision.recipe": "fp8_blockwise"}, 1, 0),
    "blockwise, kept narrow": ({"precision.recipe": "fp8_blockwise", **QUANTIZED}, 1, 0),
    "sent as codes, kept wide": ({"precision.dispatch": "mxfp8"}, 1, 0),
    "sent as codes, kept narrow": ({"precision.dispatch": "mxfp8", **QUANTIZED}, 1, 1),
    "sent as codes, rows fill no block": (
        {"precision.dispatch": "mxfp8", "kernels.row_padding": "wgrad", **QUANTIZED}, 1, 0,
    ),
    # Both copies come from one read.
    "kept narrow": (QUANTIZED, 0, 0),
    "sent by another cast": ({"precision.dispatch": "fp8_blockwise", **QUANTIZED}, 0, 0),
    # Rows are multiplied after they were permuted, or permuted twice; scales of the whole matrix.
    "probs multiply rows": ({"model.moe.weight_at": "input"}, 0, 0),
    "rows discarded": ({"memory.retain.rows": "discard"}, 0, 0),
    "a scale per tensor": ({"precision.recipe": "fp8_tensor"}, 0, 0),
    "under a scale per tensor": ({"precision.recipe": "nvfp4"}, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", USED)
def test_experts_have_the_bits_of_two_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (changes, narrowed, requantized), plain, steps = USED[name], Steps(), Steps()
    wanted, _ = step_of_training(changes, "torch", plain.kernels())
    monkeypatch.setitem(cast_backends.QUANTIZERS, "triton", steps.quantizers())
    found, used = step_of_training(changes, "triton", steps.kernels())
    layers = len(used)
    assert layers and same(found, wanted)
    assert plain.calls == {"permute": layers}
    assert [isinstance(each, NarrowingPermutation) for each in used] == [bool(narrowed)] * layers
    expected = {
        "permute": (1 - narrowed) * layers,
        "permute_cast": narrowed * layers,
        "requantize": requantized * layers,
    }
    assert dict(steps.calls) == {name: calls for name, calls in expected.items() if calls}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sent as codes, kept narrow", "blockwise"])
def test_the_kernels_in_experts(name: str) -> None:
    """Interpreted: row map, permutation and all casts."""
    changes, steps = USED[name][0], Steps()
    kernels = replace(
        steps.kernels(),
        map_rows=row_map_triton.map_rows,
        permute=permute_triton.permute,
        permute_cast=permute_cast_triton.permute_cast,
        unpermute=permute_triton.unpermute,
    )
    with interpreting():
        wanted, _ = step_of_training(changes, "torch", kernels, layers=1, seq_len=12)
        found, used = step_of_training(changes, "triton", kernels, layers=1, seq_len=12)
    assert used and all(isinstance(each, NarrowingPermutation) for each in used) and same(found, wanted)


@pytest.mark.parametrize(("rows_per_expert", "calls"), [([128, 0, 256], 1), ([128, 16, 240], 0), ([0, 0, 0], 0)])
def test_blocks_of_128_rows_are_made_of_codes_where_rows_fill_them(rows_per_expert: list[int], calls: int) -> None:
    steps, recipe, kept, read = Steps(), PRECISION_RECIPES["fp8_blockwise"], [], []
    cast, weight = ROW_CASTS["fp8_blockwise"], nn.Parameter(torch.randn(3, 16, 40))
    for ahead in (None, WaitingCopies()):
        x = fake_quantize(torch.randn(sum(rows_per_expert), 40, generator=torch.Generator().manual_seed(1)), cast)
        operands = NarrowOperands(
            recipe, NarrowWeights(), steps.quantizers(), 0, NarrowInputs(), OWN_AMAXES, ahead, True
        )
        if ahead is not None:
            ahead.put(x, quantize(x, cast))
        kept.append(operands.keep(x, rows_per_expert))
        read.append(operands.fprop(x, weight, rows_per_expert)[0])
        # It waits no longer.
        assert ahead is None or ahead.get(x, cast) is None
    assert same(list(kept[0]), list(kept[1])) and torch.equal(*read) and steps.calls["requantize"] == calls


def _next_scale(row: Quantized, column: Cast) -> Quantized:
    found = requantize_reference(row, column)
    return replace(found, scale_rc=found.scale_rc.roll(1, -1))


def _along_features(row: Quantized, column: Cast) -> Quantized:
    """The same codes, read in the other direction."""
    found = requantize_reference(row, column)
    return replace(found, codes_MK=row.codes_MK.mT)


@pytest.mark.parametrize("broken", [_next_scale, _along_features], ids=["the next block's scale", "wrong direction"])
def test_mutants_change_bits(broken: Callable[..., Quantized], monkeypatch: pytest.MonkeyPatch) -> None:
    changes = USED["sent as codes, kept narrow"][0]
    wanted, _ = step_of_training(changes, "torch", Steps().kernels())
    steps = Steps(broken)
    monkeypatch.setitem(cast_backends.QUANTIZERS, "triton", steps.quantizers())
    assert not same(step_of_training(changes, "triton", steps.kernels())[0], wanted) and steps.calls["requantize"]


def test_pads_as_they_were_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of rows of padding that nobody has written."""
    steps = Steps()
    wanted, _ = step_of_training(USED["sent as codes, kept narrow"][0], "torch", Steps().kernels())

    def left(x: Tensor, rows: RowMap, prob: Tensor | None, cast: Cast) -> tuple[Tensor, Tensor | None, Quantized]:
        moved, prob_P, copy = moe_references.permute_cast(x, rows, prob, cast)
        is_pad = torch.ones(rows.num_rows, dtype=torch.bool)
        is_pad[rows.row_tK[rows.row_tK >= 0].long()] = False
        scales = copy.scale_rc.masked_fill(is_pad[:, None], 140)
        codes = copy.codes_MK.view(torch.uint8).masked_fill(is_pad[:, None], 0x70).view(torch.float8_e4m3fn)
        return moved, prob_P, replace(copy, codes_MK=codes, scale_rc=scales)

    monkeypatch.setitem(cast_backends.QUANTIZERS, "triton", steps.quantizers())
    kernels = replace(steps.kernels(), permute_cast=left)
    assert not same(step_of_training(USED["sent as codes, kept narrow"][0], "triton", kernels)[0], wanted)
