"""From gradients to parameters: AdamW, weight decay, clipping and learning rates, written out number by number.

AdamW is algorithm 2 of Loshchilov and Hutter 2019 (decoupled decay, bias correction), in Python floats. The norm and
its bound are also compared with torch's `clip_grad_norm_`, the schedules with torch's `lr_scheduler`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.staged_runs import microbatches, share_on
from torch import nn
from torch.optim import lr_scheduler

from moefold.config.attention import GQAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig
from moefold.config.optim import LRScheduleConfig, OptimConfig
from moefold.config.precision import KernelsConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.optim.lr_schedule import lr_at
from moefold.optim.optimizer import clip_gradients, sum_of_squares
from moefold.pipeline.runtime import run_schedule
from moefold.pipeline.step import make_optimizer, run_step

OPTIM = OptimConfig(lr=0.03, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2, clip_norm=0.05)
MODEL = ModelConfig(
    vocab_size=11,
    dim=8,
    num_layers=1,
    attention=GQAConfig(
        num_heads=2, num_kv_heads=1, head_dim=4, qkv_bias=True, out_bias=True, sinks=True, qk_norm="head"
    ),
    moe=MoEConfig(
        num_experts=2, top_k=1, expert_hidden_dim=4, expert_mlp_bias=True, router=RouterConfig(logit_bias=True)
    ),
    init_std=0.3,
)
RUN = RunConfig(
    model=MODEL,
    optim=OPTIM,
    precision=PrecisionConfig(params="float64", compute="float64"),
    kernels=KernelsConfig(experts="sequential"),
)


class Number:
    """One parameter element with its two moments."""

    def __init__(self, value: float) -> None:
        self.value, self.first, self.second, self.steps = value, 0.0, 0.0, 0

    def step(self, gradient: float, lr: float, decay: float) -> None:
        self.steps += 1
        self.first = OPTIM.beta1 * self.first + (1 - OPTIM.beta1) * gradient
        self.second = OPTIM.beta2 * self.second + (1 - OPTIM.beta2) * gradient**2
        first = self.first / (1 - OPTIM.beta1**self.steps)
        second = self.second / (1 - OPTIM.beta2**self.steps)
        self.value -= lr * decay * self.value + lr * first / (math.sqrt(second) + OPTIM.eps)


def is_decayed(name: str) -> bool:
    """Matrices, tables and experts decay; norms, biases and sinks do not."""
    return not ("norm" in name or name.endswith(("bias", "sinks")))


def test_four_steps_of_a_model_by_hand() -> None:
    """Gradients, one norm over all of them, one bound, one update, at a learning rate that changes."""
    share, batches = share_on(RUN), microbatches(RUN, ((6, 4), (5,)), seed=1)
    named = dict(share.model.named_parameters())
    optimizer = make_optimizer(share)
    numbers = {name: [Number(x) for x in value.detach().flatten().tolist()] for name, value in named.items()}
    assert {is_decayed(name) for name in named} == {True, False}
    for lr in (0.03, 0.02, 0.05, 0.01):
        share.model.zero_grad()
        run_schedule(share, batches)
        gradients = {name: _flat(value) for name, value in named.items()}
        norm = math.sqrt(sum(g * g for gradient in gradients.values() for g in gradient))
        assert norm > 2 * OPTIM.clip_norm, "the bound must bind"
        for name, gradient in gradients.items():
            for number, g in zip(numbers[name], gradient, strict=True):
                number.step(g * OPTIM.clip_norm / norm, lr, OPTIM.weight_decay if is_decayed(name) else 0.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        assert float(run_step(share, optimizer, batches).grad_norm) == pytest.approx(norm, rel=1e-12)
        for name, value in named.items():
            want = torch.tensor([number.value for number in numbers[name]], dtype=torch.float64)
            torch.testing.assert_close(value.detach().flatten(), want, rtol=1e-11, atol=1e-13, msg=name)


def _flat(parameter: nn.Parameter) -> list[float]:
    assert parameter.grad is not None
    flat: list[float] = parameter.grad.flatten().tolist()
    return flat


@pytest.mark.parametrize("bound", [0.5, 1e6])
def test_the_norm_and_its_bound_are_torchs(bound: float) -> None:
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (4097,), (2, 2, 2))]
    theirs = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(theirs, gradients, strict=True):
        parameter.grad = gradient.clone()
    want = nn.utils.clip_grad_norm_(theirs, bound)
    norm = torch.stack([sum_of_squares(gradient) for gradient in gradients]).sum().sqrt()
    torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
    clip_gradients(gradients, norm, bound)
    for gradient, parameter in zip(gradients, theirs, strict=True):
        # torch adds 1e-6 to the norm that it divides by.
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0)


PEAK, STEPS, WARMUP = 0.4, 50, 7


def ours(**words: Any) -> list[float]:
    optim = OptimConfig(lr=PEAK, lr_schedule=LRScheduleConfig(warmup=WARMUP, **words))
    return [lr_at(step, STEPS, optim) for step in range(1, STEPS + 1)]


def rise(step: int) -> float:
    return PEAK * step / WARMUP


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_learning_rates_are_their_formulas(floor: float) -> None:
    """Steps count from 1. Warmup ends at the peak, and the last step is at the floor."""
    low = floor * PEAK
    for step, (constant, linear, cosine, wsd) in enumerate(
        zip(*(ours(kind=kind, floor=floor, decay=12) for kind in ("constant", "linear", "cosine", "wsd"))), start=1
    ):
        after = (step - WARMUP) / (STEPS - WARMUP)
        before_end = max(0.0, (step - (STEPS - 12)) / 12)
        falls = step > WARMUP
        assert constant == pytest.approx(PEAK if falls else rise(step))
        assert linear == pytest.approx(PEAK - (PEAK - low) * after if falls else rise(step))
        assert cosine == pytest.approx(
            low + (PEAK - low) * (1 + math.cos(math.pi * after)) / 2 if falls else rise(step)
        )
        assert wsd == pytest.approx(PEAK - (PEAK - low) * before_end if falls else rise(step))


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_learning_rates_are_torchs(kind: str) -> None:
    """torch counts steps taken: its value after n steps is ours for step n."""
    low = 0.1 * PEAK
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    warmup = lr_scheduler.LambdaLR(optimizer, lambda taken: taken / WARMUP)
    fall: lr_scheduler.LRScheduler
    if kind == "cosine":
        fall = lr_scheduler.CosineAnnealingLR(optimizer, STEPS - WARMUP, low)
    else:
        fall = lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS - WARMUP)
    whole = lr_scheduler.SequentialLR(optimizer, [warmup, fall], [WARMUP])
    theirs = []
    for _ in range(STEPS):
        optimizer.step()
        whole.step()
        theirs.append(optimizer.param_groups[0]["lr"])
    assert ours(kind=kind, floor=0.1) == pytest.approx(theirs)
