"""In capacity-padded mode an MoE layer's forward and backward read nothing back from the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.sync_free import HostSyncError, shapes_of, sync_free
from torch import Tensor

from moefold.config.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig
from moefold.moe.dispatch.base import LocalDispatcher
from moefold.moe.expert_backends import grouped_experts
from moefold.moe.experts import Experts
from moefold.moe.router import Router
from moefold.moe.topk import capacity_of
from moefold.nn.batch import whole_batch
from moefold.nn.matmul_kernels import grouped
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.nn.parallel_interfaces import LocalTokens

WIDTH, TOKENS, SHARDS = 16, 24, 3
BALANCE = BalanceConfig(microbatch=0.1, sequence=0.1, global_batch=0.1, device=0.1, device_groups=4, z=0.1)
PADDED = MoEConfig(
    balance=BALANCE, capacity=CapacityConfig(factor=1.25, pad=True), expert_mlp_bias=True, expert_hidden_dim=16
)


def slots_of(config: MoEConfig) -> int | None:
    """Shards of the microbatch have capacities of their own, which may add up to a little more than the whole's."""
    capacity = config.capacity
    if capacity is None or not capacity.pad:
        return None
    shards = SHARDS if capacity.scope == "local" else 1
    return shards * capacity_of(TOKENS // shards, capacity.factor, config.top_k, config.num_experts)


def layer(config: MoEConfig, dtype: torch.dtype) -> Callable[[Tensor], None]:
    """An MoE layer on one process, as a function that runs it forward and backward."""
    torch.manual_seed(0)
    router, dispatcher = Router(config, WIDTH, LocalTokens()), LocalDispatcher(config.num_experts, slots_of(config))
    experts = Experts(config, WIDTH, grouped_experts(config, ParameterMatmul(), grouped)).to(dtype)
    for parameter in (*router.parameters(), *experts.parameters()):
        torch.nn.init.normal_(parameter)
    token, earlier_E = torch.arange(TOKENS), torch.ones(config.num_experts, dtype=torch.int64)
    lengths, divisors = (TOKENS // 2,) * 2, {"step_labels": TOKENS, "step_tokens": TOKENS, "step_sequences": 2}
    batch = whole_batch(token, token, lengths, tensor_size=SHARDS, **divisors)
    # Which tokens belong together comes from lengths that the host knows. It is written to the device once per batch,
    # when the batch is first asked, and read by all layers: here, before anyone watches this one.
    assert batch.shards and batch.microbatches and batch.documents

    def forward_and_backward(x_tD: Tensor) -> None:
        routing, report = router(x_tD, batch, earlier_E)
        arrived = dispatcher.dispatch(x_tD, routing)
        y_tD = dispatcher.combine(experts(arrived), arrived.ticket)
        (y_tD.float().square().sum() + sum(report.losses)).backward()

    return forward_and_backward


def tokens(dtype: torch.dtype, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["topk", "sinkhorn", "expert_choice", "balanced"])
@pytest.mark.parametrize("scope", ["full", "local"])
@pytest.mark.parametrize("drop", ["probability", "position"])
def test_padded_mode_never_waits(dtype: torch.dtype, kind: Any, scope: Any, drop: Any) -> None:
    capacity = CapacityConfig(factor=1.25, pad=True, scope=scope, drop=drop)
    run, x = layer(replace(PADDED, router=RouterConfig(kind=kind), capacity=capacity), dtype), tokens(dtype)
    with sync_free():
        run(x)
    assert x.grad is not None and x.grad.isfinite().all() and x.grad.abs().sum() > 0


def test_deepseek_routing_never_waits() -> None:
    router = RouterConfig(
        score="sigmoid", normalize=True, num_groups=4, top_groups=2, group_score="topk_sum", expert_bias=True
    )
    with sync_free():
        layer(replace(PADDED, router=router), torch.float32)(tokens(torch.float32))


def test_padded_shapes_do_not_depend_on_data() -> None:
    run = layer(PADDED, torch.float32)
    run(tokens(torch.float32))  # creates the gradients that the later runs add to
    second, third = (shapes_of(lambda seed=seed: run(tokens(torch.float32, seed))) for seed in (2, 3))
    assert second == third


def test_dropless_mode_is_caught() -> None:
    with pytest.raises(HostSyncError, match=r"tolist reads values on the host, at .*base\.py"), sync_free():
        layer(replace(PADDED, capacity=None), torch.float32)(tokens(torch.float32))


def test_dropping_without_padding_is_caught() -> None:
    config = replace(PADDED, capacity=CapacityConfig(factor=0.5))
    with pytest.raises(HostSyncError, match=r"base\.py"), sync_free():
        layer(config, torch.float32)(tokens(torch.float32))
    shapes = [shapes_of(lambda seed=seed: layer(config, torch.float32)(tokens(torch.float32, seed))) for seed in (1, 2)]
    assert shapes[0] != shapes[1]


@pytest.mark.parametrize(
    "offence",
    [
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.long().abs().flatten().unique(),
        lambda x: x.long().abs().flatten().bincount(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.flatten().repeat_interleave(torch.ones(x.numel(), dtype=torch.int64)),
        lambda x: x.to("meta"),
    ],
)
def test_the_checker_can_fail(offence: Callable[[Tensor], object]) -> None:
    with pytest.raises(HostSyncError), sync_free():
        offence(torch.ones(3, 3))


def test_the_checker_sees_backward() -> None:
    class ReadsInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * grad.sum().item()

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(HostSyncError), sync_free():
        ReadsInBackward.apply(x).sum().backward()
