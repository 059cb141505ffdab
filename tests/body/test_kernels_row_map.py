"""The row map's kernels, interpreted, against the map made by sorting: exactly the same."""

from __future__ import annotations

import random

import pytest
import torch
from tests.marks import slow_except

pytest.importorskip("triton", reason="kernels are an extra")

from tests.body.kernel_cases import counting_bytes, poisoned_memory

from moefold.moe.dispatch.base import Routing
from moefold.moe.kernels import row_map_triton
from moefold.moe.kernels.moe_references import map_rows
from moefold.ops.kernels.interpret import interpreting


def draw(seed: int) -> tuple[Routing, int, int]:
    """Assignments that fill no block, one block and several; experts without any; dropped assignments."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    experts, tokens = dice.choice((1, 5, 8, 60, 256)), dice.choice((1, 3, 128, 300))
    top_k = dice.randint(1, min(experts, 4))
    expert_tK = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
    kept_tK = torch.rand(tokens, top_k, generator=generator) > 0.3 if dice.random() < 0.5 else None
    return Routing(expert_tK, torch.ones(tokens, top_k), kept_tK), experts, dice.choice((1, 16, 32))


@pytest.mark.parametrize("seed", slow_except(range(50), *range(12)))
def test_as_the_reference(seed: int) -> None:
    case = draw(seed)
    with interpreting(), poisoned_memory():
        found = row_map_triton.map_rows(*case)
    wanted = map_rows(*case)
    assert found.num_rows == wanted.num_rows and map_rows(*case, num_rows=7).num_rows == 7
    for name in ("row_tK", "start_E", "count_E"):
        ours, references = getattr(found, name), getattr(wanted, name)
        assert ours.dtype == references.dtype == torch.int32 and torch.equal(ours, references), name


def test_moves_the_bytes_it_says() -> None:
    """Where experts' rows begin, and how many they have, is beside the tokens."""
    experts, top_k, tokens = 8, 2, row_map_triton.BLOCK
    expert_tK = torch.rand(tokens, experts).argsort(1)[:, :top_k]
    with counting_bytes() as moved:
        row_map_triton.map_rows(Routing(expert_tK, torch.ones(tokens, top_k), None), experts)
    # The three launches are counted as one here: experts that are read a second time are not in the count.
    again = tokens * 8 * top_k
    assert moved[0] == tokens * row_map_triton.traffic(experts, top_k).moved - again + 4 * (3 * experts + 1)
