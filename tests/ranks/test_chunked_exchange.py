"""Tokens of one microbatch in chunks: the plain layer's values and gradients, in the order that was checked, and with
real concurrency."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from tests.marks import slow_except
from tests.ranks.test_shared_beside import Watched, batches_of, gradients_of, run_config
from torch import Tensor

from moefold.comm.p2p import ThreadCommStream
from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import Overlap, ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.errors import OrderError
from moefold.moe.dispatch.base import Dispatcher, ExpertInput, Routing
from moefold.moe.exchange_beside import ExchangesBeside
from moefold.moe.layer import MoELayer
from moefold.moe.load_balancing import RoutingReport
from moefold.moe.overlapped_layer import LayerOverlap, OverlappedSteps, split_tokens
from moefold.nn.phase import Stream, run_in_order
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of
from moefold.schedule.layer_operations import check_order, step_and_chunk
from moefold.schedule.layer_orders import exchange_order, layer_order

WORLD = 4
SHARED: tuple[Overlap, ...] = ("shared_experts",)
LAYOUTS = {
    "all_to_all": ParallelConfig(ep=4, exchange_chunks=2),
    "beside the shared expert": ParallelConfig(ep=4, exchange_chunks=3, overlap=SHARED),
    "split experts": ParallelConfig(ep=2, etp=2, exchange_chunks=2),
    "deduplicated": ParallelConfig(ep=4, dispatcher="deduplicated", exchange_chunks=2),
    "two_level": ParallelConfig(ep=4, dispatcher="two_level", ep_inner=2, exchange_chunks=2),
    "all_gather": ParallelConfig(ep=4, dispatcher="all_gather", exchange_chunks=2),
    "bounded": ParallelConfig(ep=4, dispatcher="all_to_all_bounded", row_bound=4.0, pair_bound=4.0, exchange_chunks=2),
    "gloo": ParallelConfig(ep=4, cpu_exchange="gloo", exchange_chunks=2, overlap=SHARED),
    "flat": ParallelConfig(ep=2, sharding="flat", exchange_chunks=2),
    "sharded experts": ParallelConfig(ep=2, exchange_chunks=2),
    "deferred weight gradients": ParallelConfig(ep=4, schedule="zb_h1", exchange_chunks=2),
    # Of 24 tokens per rank.
    "more chunks than tokens": ParallelConfig(ep=4, exchange_chunks=30),
}


def in_float64(parallel: ParallelConfig) -> RunConfig:
    return replace(run_config(parallel), precision=PrecisionConfig(compute="float64", params="float64"))


def local_model_of(run: RunConfig, rank: int) -> LocalModel:
    return build_local_model(run, groups_of(run, WORLD, rank, timedelta(seconds=120)), torch.device("cpu"))


def compare(parallel: ParallelConfig, rank: int) -> str:
    found = []
    for chunks in (1, parallel.exchange_chunks):
        overlap = () if chunks == 1 else parallel.overlap
        local_model = local_model_of(in_float64(replace(parallel, exchange_chunks=chunks, overlap=overlap)), rank)
        layers = [module for module in local_model.model.modules() if isinstance(module, MoELayer)]
        assert [len(layer.dispatchers) for layer in layers] == [chunks] * 2
        found.append(gradients_of(local_model, rank))
    (loss, plain), (loss_chunks, in_chunks) = found
    torch.testing.assert_close(loss_chunks, loss, rtol=1e-12, atol=0)
    assert plain.keys() == in_chunks.keys()
    return ", ".join(name for name in plain if not torch.allclose(in_chunks[name], plain[name], rtol=1e-9, atol=1e-15))


@pytest.mark.parametrize("layout", slow_except(list(LAYOUTS), "all_to_all", "beside the shared expert"))
def test_losses_and_gradients_are_those_of_the_plain_layer(layout: str) -> None:
    assert spawn_ranks(partial(compare, LAYOUTS[layout]), WORLD) == [""] * WORLD


def observed(parallel: ParallelConfig, rank: int) -> list[str]:
    """What one layer's forward and backward do, in the order in which they do it."""
    local_model = local_model_of(run_config(parallel), rank)
    local_model.sharding.start_step()
    layer = next(module for module in local_model.model.modules() if isinstance(module, MoELayer))
    assert layer.overlap is not None
    log: list[str] = []
    layer.overlap.exchanges.stream = Watched(log)
    forward = layer.experts.forward

    def experts(expert_in: ExpertInput) -> Tensor:
        log.append("experts")
        out = forward(expert_in)
        out.register_hook(lambda _: log.append("experts backward"))
        return out

    layer.experts.forward = experts  # type: ignore[method-assign]
    x = torch.randn(24, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    for unit in (module for module in local_model.model.modules() if hasattr(module, "unshard")):
        unit.unshard()
    y, _ = layer(x, batches_of(rank)[0], None)
    log.append("backward")
    y.square().sum().backward()
    assert x.grad is not None
    return log


def planned(name: str) -> list[str]:
    """The same events of a named order: a step that reads what an exchange brought waits for it, in the backward the
    step before the exchange."""
    events: list[str] = []
    directions = {"F": ("dispatch_finish", "combine_finish"), "B": ("dispatch_prepare", "combine_prepare")}
    backward = False
    for operation in layer_order(name).order:
        step, _ = step_and_chunk(operation.name)
        if operation.direction == "B" and not backward:
            backward = True
            events.append("backward")
        if operation.communicates and step != "dispatch_counts":
            events.append("submit")
        if step in directions[operation.direction]:
            events.append("wait")
        if operation.direction == "F" and step == "experts_up":
            events.append("experts")
        if operation.direction == "B" and step == "experts_down":
            events.append("experts backward")
    return events


def test_what_runs_is_the_named_order_in_both_directions() -> None:
    for name, overlap in (("chunks", ()), ("chunks_shared_experts", SHARED)):
        parallel = ParallelConfig(ep=4, exchange_chunks=2, overlap=overlap)
        assert spawn_ranks(partial(observed, parallel), WORLD) == [planned(name)] * WORLD
    assert planned("chunks")[:8] == ["submit", "submit", "wait", "experts", "submit", "wait", "experts", "submit"]


class Doubling(Dispatcher):
    """Exchanges nothing, and waits in each exchange until the experts have begun to compute the chunk before."""

    def __init__(self, chunk: int, begun: list[threading.Event]) -> None:
        self.chunk, self.begun, self.was_beside = chunk, begun, False

    def dispatch_prepare(self, x_tL: Tensor, routing: Routing, counts: None) -> Tensor:
        return x_tL

    def dispatch_exchange(self, sent: Tensor) -> Tensor:
        if self.chunk:
            self.was_beside = self.begun[self.chunk - 1].wait(20)
        return 2 * sent

    def dispatch_finish(self, received: Tensor) -> ExpertInput:
        none = torch.empty(0)
        return ExpertInput(received, Routing(none, none), none, [], None, None)

    def combine_exchange(self, rows_RL: Tensor, ticket: None) -> Tensor:
        return rows_RL


def overlapped_steps(chunks: int) -> tuple[OverlappedSteps, list[Doubling]]:
    begun = [threading.Event() for _ in range(chunks)]
    dispatchers = [Doubling(chunk, begun) for chunk in range(chunks)]
    overlap = LayerOverlap(ExchangesBeside(ThreadCommStream()), exchange_order(chunks, False), tuple(dispatchers))
    waiting = iter(begun)

    def experts(expert_in: ExpertInput) -> Tensor:
        next(waiting).set()
        return 3 * expert_in.rows_RL

    return OverlappedSteps(overlap, experts, None), dispatchers


def test_an_exchange_runs_while_the_experts_compute_the_chunk_before() -> None:
    """It cannot end before they do: in one thread this would wait until its time is over."""
    steps, dispatchers = overlapped_steps(4)
    x_tL = torch.arange(26, dtype=torch.float64).view(13, 2).requires_grad_()
    routing = Routing(torch.zeros(13, 1, dtype=torch.long), torch.ones(13, 1))
    report: Any = RoutingReport(*[None] * len(RoutingReport._fields))  # type: ignore[arg-type]
    output = steps.outputs(run_in_order(steps.phases(), steps.start(x_tL, x_tL, routing, report)))
    assert [dispatcher.was_beside for dispatcher in dispatchers] == [False, True, True, True]
    assert torch.equal(output, 6 * x_tL)
    output.backward(torch.ones_like(output))
    assert torch.equal(x_tL.grad, torch.full_like(x_tL, 6))


def test_phases_are_on_the_streams_of_their_operations() -> None:
    steps, _ = overlapped_steps(3)
    stream_of = {operation.name: operation.stream for operation in exchange_order(3, False)}
    for phase in steps.phases():
        assert (phase.stream is Stream.COMM) == (stream_of[phase.name.replace("experts", "experts_up")] == "comm")


@pytest.mark.parametrize("tokens", [0, 1, 5, 12])
def test_every_token_is_in_one_chunk_with_its_own_routing(tokens: int) -> None:
    x_tL = torch.arange(2 * tokens, dtype=torch.float64).view(tokens, 2)
    routing = Routing(x_tL[:, :1].long(), x_tL[:, 1:], x_tL[:, :1] > 3, torch.ones(4))
    chunks = split_tokens(x_tL, routing, 5)
    assert len(chunks) == 5 and max(len(c.x_cL) for c in chunks) - min(len(c.x_cL) for c in chunks) <= 1
    assert torch.equal(torch.cat([chunk.x_cL for chunk in chunks]), x_tL)
    for chunk in chunks:
        assert torch.equal(chunk.routing.experts, chunk.x_cL[:, :1].long()) and chunk.routing.kept is not None
        assert torch.equal(chunk.routing.probs, chunk.x_cL[:, 1:])
        assert torch.equal(chunk.routing.kept, chunk.x_cL[:, :1] > 3)
        # Counted for all chunks together.
        assert chunk.routing.counts_E is None


def test_a_wrong_order_of_chunks_is_refused() -> None:
    order = list(exchange_order(2, True))
    check_order(order, [order])
    names = [operation.name for operation in order]
    one, two = names.index("dispatch_finish.1"), names.index("dispatch_exchange.1")
    swapped = list(order)
    swapped[one], swapped[two] = swapped[two], swapped[one]
    with pytest.raises(OrderError, match=r"reads 0.0.received.1 before"):
        check_order(order, [swapped])
    # Two ranks that send their chunks in another sequence.
    other = list(order)
    first, second = (names.index(f"dispatch_{step}.0") for step in ("prepare", "exchange"))
    other[first : second + 3] = [*order[second + 1 : second + 3], *order[first : second + 1]]
    check_order(order, [other])
    with pytest.raises(OrderError, match=r"rank 1 issues F0.0.dispatch_exchange.1 as collective 1"):
        check_order(order, [order, other])
