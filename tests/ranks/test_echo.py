"""ECHO on ranks: rows computed by clones give the outputs and gradients of the layer without clones.

With integers every sum is exact in any order, so that both are equal bit by bit. The activation is gate times up.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.body.test_echo_plan import zipf_rows
from tests.marks import slow_except
from tests.support import on_ranks
from torch import Tensor, nn

from moefold.comm.process_groups import Groups
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import EchoConfig, NamedDispatcher, ParallelConfig
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import Dispatcher, ExpertInput, Routing
from moefold.moe.experts import Experts
from moefold.moe.grouped_experts import GroupedExperts, TorchPermutation
from moefold.nn.matmul_kernels import GROUPED_MATMULS
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.parallel.dispatchers import dispatcher_for

NUM_EXPERTS, TOP_K, DIM, HIDDEN = 16, 2, 5, 4
MOE = MoEConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, expert_hidden_dim=HIDDEN, expert_mlp_bias=True)
TOKENS_OF_RANK = (23, 9, 0, 31)


def run_with(dispatcher: NamedDispatcher, slots: int, ep: int, etp: int, min_rows: int = 1) -> RunConfig:
    echo = EchoConfig(slots, min_rows) if slots else None
    inner = 2 if dispatcher == "two_level" else 1
    return RunConfig(
        model=ModelConfig(moe=MOE, dim=DIM),
        data=DataConfig(packing="bin_packed"),
        parallel=ParallelConfig(ep=ep, etp=etp, dispatcher=dispatcher, ep_inner=inner, echo=echo),
    )


def gate_times_up(gate_up_PG: Tensor, prob_P: Tensor | None) -> Tensor:
    gate_PF, up_PF = gate_up_PG.chunk(2, 1)
    return gate_PF * up_PF * (1 if prob_P is None else prob_P[:, None])


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


def local_experts(groups: Groups) -> Experts:
    """This rank's experts, and of their hidden dim its share."""
    backend = GroupedExperts(MOE, ParameterMatmul(), GROUPED_MATMULS["sequential"], TorchPermutation(), gate_times_up)
    experts = Experts(MOE, DIM, backend, float(groups["etp"].index == 0))
    each, share = NUM_EXPERTS // groups["ep"].size, HIDDEN // groups["etp"].size
    own = slice(groups["ep"].index * each, (groups["ep"].index + 1) * each)
    columns = slice(groups["etp"].index * share, (groups["etp"].index + 1) * share)
    experts.gate_up = nn.Parameter(integers(1, NUM_EXPERTS, 2, HIDDEN, DIM)[own, :, columns])
    experts.down = nn.Parameter(integers(2, NUM_EXPERTS, DIM, HIDDEN)[own, :, columns])
    experts.gate_up_bias = nn.Parameter(integers(3, NUM_EXPERTS, 2, HIDDEN)[own, :, columns])
    experts.down_bias = nn.Parameter(integers(4, NUM_EXPERTS, DIM)[own])
    return experts


def layer(groups: Groups, dispatcher: Dispatcher, dropping: bool) -> tuple[dict[str, Tensor], ExpertInput]:
    """Outputs and all gradients of this rank, and what its experts got."""
    tokens, experts = TOKENS_OF_RANK[groups.rank], local_experts(groups)
    x_tL = integers(10 + groups.rank, tokens, DIM).requires_grad_()
    prob_tK = integers(20 + groups.rank, tokens, TOP_K).requires_grad_()
    kept = integers(30 + groups.rank, tokens, TOP_K) > -2 if dropping else None
    routing = Routing(zipf_rows(tokens, NUM_EXPERTS, TOP_K, groups.rank, 1.3), prob_tK, kept)
    expert_in = dispatcher.dispatch(x_tL, routing)
    y_tL = dispatcher.combine(experts(expert_in), expert_in.ticket)
    (y_tL * integers(40 + groups.rank, tokens, DIM)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in experts.named_parameters()}
    found = {"y": y_tL.detach(), "x": x_tL.grad, "probs": prob_tK.grad, **gradients}
    return {name: value for name, value in found.items() if value is not None}, expert_in


