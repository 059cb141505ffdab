"""The adapter of DeepEP's ``ElasticBuffer`` against a fake of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.engines.dispatch_cases import (
    CHOICES,
    DIM,
    EXPERTS,
    TOKENS_OF_RANK,
    WORLD,
    assert_equals_local,
    microbatch,
)
from tests.engines.fake_deepep import fake_deep_ep
from tests.engines.fake_deepep_elastic import ElasticBuffer
from tests.engines.rank_threads import ContractError, on_rank_threads

from moefold.comm.process_groups import Group
from moefold.config.data import DataConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import Routing, most_rank_tokens
from moefold.moe.dispatch.deepep_elastic import ElasticExchange
from moefold.moe.dispatch.handle_exchange import HandleDispatcher


def make(group: Group, most_tokens: int = max(TOKENS_OF_RANK)) -> HandleDispatcher:
    module = fake_deep_ep(ElasticBuffer=ElasticBuffer)
    return HandleDispatcher(
        EXPERTS // WORLD, ElasticExchange(module, group, EXPERTS, CHOICES, DIM, most_tokens=most_tokens)
    )


@pytest.mark.parametrize("dropping", [False, True])
def test_the_elastic_buffer_equals_the_local_dispatcher(dropping: bool) -> None:
    assert_equals_local(make, dropping)


def test_more_tokens_than_the_buffer_was_made_for_are_refused() -> None:
    with pytest.raises(ContractError, match="7 tokens in a buffer for 6"):
        assert_equals_local(lambda group: make(group, most_tokens=6), False)


def test_ranks_must_agree_about_the_size_of_the_buffer() -> None:
    with pytest.raises(ContractError, match="ranks disagree"):
        assert_equals_local(lambda group: make(group, most_tokens=7 + group.index), False)


def test_a_handle_is_combined_once() -> None:
    def work(group: Group) -> None:
        dispatcher = make(group)
        batch = microbatch(3, False).of(group.index)
        arrived = dispatcher.dispatch(batch.x, Routing(batch.experts, batch.probs, None))
        dispatcher.combine(arrived.rows_RL, arrived.ticket)
        with pytest.raises(ContractError, match="used for combine a second time"):
            dispatcher.combine(arrived.rows_RL, arrived.ticket)

    on_rank_threads(WORLD, work)


def test_buffers_are_sized_for_the_rank_with_the_most_tokens() -> None:
    run = RunConfig(data=DataConfig(seq_len=100, micro_batch=2), parallel=ParallelConfig(cp=2, tp=3))
    assert most_rank_tokens(run, dp=4) == 34
    packed = replace(run, data=replace(run.data, packing="bin_packed"))
    assert most_rank_tokens(packed, dp=4) == 200
    assert most_rank_tokens(replace(packed, parallel=replace(run.parallel, dynamic_cp=True)), dp=4) == 800


def test_every_dispatch_is_told_the_number_of_sms() -> None:
    told: list[int] = []

    class Counted(ElasticBuffer):
        def dispatch(self, *args: object, **kwargs: object) -> tuple[object, ...]:
            told.append(kwargs["num_sms"])  # type: ignore[arg-type]
            return super().dispatch(*args, **kwargs)  # type: ignore[arg-type]

    module = fake_deep_ep(ElasticBuffer=Counted)

    def made(group: Group) -> HandleDispatcher:
        exchange = ElasticExchange(module, group, EXPERTS, CHOICES, DIM, max(TOKENS_OF_RANK), num_sms=6)
        return HandleDispatcher(EXPERTS // WORLD, exchange)

    assert_equals_local(made, False)
    assert set(told) == {6} and len(told) > WORLD
