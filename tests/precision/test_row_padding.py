"""Rows of experts that are padded with zeros: by the permutation, or through the routing map before they are sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moefold
from moefold.config.moe import MoEConfig
from moefold.config.precision_recipes import PRECISION_RECIPES, RecipeName
from moefold.moe import grouped_experts
from moefold.moe.dispatch.base import ExpertInput, LocalDispatcher, Routing
from moefold.moe.dispatch.padded_routing import PaddedRouting, pad_routing, pad_routing_reference
from moefold.moe.experts import ExpertWeights
from moefold.moe.grouped_experts import (
    GroupedExperts,
    KernelPermutation,
    Permuted,
    TorchPermutation,
    torch_activation,
)
from moefold.moe.moe_kernels import MOE_IN_TORCH
from moefold.moe.permute import count_assignments, group_aligned, group_by_expert_reference
from moefold.nn.matmul_kernels import sequential
from moefold.nn.matmul_policy import ParameterMatmul

TRAINED: tuple[RecipeName, ...] = ("fp8_tensor", "fp8_blockwise", "mxfp8", "nvfp4")


def routing_of(tokens: int, top_k: int, experts: int, seed: int, dropped: bool = False) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    # The last expert gets no token.
    chosen = torch.stack([torch.randperm(experts - 1, generator=generator)[:top_k] for _ in range(tokens)])
    kept = torch.rand(tokens, top_k, generator=generator) < 0.8 if dropped else None
    return Routing(chosen, torch.rand(tokens, top_k, generator=generator), kept)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "experts", "multiple"), [(37, 4, 8, 16), (5, 2, 4, 32), (1, 1, 3, 128)])
def test_the_routing_map_is_padded_to_a_multiple(
    tokens: int, top_k: int, experts: int, multiple: int, dropped: bool
) -> None:
    routing = routing_of(tokens, top_k, experts, seed=tokens, dropped=dropped)
    padded = pad_routing(routing, experts, multiple)
    assert padded.kept is not None and padded.counts_E is not None
    counts, pads = count_assignments(padded, experts), Routing(*(each[tokens:] for each in padded[:3]))
    assert torch.equal(counts, padded.counts_E) and not (counts % multiple).any() and counts[-1] == 0
    assert count_assignments(pads, experts).tolist() == pad_routing_reference(routing, experts, multiple)
    # Real tokens are as they were; those of zeros have prob 0, and an expert at most once.
    assert torch.equal(padded.experts[:tokens], routing.experts) and torch.equal(padded.probs[:tokens], routing.probs)
    assert not pads.probs.any()
    for chosen, kept in zip(pads.experts.tolist(), pads.kept.tolist(), strict=True):  # type: ignore[union-attr]
        mine = [expert for expert, is_kept in zip(chosen, kept, strict=True) if is_kept]
        assert len(mine) == len(set(mine))


@pytest.mark.parametrize("dropped", [False, True])
def test_the_permutation_is_padded_with_the_row_past_the_end(dropped: bool) -> None:
    routing = routing_of(23, 3, 6, seed=1, dropped=dropped)
    counts = count_assignments(routing, 6).tolist()
    groups = group_aligned(routing, counts, 16)
    wanted: list[int] = []
    for numbers in group_by_expert_reference(routing, 6):
        wanted += numbers + [23 * 3] * (-len(numbers) % 16)
    assert groups.assignment_N.tolist() == wanted and groups.token_N.tolist() == [number // 3 for number in wanted]


def inputs_of(by_expert: bool) -> ExpertInput:
    routing = routing_of(23, 3, 6, seed=2)
    counts_e = count_assignments(routing, 6)
    rows = torch.randn(23, 8, generator=torch.Generator().manual_seed(3))
    if by_expert:
        order = group_aligned(routing, counts_e.tolist(), 1)
        experts = routing.experts.flatten()[order.assignment_N]
        routing = Routing(experts[:, None], routing.probs.flatten()[order.assignment_N][:, None])
        rows = rows[order.token_N]
    return ExpertInput(rows.requires_grad_(), routing, counts_e, counts_e.tolist(), None, None, by_expert)


@pytest.mark.parametrize("at_activation", [True, False])
@pytest.mark.parametrize("name", ["torch", "kernels", "received by expert"])
def test_every_permutation_pads_with_zeros_and_reads_nothing_back(name: str, at_activation: bool) -> None:
    """What experts compute for pads, 1e4 here, reaches no output; the gradient of pads is zero."""
    permutations: dict[str, Any] = {"torch": TorchPermutation(), "kernels": KernelPermutation(MOE_IN_TORCH)}
    permutation = permutations.get(name, permutations["torch"])
    expert_in = inputs_of(name == "received by expert")
    permuted = permutation.permute(expert_in, 6, at_activation, multiple=16)
    sizes = permuted.rows_per_expert
    assert sizes is not None and len(permuted.rows_PL) == sum(sizes) and not any(size % 16 for size in sizes)
    is_pad = torch.cat([torch.arange(n) >= count for n, count in zip(sizes, expert_in.rows_per_expert, strict=True)])
    assert not permuted.rows_PL[is_pad].any() and permuted.rows_PL[~is_pad].any(1).all()
    assert permuted.prob_P is None or not permuted.prob_P[is_pad].any()
    outputs = []
    for filling in (0.0, 1e4):
        out = torch.where(is_pad[:, None], filling, permuted.rows_PL.detach()).requires_grad_()
        y = permutation.unpermute(out, permuted)
        (grad,) = torch.autograd.grad(y.square().sum(), out)
        assert not grad[is_pad].any()
        outputs.append((y, grad))
    assert all(torch.equal(one, two) for one, two in zip(*outputs, strict=True))
    plain = permutation.permute(expert_in, 6, at_activation)
    assert torch.equal(plain.rows_PL, permuted.rows_PL[~is_pad])
    assert torch.equal(permutation.unpermute(plain.rows_PL, plain), outputs[0][0])


class Padding(TorchPermutation):
    """Of which multiple rows were padded to."""

    def __init__(self) -> None:
        self.multiples: list[int] = []

    def permute(self, *args: Any) -> Permuted:
        self.multiples.append(args[-1])
        return super().permute(*args)


def test_rows_received_by_expert_are_permuted_to_be_padded() -> None:
    """By the experts' own permutation; otherwise they are taken as they are."""
    moe = MoEConfig(num_experts=6, top_k=3, expert_hidden_dim=4)
    generator, expert_in, permutation, found = torch.Generator().manual_seed(1), inputs_of(True), Padding(), []
    shapes = ((6, 2, 4, 8), (6, 8, 4))
    gate_up, down = (nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)
    for multiple in (1, 16):
        matmul = ParameterMatmul()
        experts = GroupedExperts(moe, matmul, sequential, permutation, torch_activation("swiglu"))
        experts.multiple = multiple
        out = experts(expert_in, ExpertWeights(gate_up, down, None, None, 1.0))
        found.append((out, *torch.autograd.grad(out.square().sum(), (expert_in.rows_RL, gate_up, down))))
    assert permutation.multiples == [16]
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