@pytest.mark.parametrize(
    ("dispatcher", "ep", "etp"),
    slow_except(
        [
            ("all_to_all", 4, 1),
            ("all_to_all", 2, 2),
            ("deduplicated", 4, 1),
            ("all_gather", 4, 1),
            ("two_level", 4, 1),
            ("all_to_all_aligned", 4, 1),
            ("deduplicated", 2, 2),
            ("all_gather", 2, 2),
        ],
        ("all_to_all", 4, 1),
        ("all_to_all", 2, 2),
        ("deduplicated", 4, 1),
    ),
)
@pytest.mark.parametrize("slots", [1, 2])
def test_integers_are_equal_bit_by_bit(dispatcher: NamedDispatcher, ep: int, etp: int, slots: int) -> None:
    def work(groups: Groups) -> None:
        for dropping in (False, True):
            plain, own = layer(groups, dispatcher_for(run_with(dispatcher, 0, ep, etp), groups), dropping)
            cloned, expert_in = layer(groups, dispatcher_for(run_with(dispatcher, slots, ep, etp), groups), dropping)
            assert plain.keys() == cloned.keys() == {"y", "x", "probs", "gate_up", "down", "gate_up_bias", "down_bias"}
            for name in plain:
                assert torch.equal(plain[name], cloned[name]), name
            assert expert_in.clones is not None
            loads = torch.tensor([sum(own.rows_per_expert), sum(expert_in.rows_per_expert)])
            dist.all_reduce(loads, op=dist.ReduceOp.MAX)
            assert loads[1] < loads[0], "the fullest rank has fewer rows"

    on_ranks(work, 4, ep=ep, etp=etp, ep_inner=2 if dispatcher == "two_level" else 1)


def test_without_clones_no_weights_are_sent() -> None:
    """A clone for more rows than there are is never worth it."""

    def work(groups: Groups) -> None:
        ledger = groups["ep"].ledger
        plain, _ = layer(groups, dispatcher_for(run_with("all_to_all", 0, 4, 1), groups), False)
        before = ledger.of("all_to_all", "ep").calls
        cloned, expert_in = layer(groups, dispatcher_for(run_with("all_to_all", 1, 4, 1, 1000), groups), False)
        assert expert_in.clones is None and len(expert_in.rows_per_expert) == NUM_EXPERTS // 4
        assert ledger.of("all_to_all", "ep").calls == 2 * before
        assert all(torch.equal(plain[name], cloned[name]) for name in plain)

    on_ranks(work, 4, ep=4)


def test_weights_travel_in_one_message_and_gradients_in_another() -> None:
    """Matrices and biases apart; of an expert, its weights in the dtype of rows."""

    def work(groups: Groups) -> None:
        ledger, moe = groups["ep"].ledger, replace(MOE, expert_mlp_bias=False)
        assert moe.expert_hidden_dim == HIDDEN
        dispatcher = dispatcher_for(run_with("all_to_all", 1, 4, 1), groups)
        _, expert_in = layer(groups, dispatcher, False)
        exchange = expert_in.clones
        assert exchange is not None
        before = ledger.of("all_to_all", "ep")
        weight = integers(1, NUM_EXPERTS // 4, 2, HIDDEN, DIM).requires_grad_()
        (clone,) = exchange([weight], torch.float32)
        clone.sum().backward()
        after = ledger.of("all_to_all", "ep")
        assert clone.dtype == torch.float32 and clone.shape == (1, 2, HIDDEN, DIM)
        assert after.calls == before.calls + 2
        moved = torch.tensor(after.bytes_sent - before.bytes_sent)
        dist.all_reduce(moved)
        used = torch.tensor(len(exchange.arrived.slots))  # type: ignore[attr-defined]
        dist.all_reduce(used)
        assert moved == 2 * used * 2 * HIDDEN * DIM * 4

    on_ranks(work, 4, ep=4)
