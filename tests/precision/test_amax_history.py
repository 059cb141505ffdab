"""Delayed scaling by loops: which amax of which step decides the scale of an operand, and what it does to values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from moefold.config.precision import AmaxComputeAlgo
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.nn.matmul_kernels import sequential
from moefold.nn.matmul_policy import ParameterMatmul, WeightGradQueue
from moefold.precision.amax import OWN_AMAXES
from moefold.precision.amax_history import OPERANDS, AmaxHistory, DelayedAmaxes
from moefold.precision.cast_backends import QUANTIZERS
from moefold.precision.operands import NarrowOperands, NarrowWeights

RECIPE = PRECISION_RECIPES["fp8_delayed"]
STEPS, LENGTH = 6, 3
TOP = {"x": 448.0, "w": 448.0, "dy": 57344.0}
DTYPE = {"x": torch.float8_e4m3fn, "w": torch.float8_e4m3fn, "dy": torch.float8_e5m2}


def policy_of(history: AmaxHistory, casts: str = "torch", queue: WeightGradQueue | None = None) -> ParameterMatmul:
    amaxes = DelayedAmaxes(history, OWN_AMAXES)
    return ParameterMatmul(queue, operands=NarrowOperands(RECIPE, NarrowWeights(), QUANTIZERS[casts], amaxes=amaxes))


def tensors(step: int) -> dict[str, Tensor]:
    """Sizes rise and fall, so that the maximum of some steps is that of the last one in some steps only."""
    generator = torch.Generator().manual_seed(step)
    size = (1.0, 8.0, 0.5, 0.25, 2.0, 0.125)[step]
    shapes = {"x": (40, 48), "w": (32, 48), "dy": (40, 32)}
    return {name: torch.randn(shape, generator=generator) * size for name, shape in shapes.items()}


def by_amax(x: Tensor, amax: float, operand: str) -> Tensor:
    """Transformer Engine's: times top / amax in float32, saturating, and back by the inverse of that."""
    encode = torch.tensor(TOP[operand]) / torch.tensor(amax)
    return (x * encode).clamp(-TOP[operand], TOP[operand]).to(DTYPE[operand]).float() * (1.0 / encode)


