"""Grouped experts with kernels equal those with torch operations, with the references and with Triton."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from tests.marks import slow_except
from torch import Tensor

from moefold.config.moe import MoEConfig
from moefold.moe.dispatch.base import ExpertInput, Routing
from moefold.moe.experts import ExpertBackend, Experts
from moefold.moe.grouped_experts import (
    GroupedExperts,
    KernelPermutation,
    TorchPermutation,
    kernel_activation,
    torch_activation,
)
from moefold.moe.moe_kernels import torch_kernels, triton_kernels
from moefold.nn.matmul_kernels import sequential
from moefold.nn.matmul_policy import ParameterMatmul

WIDTH, SOURCES, E, K = 16, 7, 4, 3


def config(weight_at: str, bias: bool, activation: str) -> MoEConfig:
    return MoEConfig(
        num_experts=E, expert_hidden_dim=8, top_k=K, weight_at=weight_at, expert_mlp_bias=bias, activation=activation
    )  # type: ignore[arg-type]


def arrive(dtype: torch.dtype, capacity: int | None) -> ExpertInput:
    """Source rows with several assignments here, some of them not kept, and none to expert 2."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(SOURCES, WIDTH, dtype=dtype, generator=generator).requires_grad_()
    expert = torch.tensor([0, 1, 3])[torch.rand(SOURCES, 3, generator=generator).argsort(1)]
    weight = torch.rand(SOURCES, K, dtype=dtype, generator=generator).requires_grad_()
    kept = torch.rand(SOURCES, K, generator=generator) > 0.3
    counts = torch.bincount(expert[kept], minlength=E) if capacity is None else torch.full((E,), capacity)
    return ExpertInput(rows, Routing(expert, weight, kept), counts, counts.tolist(), capacity, None)


def run(backend: ExpertBackend, moe: MoEConfig, dtype: torch.dtype, capacity: int | None) -> list[Tensor]:
    torch.manual_seed(0)
    experts = Experts(moe, WIDTH, backend).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    expert_in = arrive(dtype, capacity)
    out = experts(expert_in)
    leaves = [expert_in.rows_RL, expert_in.assignments.probs, *experts.parameters()]
    return [out, *torch.autograd.grad(out, leaves, torch.randn(out.shape, dtype=dtype))]


CASES = list(product(("activation", "output"), (False, True), ("swiglu", "clamped_swiglu"), (None, 6)))


@pytest.mark.parametrize(("weight_at", "bias", "activation", "capacity"), slow_except(CASES, *CASES[::3]))
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_as_between_torch_operations(
    kernels: str, weight_at: str, bias: bool, activation: str, capacity: int | None
) -> None:
    moe, matmul_policy = config(weight_at, bias, activation), ParameterMatmul()
    dtype, scope, made = torch.float64, nullcontext, torch_kernels
    if kernels == "triton":
        scope, made, dtype = _interpreting(), triton_kernels, torch.float32
    with scope():
        parts = KernelPermutation(made()), kernel_activation(made(), activation)
        found = run(GroupedExperts(moe, matmul_policy, sequential, *parts), moe, dtype, capacity)
    parts = TorchPermutation(), torch_activation(activation)
    wanted = run(GroupedExperts(moe, matmul_policy, sequential, *parts), moe, dtype, capacity)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _interpreting() -> Callable[[], object]:
    pytest.importorskip("triton", reason="kernels are an extra")
    from moefold.ops.kernels.interpret import interpreting

    return interpreting
