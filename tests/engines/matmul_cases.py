"""Cases that every adapter of a grouped GEMM is held to: the reference's values and gradients, also when deferred."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moefold.nn.matmul_kernels import ENGINE_MATMULS, GroupedMatmul, sequential
from moefold.nn.matmul_policy import ParameterMatmul, WeightGradQueue

# Experts without rows, with one row, with whole blocks, and with more than one block.
COUNTS = {"ragged": [3, 0, 129, 1], "aligned": [128, 0, 256, 128], "none": [0, 0, 0, 0]}
DIM, HIDDEN = 32, 64


class Case(NamedTuple):
    rows: Tensor
    weight: nn.Parameter
    counts: list[int]
    grad: Tensor


def case(counts: list[int]) -> Case:
    """Whole numbers small enough that every sum is exact in bfloat16 or, for weight gradients, rounded once."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).bfloat16()

    weight = nn.Parameter(draw(len(counts), HIDDEN, DIM))
    return Case(draw(sum(counts), DIM), weight, counts, draw(sum(counts), HIDDEN))


class Outcome(NamedTuple):
    out: Tensor
    rows_grad: Tensor
    weight_grad: Tensor


def outcome(matmul: GroupedMatmul, given: Case, deferred: bool, host: bool) -> Outcome:
    rows = given.rows.clone().requires_grad_()
    weight = nn.Parameter(given.weight.detach().clone())
    queue = WeightGradQueue()
    policy = ParameterMatmul(queue if deferred else None)
    out = policy.grouped(matmul, rows, weight, torch.tensor(given.counts), given.counts if host else None)
    with queue.deferring("microbatch"):
        out.backward(given.grad)
    assert (weight.grad is None) == deferred
    queue.run_all()
    assert rows.grad is not None and weight.grad is not None
    return Outcome(out.detach(), rows.grad, weight.grad)


def assert_equals_reference(name: str, counts: list[int], deferred: bool, host: bool = True) -> None:
    given = case(counts)
    got, wanted = outcome(ENGINE_MATMULS[name], given, deferred, host), outcome(sequential, given, False, True)
    for field, value, reference in zip(Outcome._fields, got, wanted, strict=True):
        assert value.dtype == reference.dtype == torch.bfloat16
        assert torch.equal(value, reference), field
