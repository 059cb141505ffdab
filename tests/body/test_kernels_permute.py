"""The permuting kernels, interpreted, against their reference and against a loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.marks import slow_except
from torch import Tensor

pytest.importorskip("triton", reason="kernels are an extra")

from tests.body.kernel_cases import counting_bytes, poisoned_memory

from moefold.errors import BackendError
from moefold.moe.dispatch.base import Routing
from moefold.moe.kernels import moe_references as permute_torch
from moefold.moe.kernels import permute_triton
from moefold.moe.kernels.moe_references import RowMap, map_padded, map_rows, most_rows
from moefold.moe.permute import group_by_expert_reference
from moefold.ops.kernels.interpret import interpreting


def draw(seed: int) -> tuple[RowMap, Routing, Tensor, int, int]:
    """A routing with empty experts, dropped assignments and odd dims among the cases."""
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    E, L, t = dice.choice((1, 3, 8, 12)), dice.choice((1, 8, 40, 130, 1100)), dice.choice((1, 2, 5, 9))
    K, multiple = dice.randint(1, min(E, 5)), dice.choice((1, 2, 4, 16, 32))
    expert_tK = torch.rand(t, E, generator=generator).argsort(1)[:, :K]
    kept_tK = torch.rand(t, K, generator=generator) > 0.3 if dice.random() < 0.5 else None
    routing = Routing(expert_tK, torch.rand(t, K, generator=generator), kept_tK)
    return map_rows(routing, E, multiple), routing, torch.randn(t, L, generator=generator), E, multiple


def there_and_back(ops: Any, rows: RowMap, x_tL: Tensor, prob_tK: Tensor | None, seed: int) -> dict[str, Tensor]:
    """Both directions with different rows between them, and every gradient."""
    generator = torch.Generator().manual_seed(seed + 1000)
    x_tL = x_tL.clone().requires_grad_()
    probs = [] if prob_tK is None else [prob_tK.clone().requires_grad_()]
    rows_PL, prob_P = ops.permute(x_tL, rows, *probs)
    change_PL = torch.randn(rows_PL.shape, generator=generator).to(x_tL.dtype)
    middle_PL = (rows_PL.detach() + change_PL).requires_grad_()
    y_tL = ops.unpermute(middle_PL, rows, *probs)
    grad_PL = torch.randn(rows_PL.shape, generator=generator).to(x_tL.dtype)
    grad_tL = torch.randn(x_tL.shape, generator=generator).to(x_tL.dtype)
    outputs, grads = [rows_PL, y_tL], [grad_PL, grad_tL]
    if prob_P is not None:
        outputs, grads = outputs + [prob_P], grads + [torch.randn(prob_P.shape, generator=generator)]
    torch.autograd.backward(outputs, grads)
    found = {"rows": rows_PL, "tokens": y_tL, "grad x": x_tL.grad, "grad rows": middle_PL.grad}
    return found | ({} if prob_P is None else {"row probs": prob_P, "grad probs": probs[0].grad})


@pytest.mark.parametrize("seed", slow_except(range(50), *range(12)))
def test_as_the_reference(seed: int) -> None:
    rows, routing, x_tL, _, _ = draw(seed)
    prob_tK = routing.probs if seed % 3 else None
    dtype = torch.bfloat16 if seed % 2 else torch.float32
    x_tL = x_tL.to(dtype)
    with interpreting(), poisoned_memory():
        found = there_and_back(permute_triton, rows, x_tL, prob_tK, seed)
    wanted = there_and_back(permute_torch, rows, x_tL, prob_tK, seed)
    for name in ("rows", "row probs"):
        if name in wanted:
            assert torch.equal(found[name], wanted[name]), name
    # Sums are formed in float32 in both; in bfloat16 each may round its last step differently, by one unit.
    rtol, atol = (2.0**-7, 1e-3) if dtype == torch.bfloat16 else (1e-6, 1e-6)
    for name, value in wanted.items():
        close = {"rtol": rtol, "atol": atol}
        if name == "grad probs":
            # Always float32: a product over L entries of size one, added up in another order.
            close = {"rtol": 1e-5, "atol": 1e-6 * x_tL.shape[1] ** 0.5}
        torch.testing.assert_close(found[name], value, **close, msg=lambda words, name=name: f"{name}: {words}")


@pytest.mark.parametrize("seed", range(20))
def test_the_map_against_a_loop(seed: int) -> None:
    rows, routing, _, E, multiple = draw(seed)
    row_N = rows.row_tK.flatten().tolist()
    start = 0
    for expert, assignments in enumerate(group_by_expert_reference(routing, E)):
        assert rows.start_E[expert] == start and rows.count_E[expert] == len(assignments)
        assert [row_N[assignment] for assignment in assignments] == list(range(start, start + len(assignments)))
        start += -(-len(assignments) // multiple) * multiple
    assert rows.start_E[E] == start <= rows.num_rows


@pytest.mark.parametrize("seed", range(10))
def test_slots_against_a_loop(seed: int) -> None:
    _, routing, _, E, slots = draw(seed)
    rows = map_padded(routing, E, slots)
    row_N = rows.row_tK.flatten().tolist()
    for expert, assignments in enumerate(group_by_expert_reference(routing, E)):
        here = [expert * slots + place if place < slots else -1 for place in range(len(assignments))]
        assert [row_N[assignment] for assignment in assignments] == here
        assert rows.start_E[expert] == expert * slots and rows.count_E[expert] == min(len(assignments), slots)
    assert rows.num_rows == rows.start_E[E] == E * slots


def test_the_bound_is_reached() -> None:
    """Experts that take one token each waste the most."""
    routing = Routing(torch.arange(6)[:, None], torch.ones(6, 1), None)
    rows = map_rows(routing, 6, 16)
    assert rows.start_E[-1] == rows.num_rows == most_rows(6, 6, 16) == 96


@pytest.mark.parametrize("dim", (40, 1500))
def test_moves_the_bytes_it_says(dim: int) -> None:
    """Without padding; where each expert's rows begin and end is read once per launch."""
    t, K, E = 6, 3, 5
    expert_tK = torch.rand(t, E, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :K]
    prob_tK, x_tL = torch.rand(t, K), torch.randn(t, dim).bfloat16()
    rows = map_rows(Routing(expert_tK, prob_tK, None), E)
    with counting_bytes() as moved:
        rows_PL, prob_P = permute_triton._launch_scatter(x_tL, rows, probs_out=prob_tK)
    assert moved[0] - 4 * (2 * E + 1) == t * permute_triton.scatter_traffic(dim, K).moved
    with counting_bytes() as moved:
        permute_triton._launch_reduce(rows_PL, rows, probs_in=prob_P)
    assert moved[0] == t * permute_triton.scatter_traffic(dim, K).moved
    with counting_bytes() as moved:
        permute_triton._launch_reduce(rows_PL, rows, weigh=prob_tK)
    assert moved[0] == t * permute_triton.reduce_traffic(dim, K).moved
    with counting_bytes() as moved:
        permute_triton._launch_scatter_and_dot(x_tL, rows_PL, prob_tK, rows)
    assert moved[0] - 4 * (2 * E + 1) == t * permute_triton.scatter_and_dot_traffic(dim, K).moved


def test_float64_is_refused() -> None:
    rows, _, x_tL, _, _ = draw(0)
    with pytest.raises(BackendError, match="float64 use torch"):
        permute_triton.permute(x_tL.double(), rows)
    with pytest.raises(BackendError, match="float64 use torch"):
        permute_triton.unpermute(x_tL.double(), rows)