def by_loops(algo: AmaxComputeAlgo) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Y, dX and dW of every step. ``DelayedScaling`` of Transformer Engine's recipes: the amax of a step is the largest
    of the history or its newest, and enters scales of the next step; the first step has its own here."""
    histories: dict[str, list[float]] = {"x": [], "w": [], "dy": []}
    found = []
    for step in range(STEPS):
        narrow = {}
        for operand, values in tensors(step).items():
            own = max(abs(value) for value in values.flatten().tolist())
            history = histories[operand][-LENGTH:]
            amax = own if not history else max(history) if algo == "max" else history[-1]
            narrow[operand] = by_amax(values, amax, operand)
            histories[operand].append(own)
        x, w, dy = narrow["x"], narrow["w"], narrow["dy"]
        found.append((x @ w.t(), dy @ w, dy.t() @ x))
    return found


def run_steps(
    history: AmaxHistory, casts: str = "torch", push: Callable[[Tensor], None] | None = None, twice: bool = False
) -> list[tuple[Tensor, Tensor, Tensor]]:
    queue, found = WeightGradQueue(), []
    policy = policy_of(history, casts, queue)
    for step in range(STEPS):
        history.start_step()
        values = tensors(step)
        for _ in range(1 + twice):
            x, w = values["x"].clone().requires_grad_(), nn.Parameter(values["w"].clone())
            y = policy.linear(x, w)
            with queue.deferring("later"):
                y.backward(values["dy"])
            queue.run_all()
        assert x.grad is not None and w.grad is not None
        found.append((y.detach(), x.grad, w.grad))
        (push or history.push)(history.noted())
    return found


def distance(found: list[tuple[Tensor, Tensor, Tensor]], wanted: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    pairs = [(one, other) for each in zip(found, wanted, strict=True) for one, other in zip(*each, strict=True)]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


@pytest.mark.parametrize("casts", ["torch", "native"])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_steps_are_those_of_the_equation(algo: AmaxComputeAlgo, casts: str) -> None:
    """Also where a forward runs twice, as recomputation does."""
    assert distance(run_steps(AmaxHistory(LENGTH, (), algo), casts), by_loops(algo)) < 1e-6
    assert distance(run_steps(AmaxHistory(LENGTH, (), algo), casts, twice=True), by_loops(algo)) < 1e-6


def push_once(history: AmaxHistory, amaxes: Tensor) -> None:
    if not history.known:
        history.push(amaxes)


def ignore(amaxes: Tensor) -> None:
    del amaxes


@pytest.mark.parametrize("mutant", ["stale scale", "shorter", "longer", "the other algorithm", "current scales"])
def test_the_equation_catches(mutant: str) -> None:
    history = AmaxHistory({"shorter": 2, "longer": 5}.get(mutant, LENGTH), ())
    push: Callable[[Tensor], None] | None = None
    if mutant == "the other algorithm":
        history.algo = "most_recent"
    if mutant == "current scales":
        push = ignore
    if mutant == "stale scale":
        push = partial(push_once, history)
    assert distance(run_steps(history, push=push), by_loops("max")) > 1e-3


def test_experts_have_scales_of_matrices_and_one_of_all_rows() -> None:
    """Four experts, of which this rank has the last two: the history of weights has all, the others stay zero."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(
        torch.randn(2, 2, 16, 32, generator=generator) * torch.tensor([1.0, 100.0])[:, None, None, None]
    )
    rows, counts = torch.randn(24, 32, generator=generator).requires_grad_(), [24, 0]
    history = AmaxHistory(4, (4, 2), experts=slice(2, 4))
    policy_of(history).grouped(sequential, rows, weight, torch.tensor(counts), counts).sum().backward()
    noted = history.noted()
    assert torch.equal(noted[:1], rows.detach().abs().amax()[None])
    amax_w = weight.detach().abs().amax((-2, -1))
    assert torch.equal(noted[1:9].view(4, 2), torch.cat((torch.zeros(2, 2), amax_w)))
    assert noted[9] == 1.0
    history.push(noted)
    assert history.w.shape == (4, 4, 2) and torch.equal(history.amax("w"), amax_w)
    # Half the rows exceed the history by far and saturate; the weights' scales are their own.
    narrow, w = policy_of(history).operands.fprop(rows.detach() * 3, weight, counts)
    assert narrow.abs().max() == pytest.approx(float(rows.detach().abs().max()), rel=1e-6)
    for expert in range(2):
        for matrix in range(2):
            alone = by_amax(weight.detach()[expert, matrix], float(amax_w[expert, matrix]), "w")
            assert torch.equal(w[expert, matrix], alone)


def test_amaxes_that_are_none() -> None:
    """Not finite: the step counts for the others. Zero: of the tensor itself, as in the first step."""
    history = AmaxHistory(2, ())
    history.record("x", torch.tensor(torch.nan))
    history.record("w", torch.tensor(3.0))
    history.push(history.noted())
    assert history.x.tolist() == [0, 0] and history.w.tolist() == [3, 0] and history.known
    amaxes, cast = DelayedAmaxes(history, OWN_AMAXES), RECIPE.casts.x_fprop
    assert cast is not None
    assert float(amaxes.of("x", cast, lambda: torch.tensor(5.0)) or 0) == 5
    assert float(amaxes.of("w", cast, lambda: torch.tensor(5.0)) or 0) == 3


def test_a_new_step_forgets_what_was_noted_outside_of_steps() -> None:
    history = AmaxHistory(2, ())
    history.record("x", torch.tensor(7.0))
    history.start_step()
    assert history.noted().tolist() == [0, 0, 0]


def test_a_history_that_is_loaded_is_known() -> None:
    history = AmaxHistory(2, ())
    history.load({operand: torch.tensor([2.0, 4.0]) for operand in OPERANDS})
    assert history.known and history.amax("dy") == 4
    history.load({})
    assert not history.known and not history.w.any()
