"""The fused experts compute what the plain loop over experts computes: values, gradients, and with fewer bytes kept."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from tests.marks import slow_except
from torch import Tensor

from moefold.config.moe import MoEConfig
from moefold.moe.dispatch.base import LocalDispatcher, Routing
from moefold.moe.expert_backends import expert_backend
from moefold.moe.experts import Experts
from moefold.moe.padded_permutation import STEP, pad_rows
from moefold.moe.permute import count_assignments
from moefold.nn.matmul_policy import ParameterMatmul, WeightGradQueue
from moefold.ops.activations import AutogradGLU, SwiGLU, swiglu_reference
from moefold.ops.segments import segment_sum, segment_sum_reference


class Case(NamedTuple):
    config: MoEConfig
    dim: int
    tokens: int
    # How uneven the load of experts is, and how many assignments are dropped; None drops none.
    skew: float
    dropped: float | None
    seed: int


def draw(seed: int) -> Case:
    chance = random.Random(seed)
    experts = chance.choice([1, 2, 3, 5, 8, 16, 40])
    config = MoEConfig(
        num_experts=experts,
        top_k=chance.randint(1, min(experts, 6)),
        expert_hidden_dim=chance.choice([4, 7, 16, 32, 48]),
        activation=chance.choice(["swiglu", "swiglu", "clamped_swiglu"]),
        expert_mlp_bias=chance.random() < 0.25,
    )
    tokens = chance.choice([0, 1, 2, 17, 33, 64, 130])
    return Case(config, chance.choice([8, 16, 24, 64]), tokens, chance.choice([0.0, 1.0, 8.0]), _dropped(chance), seed)


def _dropped(chance: random.Random) -> float | None:
    return chance.choice([None, None, 0.3, 1.0])


def build(case: Case, name: str, dtype: torch.dtype, weight_grads: WeightGradQueue | None = None) -> Experts:
    torch.manual_seed(case.seed)
    experts = Experts(case.config, case.dim, expert_backend(name, ParameterMatmul(), weight_grads)(case.config))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return experts.to(dtype)


def route(case: Case, dtype: torch.dtype) -> tuple[Tensor, Routing]:
    torch.manual_seed(case.seed + 1)
    config = case.config
    liked_E = case.skew * torch.randn(config.num_experts)
    score_tE = (torch.randn(case.tokens, config.num_experts) + liked_E).softmax(-1)
    weight_tK, expert_tK = score_tE.topk(config.top_k)
    kept_tK = None if case.dropped is None else torch.rand(weight_tK.shape) >= case.dropped
    x_tD = torch.randn(case.tokens, case.dim).to(dtype)
    weight_tK = weight_tK.to(torch.promote_types(dtype, torch.float32))
    return x_tD.requires_grad_(), Routing(expert_tK, weight_tK.requires_grad_(), kept_tK)


def outcome(experts: Experts, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """The output and all gradients, by name."""
    x, routing = route(case, dtype)
    dispatcher = LocalDispatcher(case.config.num_experts)
    arrived = dispatcher.dispatch(x, routing)
    y = dispatcher.combine(experts(arrived), arrived.ticket)
    torch.manual_seed(2)
    y.backward(torch.randn(y.shape).to(dtype))
    assert x.grad is not None and routing.probs.grad is not None
    named = {name: p.grad for name, p in experts.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, "dweight": routing.probs.grad, **named}


def error(got: Tensor, want: Tensor) -> float:
    """In the norm, relative to what is wanted."""
    size = want.double().norm().item()
    away = (got.double() - want.double()).norm().item()
    return away / size if size else away


@pytest.mark.parametrize("start", slow_except(range(0, 500, 50), 0, 250))
def test_500_random_shapes_and_routings(start: int) -> None:
    """float64 and float32 to rounding; bfloat16 no further from the exact output than a few roundings of its kind."""
    for seed in range(start, start + 50):
        case = draw(seed)
        exact = outcome(build(case, "sequential", torch.float64), case, torch.float64)
        for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            want = exact if dtype == torch.float64 else outcome(build(case, "sequential", dtype), case, dtype)
            got = outcome(build(case, "fused", dtype), case, dtype)
            assert got.keys() == want.keys()
            for name, tensor in want.items():
                assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
                assert error(got[name], tensor) <= allowed, (case, dtype, name)
        # Inputs are rounded too, so the exact output is that of the rounded ones.
        narrow, plain = build(case, "fused", torch.bfloat16), build(case, "sequential", torch.bfloat16)
        wide = build(case, "sequential", torch.float64)
        wide.load_state_dict(narrow.state_dict())
        got, reference = outcome(narrow, case, torch.bfloat16), outcome(plain, case, torch.bfloat16)
        for name, tensor in outcome_of_rounded(wide, case).items():
            # One rounding is 2^-9 at most, and about ten lie on the longest way. In sums of a few numbers that nearly
            # cancel it may be more, for the plain layer as well.
            allowed = max(12 * 2**-9, 2 * error(reference[name], tensor))
            assert error(got[name], tensor) <= allowed, (case, name)


def outcome_of_rounded(experts: Experts, case: Case) -> dict[str, Tensor]:
    """In float64, from inputs that bfloat16 can hold."""
    x, routing = route(case, torch.bfloat16)
    x = x.detach().double().requires_grad_()
    weight = routing.probs.detach().double().requires_grad_()
    arrived = LocalDispatcher(case.config.num_experts).dispatch(x, routing._replace(probs=weight))
    y = experts(arrived)
    torch.manual_seed(2)
    y.backward(torch.randn(y.shape).to(torch.bfloat16).double())
    assert x.grad is not None and weight.grad is not None
    named = {name: p.grad for name, p in experts.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, "dweight": weight.grad, **named}


@pytest.mark.parametrize("dropped", [None, 0.4])
def test_weight_gradients_can_wait(dropped: float | None) -> None:
    case = Case(MoEConfig(num_experts=5, top_k=2, expert_hidden_dim=16, expert_mlp_bias=True), 24, 70, 1.0, dropped, 3)
    at_once = outcome(build(case, "fused", torch.float32), case, torch.float32)
    weight_grads = WeightGradQueue()
    experts = build(case, "fused", torch.float32, weight_grads)
    with weight_grads.deferring("later"):
        first = outcome(experts, case, torch.float32)
    assert "gate_up" not in first and "down" not in first
    weight_grads.run_until("later")
    assert weight_grads.is_empty and experts.gate_up.grad is not None and experts.down.grad is not None
    later = {**first, "gate_up": experts.gate_up.grad, "down": experts.down.grad}
    assert all(torch.equal(later[name], tensor) for name, tensor in at_once.items())


def test_rows_are_rounded_up_and_every_choice_finds_its_own() -> None:
    case = draw(11)._replace(dropped=0.3, tokens=130)
    _, routing = route(case, torch.float32)
    counts = count_assignments(routing, case.config.num_experts).tolist()
    rows = pad_rows(routing, counts)
    assert all(size % STEP == 0 and 0 <= size - count < STEP for size, count in zip(rows.sizes, counts, strict=True))
    assert routing.kept is not None and rows.assignment_N is not None
    expert_of_row = torch.arange(len(counts)).repeat_interleave(torch.tensor(rows.sizes))
    assert torch.equal(expert_of_row[rows.row_N], routing.experts.flatten()[rows.assignment_N])
    assert torch.equal(rows.received_P[rows.row_N], rows.assignment_N // case.config.top_k)
    assert torch.equal(rows.assignment_N, routing.kept.flatten().nonzero().flatten())
    assert len(set(rows.row_N.tolist())) == len(rows.row_N)


def test_the_gate_written_out_equals_autograd() -> None:
    torch.manual_seed(0)
    gate_up, dact, weight = torch.randn(9, 12).double(), torch.randn(9, 6).double(), torch.rand(9).double()
    found = []
    for gate in (SwiGLU(), AutogradGLU(swiglu_reference)):
        act, dgate_up, again = torch.empty(9, 6).double(), torch.empty(9, 12).double(), torch.empty(9, 6).double()
        gate.forward(gate_up, act)
        dweight = gate.backward(gate_up, dact.clone(), weight, dgate_up, again)
        found.append((act, dweight, dgate_up, again))
    torch.testing.assert_close(*found)


def bytes_kept(name: str, config: MoEConfig) -> int:
    """Of tensors saved for the backward, beside the layer's input and weights."""
    case = Case(config, 64, 256, 0.5, None, 1)
    experts = build(case, name, torch.bfloat16)
    x, routing = route(case, torch.bfloat16)
    known = {t.untyped_storage().data_ptr() for t in (x, *experts.parameters())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(LocalDispatcher(config.num_experts).dispatch(x, routing))
    return sum(kept.values())


def test_only_the_first_product_and_the_maps_are_kept() -> None:
    config = MoEConfig(num_experts=8, top_k=4, expert_hidden_dim=32)
    rows = 256 * 4
    padded = rows + 8 * (STEP - 1)
    # gate and up in bfloat16; the row of each choice, its source, its weight; where each token begins.
    assert bytes_kept("fused", config) <= padded * (2 * 32 * 2 + 8) + rows * (8 + 4) + 256 * 8
    assert bytes_kept("fused", config) < bytes_kept("sequential", config) / 2


def test_the_output_bias_is_added_by_share() -> None:
    case = Case(MoEConfig(num_experts=4, top_k=2, expert_hidden_dim=8, expert_mlp_bias=True), 16, 40, 1.0, None, 7)
    whole, without = build(case, "fused", torch.float64), build(case, "fused", torch.float64)
    without.bias_scale = 0.0
    plain = build(case._replace(config=replace(case.config)), "sequential", torch.float64)
    plain.bias_scale = 0.0
    assert error(outcome(without, case, torch.float64)["y"], outcome(plain, case, torch.float64)["y"]) < 1e-12
    assert error(outcome(whole, case, torch.float64)["y"], outcome(plain, case, torch.float64)["y"]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighed", [False, True])
def test_sums_of_rows_equal_a_loop(dtype: torch.dtype, weighed: bool) -> None:
    torch.manual_seed(0)
    rows, row = torch.randn(9, 5).to(dtype), torch.tensor([8, 0, 0, 3, 7, 2])
    first, weight = torch.tensor([0, 0, 2, 5, 6]), torch.rand(6) if weighed else None
    torch.testing.assert_close(segment_sum(rows, row, first, weight), segment_sum_reference(rows, row, first, weight))
    none = torch.zeros(0, dtype=torch.int64)
    assert segment_sum(rows, none, none, None).shape == (0, 5)
    assert (segment_sum(rows, none, torch.zeros(3, dtype=torch.int64), None) == 0).all()
