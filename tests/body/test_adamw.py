from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.config.optim import OptimConfig, OptimImplementation
from moefold.optim.optimizer import adamw


def test_decay_is_for_matrices() -> None:
    parameters = {kind: nn.Parameter(torch.ones(2)) for kind in ("matrix", "expert", "router", "norm", "bias", "sink")}
    for parameter in parameters.values():
        parameter.grad = torch.zeros(2)
    adamw(((p, kind) for kind, p in parameters.items()), OptimConfig(lr=0.1, weight_decay=0.5)).step()
    for kind, parameter in parameters.items():
        expected = 1.0 if kind in ("norm", "bias", "sink") else 1.0 - 0.1 * 0.5
        torch.testing.assert_close(parameter.detach(), torch.full((2,), expected), msg=kind)


@pytest.mark.parametrize("implementation", get_args(OptimImplementation))
def test_one_step_is_the_textbook_step(implementation: OptimImplementation) -> None:
    config = OptimConfig(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, implementation=implementation)
    parameter = nn.Parameter(torch.tensor([2.0, -3.0], dtype=torch.float64))
    parameter.grad = torch.tensor([0.5, 0.25], dtype=torch.float64)
    before, gradient = parameter.detach().clone(), parameter.grad.clone()
    adamw([(parameter, "matrix")], config).step()
    # After one step both bias-corrected moments are the gradient and its square.
    expected = before * (1 - 0.01 * 0.1) - 0.01 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(parameter.detach(), expected)


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        self.names.add(op._schema.name.removeprefix("aten::"))
        return op(*args, **kwargs or {})


def test_the_named_implementation_is_the_one_that_runs() -> None:
    marks = {"fused": "_fused_adamw_", "foreach": "_foreach_addcdiv_", "for_loop": "addcdiv_"}
    for implementation in get_args(OptimImplementation):
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        with _Operations() as seen:
            adamw([(parameter, "matrix")], OptimConfig(implementation=implementation)).step()
        assert seen.names & set(marks.values()) == {marks[implementation]}