class Recorder(LocalDispatcher):
    """Experts' rows as they are dispatched."""

    def __init__(self) -> None:
        super().__init__(8)
        self.seen = list[ExpertInput]()

    def dispatch_finish(self, received: tuple[Tensor, Routing]) -> ExpertInput:
        self.seen.append(super().dispatch_finish(received))
        return self.seen[-1]


def test_tokens_of_zeros_are_zeros_and_nothing_is_read_back_of_them() -> None:
    recorder, x = Recorder(), torch.randn(37, 4, requires_grad=True)
    dispatcher = PaddedRouting(recorder, 8, 32)
    expert_in = dispatcher.dispatch(x, routing_of(37, 4, 8, seed=5))
    (seen,) = recorder.seen
    assert not seen.rows_RL[37:].any() and torch.equal(seen.rows_RL[:37], x) and len(seen.rows_RL) == 37 + 62
    assert not any(rows % 32 for rows in expert_in.rows_per_expert) and expert_in.rows_per_expert[-1] == 0
    filled = torch.cat([seen.rows_RL[:37], torch.full((62, 4), 1e4)])
    for out in (seen.rows_RL, filled):
        y = dispatcher.combine(out, expert_in.ticket)
        assert torch.equal(y, x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, torch.ones_like(x))


# ---- whole models ----


def step_of_training(recipe: RecipeName, padding: str, **changes: object) -> tuple[float, dict[str, Tensor]]:
    settings = {"precision.recipe": recipe, "kernels.casts": "native", "kernels.row_padding": padding}
    settings |= {"kernels.experts": "sequential", "model.num_layers": 2}
    # In float64 another number of rows changes sums by less than narrowing could.
    settings |= {"precision.params": "float64", "precision.compute": "float64"}
    run = moefold.load_run("debug_mla", settings | {key.replace("__", "."): value for key, value in changes.items()})
    assert not moefold.check(run)
    model, generator = moefold.build_model(run), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, run.model.vocab_size, (1, 51), generator=generator)
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    assert loss is not None
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(
        float((found[name] - each).abs().max() / each.abs().max().clamp(min=1e-9)) for name, each in wanted.items()
    )


@pytest.mark.parametrize("recipe", TRAINED)
def test_padded_rows_change_no_number(recipe: RecipeName) -> None:
    wanted_loss, wanted = step_of_training(recipe, "wgrad")
    for padding in ("permute", "routing_map"):
        loss, found = step_of_training(recipe, padding)
        assert abs(loss / wanted_loss - 1) < 1e-13 and furthest(found, wanted) < 1e-9, padding


def test_pads_that_are_not_zeros_change_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of row 0 would enter the magnitudes of experts and blocks along tokens."""
    wanted_loss, wanted = step_of_training("fp8_tensor", "wgrad")
    gather_rows = grouped_experts.gather_rows

    def copies(x: Tensor, token_N: Tensor, padded: bool = True) -> Tensor:
        return gather_rows(x, token_N.where(token_N < len(x), 0), False) * (1e4 if padded else 1)

    monkeypatch.setattr(grouped_experts, "gather_rows", copies)
    loss, found = step_of_training("fp8_tensor", "permute")
    assert abs(loss / wanted_loss - 1) > 1e-6 and furthest(found, wanted) > 1e-3


def test_alignment_is_the_recipes() -> None:
    assert {name: PRECISION_RECIPES[name].align for name in TRAINED} == {
        "fp8_tensor": 16,
        "fp8_blockwise": 16,
        "mxfp8": 32,
        "nvfp4": 128,
    }
