"""The adapter of DeepEP's ``Buffer`` against a fake of it: values, gradients, dtypes, and the life of handles."""

from __future__ import annotations

import pytest
import torch
from tests.engines.dispatch_cases import (
    CHOICES,
    DIM,
    EXPERTS,
    WORLD,
    Microbatch,
    assert_equals_local,
    microbatch,
    outcome,
)
from tests.engines.fake_deepep import Buffer, fake_deep_ep
from tests.engines.rank_threads import ContractError, on_rank_threads
from torch import nn

from moefold.comm.process_groups import Group
from moefold.config.moe import MoEConfig
from moefold.errors import BackendError
from moefold.moe.dispatch.base import Dispatcher, LocalDispatcher, Routing
from moefold.moe.dispatch.deepep import BufferExchange
from moefold.moe.dispatch.handle_exchange import HandleDispatcher
from moefold.moe.expert_backends import grouped_experts
from moefold.moe.experts import ExpertWeights
from moefold.nn.matmul_kernels import sequential
from moefold.nn.matmul_policy import ParameterMatmul


def make(group: Group) -> HandleDispatcher:
    return HandleDispatcher(EXPERTS // WORLD, BufferExchange(fake_deep_ep(), group, EXPERTS, DIM))


@pytest.mark.parametrize("dropping", [False, True])
def test_deepep_equals_the_local_dispatcher(dropping: bool) -> None:
    assert_equals_local(make, dropping)


def test_version_1_takes_int64_expert_numbers() -> None:
    module = fake_deep_ep()
    del module.topk_idx_t
    assert_equals_local(lambda group: HandleDispatcher(2, BufferExchange(module, group, EXPERTS, DIM)), False)


def test_all_layers_of_a_rank_share_one_buffer() -> None:
    made = []

    class Counted(Buffer):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            made.append(self.group.rank())

    def work(group: Group) -> None:
        exchange = BufferExchange(fake_deep_ep(Buffer=Counted), group, EXPERTS, DIM)
        for _ in range(2):
            outcome(HandleDispatcher(2, exchange), microbatch(3, False).of(group.index), group.index * 2)

    on_rank_threads(WORLD, work)
    assert sorted(made) == list(range(WORLD))


@pytest.mark.parametrize(("x_dtype", "prob_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_other_dtypes_are_refused_with_what_works(x_dtype: torch.dtype, prob_dtype: torch.dtype) -> None:
    def work(group: Group) -> None:
        batch = microbatch(3, False).of(group.index)
        routing = Routing(batch.experts, batch.probs.to(prob_dtype), None)
        with pytest.raises(BackendError, match=r"bfloat16 with probs in float32, not .*use precision.compute bfloat16"):
            make(group).dispatch(batch.x.to(x_dtype), routing)

    on_rank_threads(WORLD, work)


def test_a_handle_is_combined_once_and_by_its_own_buffer() -> None:
    def work(group: Group) -> None:
        ours, other = make(group), make(group)
        batch = microbatch(3, False).of(group.index)
        routing = Routing(batch.experts, batch.probs, None)
        arrived = ours.dispatch(batch.x, routing)
        other.dispatch(batch.x, routing)
        with pytest.raises(ContractError, match="made by another buffer"):
            other.combine(arrived.rows_RL, arrived.ticket)
        ours.combine(arrived.rows_RL, arrived.ticket)
        with pytest.raises(ContractError, match="used for combine a second time"):
            ours.combine(arrived.rows_RL, arrived.ticket)

    on_rank_threads(WORLD, work)


def test_a_handle_does_not_outlive_its_buffer() -> None:
    def work(group: Group) -> None:
        exchange = BufferExchange(fake_deep_ep(), group, EXPERTS, DIM)
        batch = microbatch(3, False).of(group.index)
        arrived = HandleDispatcher(2, exchange).dispatch(batch.x, Routing(batch.experts, batch.probs, None))
        exchange.buffer.destroy()
        with pytest.raises(ContractError, match="the buffer was destroyed"):
            HandleDispatcher(2, exchange).combine(arrived.rows_RL, arrived.ticket)

    on_rank_threads(WORLD, work)


def test_numbers_of_ranks_without_a_config_are_refused_by_the_library() -> None:
    def work(group: Group) -> None:
        with pytest.raises(ContractError, match="Unsupported number of EP ranks: 3"):
            assert BufferExchange(fake_deep_ep(), group, 6, DIM).buffer is None

    on_rank_threads(3, work)


def test_grouped_experts_take_what_deepep_delivers() -> None:
    """Rows with experts of other ranks among their assignments, numbered -1, through real experts of this rank."""
    moe = MoEConfig(num_experts=EXPERTS, top_k=CHOICES, expert_hidden_dim=DIM)
    experts_of = grouped_experts(moe, ParameterMatmul(), sequential)
    batch = microbatch(3, dropping=True)
    torch.manual_seed(0)
    gate_up, down = torch.randn(EXPERTS, 2, DIM, DIM).bfloat16(), torch.randn(EXPERTS, DIM, DIM).bfloat16()

    def output(dispatcher: Dispatcher, part: Microbatch, experts: slice) -> torch.Tensor:
        weights = ExpertWeights(nn.Parameter(gate_up[experts]), nn.Parameter(down[experts]), None, None, 1.0)
        arrived = dispatcher.dispatch(part.x, Routing(part.experts, part.probs, part.kept))
        return dispatcher.combine(experts_of(arrived, weights), arrived.ticket).detach()

    wanted = output(LocalDispatcher(EXPERTS), batch, slice(None))
    num_local = EXPERTS // WORLD
    of_rank = on_rank_threads(
        WORLD,
        lambda group: output(
            make(group), batch.of(group.index), slice(group.index * num_local, (group.index + 1) * num_local)
        ),
    )
    # Sums of a token's experts are rounded to bfloat16 on each rank before they are added.
    torch.testing.assert_close(torch.cat(of_rank), wanted, rtol=2e-2, atol=0.1)


def test_the_number_of_sms_is_set_before_the_buffer_is_sized() -> None:
    sized: list[int] = []

    class Counted(Buffer):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            sized.append(type(self).get_dispatch_config(WORLD).num_sms)

    module = fake_deep_ep(Buffer=Counted)
    assert_equals_local(lambda group: HandleDispatcher(2, BufferExchange(module, group, EXPERTS, DIM, 12)), False)
    assert set(sized) == {12}
    with pytest.raises(ContractError, match="must be even"):
        assert_equals_local(lambda group: HandleDispatcher(2, BufferExchange(module, group, EXPERTS, DIM, 7)), False)
