"""The reference of `ParameterMatmul`: the weight is cast, and both gradients are autograd's, which saves the cast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn import functional as F

from moefold.nn.matmul_kernels import GroupedMatmul
from moefold.parallel import rank_interfaces


class AutogradMatmul:
    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.flatten(0, -2).to(x.dtype))

    def grouped(
        self, matmul: GroupedMatmul, rows: Tensor, weight: Tensor, rows_per_expert_e: Tensor, host: list[int] | None
    ) -> Tensor:
        return matmul(rows, weight.flatten(1, -2).to(rows.dtype), rows_per_expert_e, host)


@contextmanager
def matmuls_by_autograd() -> Iterator[None]:
    """Local models that are built inside have the reference's matmuls."""
    before = rank_interfaces.matmul_policy_named
    rank_interfaces.matmul_policy_named = lambda *_: AutogradMatmul()  # type: ignore[assignment]
    try:
        yield
    finally:
        rank_interfaces.matmul_policy_named = before
