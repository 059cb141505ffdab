"""How much the host does for one MoE layer, held so that it only falls; docs/host-overhead.md has the numbers.

On one rank, and with its experts on several (``tests/ep_layer.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from tests import ep_layer
from tests.compiled_launches import compiled_counted
from tests.ep_layer import Kernels, layer_work, triton_and_compiled_counted, triton_counted
from tests.host_work import HostWork, count_host_work
from tests.marks import slow_except
from torch import Tensor

from moefold.config.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig
from moefold.config.parallel import NamedDispatcher
from moefold.moe import routing_policies as select
from moefold.moe.dispatch.base import LocalDispatcher
from moefold.moe.expert_backends import expert_backend
from moefold.moe.experts import Experts
from moefold.moe.moe_kernels import MOE_IN_TORCH
from moefold.moe.router import Router
from moefold.moe.topk import capacity_of, choose_topk_reference
from moefold.nn.batch import whole_batch
from moefold.nn.capture_rules import HOST_READS
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.nn.parallel_interfaces import LocalTokens

TOKENS, WIDTH = 64, 32
MOE = MoEConfig(
    num_experts=8,
    top_k=2,
    expert_hidden_dim=16,
    router=RouterConfig(normalize=True),
    balance=BalanceConfig(microbatch=0.01),
)
PADDED = replace(MOE, capacity=CapacityConfig(factor=1.25, pad=True))
# Engine, sizes; then the most launches forward and backward, and waits of both together.
HELD: dict[str, tuple[str, MoEConfig, int, int, int]] = {
    "padded": ("grouped", PADDED, 70, 39, 0),
    "dropless": ("grouped", MOE, 35, 37, 1),
    "dropless, fused": ("fused", MOE, 59, 68, 1),
}
# With experts on two ranks: kernels, dispatcher, padded or dropless; then the same.
KERNELS: dict[str, Kernels] = {
    "torch": lambda: nullcontext(MOE_IN_TORCH),
    "triton": triton_counted,
    "torch, compiled": compiled_counted,
    "triton, compiled": triton_and_compiled_counted,
}
EP_HELD: dict[tuple[str, str, str], tuple[int, int, int]] = {
    ("all_to_all", "dropless", "torch"): (39, 35, 1),
    ("all_to_all", "dropless", "triton"): (33, 25, 1),
    ("all_to_all", "dropless", "torch, compiled"): (35, 26, 1),
    ("all_to_all", "dropless", "triton, compiled"): (32, 25, 1),
    ("all_to_all", "padded", "torch"): (69, 39, 0),
    ("all_to_all_aligned", "dropless", "torch"): (48, 42, 1),
    ("all_to_all_aligned", "padded", "torch"): (78, 46, 0),
    ("all_to_all_bounded", "dropless", "torch"): (95, 40, 0),
    ("deduplicated", "dropless", "torch"): (65, 38, 1),
    ("two_level", "dropless", "torch"): (104, 45, 1),
    ("all_gather", "dropless", "torch"): (44, 38, 1),
    ("all_gather", "padded", "torch"): (77, 40, 0),
    ("symmetric_memory", "dropless", "torch"): (55, 46, 1),
    ("symmetric_memory", "padded", "torch"): (94, 52, 0),
}
# The most for any of them, and the launches of version 0.1 by the same count, with all_to_all and torch.
MOST_LAUNCHES, IN_0_1 = 251, 120
PAGE = Path(__file__).parents[2] / "docs" / "host-overhead.md"


def moe_layer(engine: str, config: MoEConfig) -> Callable[[], Tensor]:
    """One MoE layer in bfloat16 without a shared expert, as a function that runs its forward."""
    torch.manual_seed(0)
    slots = None if config.capacity is None else capacity_of(TOKENS, config.capacity.factor, config.top_k, 8)
    router, dispatcher = Router(config, WIDTH, LocalTokens()), LocalDispatcher(config.num_experts, slots)
    experts = Experts(config, WIDTH, expert_backend(engine, ParameterMatmul())(config)).bfloat16()
    for parameter in (*router.parameters(), *experts.parameters()):
        torch.nn.init.normal_(parameter)
    token = torch.arange(TOKENS)
    batch = whole_batch(token, token, (TOKENS,), step_labels=TOKENS, step_tokens=TOKENS, step_sequences=1)
    assert batch.shards and batch.microbatches and batch.documents
    x_tD = torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_()

    def forward() -> Tensor:
        routing, report = router(x_tD, batch, None)
        arrived = dispatcher.dispatch(x_tD, routing)
        y_tD = dispatcher.combine(experts(arrived), arrived.ticket)
        return y_tD.float().sum() + sum(report.losses)

    return forward


def work_of(engine: str, config: MoEConfig) -> tuple[HostWork, HostWork]:
    forward = moe_layer(engine, config)
    forward().backward()
    made: list[Tensor] = []
    ahead = count_host_work(lambda: made.append(forward()))
    return ahead, count_host_work(made[0].backward)


@pytest.mark.parametrize("name", HELD)
def test_launches_and_waits_only_fall(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, config, forward, backward, waits = HELD[name]
    if engine != "fused":
        # What a GPU does: the other way to choose is for CPUs.
        monkeypatch.setattr(select, "choose_topk", choose_topk_reference)
    ahead, back = work_of(engine, config)
    found = (ahead.num_launches, back.num_launches, len(ahead.waits) + len(back.waits))
    assert found == (forward, backward, waits), f"{name}: {found}; fewer is good news: write it here and in {PAGE.name}"


@pytest.mark.parametrize(("dispatcher", "rows", "kernels"), slow_except(EP_HELD, ("all_to_all", "dropless", "torch")))
def test_launches_and_waits_with_expert_parallelism_only_fall(dispatcher: str, rows: str, kernels: str) -> None:
    if "triton" in kernels:
        pytest.importorskip("triton", reason="kernels are an extra")
    work = layer_work(dispatcher, ep_layer.PADDED if rows == "padded" else ep_layer.MOE, KERNELS[kernels])
    held = EP_HELD[dispatcher, rows, kernels]
    assert work.found == held, f"{work.found}, {work}; fewer is good news: write it here and in {PAGE.name}"


def test_no_dispatcher_reads_more_than_once_and_fixed_sizes_read_nothing() -> None:
    for (dispatcher, rows, _), (forward, backward, waits) in EP_HELD.items():
        reads_nothing = rows == "padded" or dispatcher == "all_to_all_bounded"
        assert waits == (0 if reads_nothing else 1) and forward + backward <= MOST_LAUNCHES
    assert sum(EP_HELD["all_to_all", "dropless", "triton"][:2]) <= IN_0_1 / 2
    assert {dispatcher for dispatcher, _, _ in EP_HELD} >= set(get_args(NamedDispatcher))


def test_the_page_has_these_numbers() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, (_, _, forward, backward, waits) in HELD.items():
        assert f"| {name} | {forward} | {backward} | {waits} |" in page
    for case, (forward, backward, waits) in EP_HELD.items():
        assert f"| {' | '.join(case)} | {forward} | {backward} | {forward + backward} | {waits} |" in page


def test_the_counter_sees_waits_and_leaves_views_out() -> None:
    x = torch.randn(4, 4)
    assert count_host_work(lambda: x.t()[:2].unsqueeze(0).detach()).num_launches == 0
    seen = count_host_work(lambda: (x @ x).relu_()[x > 0].tolist())
    assert seen.launches["aten.mm"] == 1 and seen.launches["aten.relu_"] == 1
    assert len(seen.waits) >= 2 and Tensor.tolist in HOST_READS
