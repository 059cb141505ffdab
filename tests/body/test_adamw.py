"""The optimizer of a model: rules by group, torch's AdamW in the named implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.config.memory import MemoryConfig
from moefold.config.optim import OptimConfig, OptimImplementation, ParamGroupConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.optim.chunked_adamw import ChunkedAdamW
from moefold.optim.optimizer import ModelOptimizer, OptimizerInputs, TorchAdamW, build_optimizer

KINDS = ("matrix", "expert", "router", "norm", "bias", "sink")


@dataclass(frozen=True)
class Shard:
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WholePiece:
    name: str
    kind: str
    parameter: nn.Parameter

    @property
    def shard(self) -> Shard:
        return Shard(tuple(self.parameter.shape))

    @property
    def boxes(self) -> tuple[tuple[slice, ...], ...]:
        return (tuple(slice(0, size) for size in self.parameter.shape),)


def optimizer_of(parameters: dict[str, tuple[str, nn.Parameter]], config: OptimConfig, **run: Any) -> ModelOptimizer:
    pieces = [WholePiece(name, kind, parameter) for name, (kind, parameter) in parameters.items()]
    return build_optimizer(pieces, OptimizerInputs(RunConfig(optim=config, **run), torch.device("cpu")))


def of_every_kind(gradient: float) -> dict[str, tuple[str, nn.Parameter]]:
    parameters = {f"layers.0.{kind}": (kind, nn.Parameter(torch.ones(2))) for kind in KINDS}
    for _, parameter in parameters.values():
        parameter.grad = torch.full((2,), gradient)
    return parameters


def test_decay_is_for_matrices() -> None:
    parameters = of_every_kind(0.0)
    optimizer_of(parameters, OptimConfig(lr=0.1, weight_decay=0.5)).step()
    for kind, parameter in parameters.values():
        expected = 1.0 if kind in ("norm", "bias", "sink") else 1.0 - 0.1 * 0.5
        torch.testing.assert_close(parameter.detach(), torch.full((2,), expected), msg=kind)


@pytest.mark.parametrize("on", ["device", "host"])
def test_groups_change_lr_and_decay_and_the_first_match_counts(on: str) -> None:
    groups = (
        ParamGroupConfig("*.router", lr_scale=0.5, weight_decay=0.0),
        ParamGroupConfig("*.norm", weight_decay=0.25),
        ParamGroupConfig("layers.0.r*", lr_scale=7.0),
        ParamGroupConfig("*.expert", lr_scale=2.0),
    )
    parameters = of_every_kind(1.0)
    memory = MemoryConfig(optimizer=on)  # type: ignore[arg-type]
    optimizer = optimizer_of(parameters, OptimConfig(weight_decay=0.5, groups=groups), memory=memory)
    lr = 0.1
    optimizer.set_lr(lr)
    optimizer.step()
    # The first step moves every weight by its lr, beside the decay.
    expected = {
        "matrix": 1 - lr * 0.5 - lr,
        "expert": 1 - 2 * lr * 0.5 - 2 * lr,
        "router": 1 - lr / 2,
        "norm": 1 - lr * 0.25 - lr,
        "bias": 1 - lr,
        "sink": 1 - lr,
    }
    for kind, parameter in parameters.values():
        torch.testing.assert_close(parameter.detach(), torch.full((2,), expected[kind]), msg=kind)


@pytest.mark.parametrize("implementation", get_args(OptimImplementation))
@pytest.mark.parametrize("on", ["device", "host", "cpu"])
def test_one_step_is_the_textbook_step(implementation: OptimImplementation, on: str) -> None:
    config = OptimConfig(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, implementation=implementation)
    parameter = nn.Parameter(torch.tensor([2.0, -3.0], dtype=torch.float64))
    parameter.grad = torch.tensor([0.5, 0.25], dtype=torch.float64)
    before, gradient = parameter.detach().clone(), parameter.grad.clone()
    precision, memory = PrecisionConfig("float64", "float64"), MemoryConfig(optimizer=on)  # type: ignore[arg-type]
    optimizer_of({"a": ("matrix", parameter)}, config, precision=precision, memory=memory).step()
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
            optimizer_of({"a": ("matrix", parameter)}, OptimConfig(implementation=implementation)).step()
        assert seen.names & set(marks.values()) == {marks[implementation]}


def test_torchs_adamw_serves_what_it_can() -> None:
    """Any other format or place of states needs our own."""
    run = RunConfig()
    own = [
        replace(run, precision=PrecisionConfig(moments="bfloat16")),
        replace(run, precision=PrecisionConfig(moments="float8", moments_rounding="stochastic")),
        replace(run, precision=PrecisionConfig("bfloat16", moments="float32")),
        replace(run, precision=PrecisionConfig(master="remainder")),
        replace(run, memory=MemoryConfig(optimizer="host")),
    ]
    torchs = [
        run,
        replace(run, precision=PrecisionConfig(moments="float32")),
        RunConfig(precision=PrecisionConfig("bfloat16")),
    ]
    for wanted, runs in ((ChunkedAdamW, own), (TorchAdamW, torchs)):
        for each in runs:
            inputs = OptimizerInputs(each, torch.device("cpu"))
            optimizer = build_optimizer([WholePiece("a", "matrix", nn.Parameter(torch.ones(2)))], inputs)
            assert [type(part) for part in optimizer.parts] == [wanted]


def test_a_rank_without_parameters_has_an_optimizer() -> None:
    optimizer = build_optimizer([], OptimizerInputs(RunConfig(), torch.device("cpu")))
    optimizer.set_lr(0.1)
    optimizer.step()
