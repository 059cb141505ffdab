"""Every dispatcher gives a token the same expert output and gradients, wherever its experts are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch
from tests.marks import slow_except
from tests.support import multiplied, on_ranks
from torch import Tensor

from moefold.comm.process_groups import Groups, Ledger
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import NamedDispatcher
from moefold.config.run import RunConfig
from moefold.moe.dispatch.all_gather import AllGatherDispatcher
from moefold.moe.dispatch.all_to_all import AllToAllDispatcher
from moefold.moe.dispatch.all_to_all_aligned import AlignedAllToAllDispatcher
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, Dispatcher, LocalDispatcher, Routing
from moefold.nn.phase import Phase, Stream
from moefold.nn.phase_autograd import Recorded, backward_phase, record
from moefold.parallel.dispatchers import DISPATCHERS

EXPERTS, CHOICES, WIDTH = 8, 2, 3
MULTIPLE = 4  # of the aligned dispatcher
# Packed documents: ranks do not know how many tokens the others have.
RUN = RunConfig(
    model=ModelConfig(moe=MoEConfig(num_experts=EXPERTS, top_k=CHOICES)), data=DataConfig(packing="bin_packed")
)
TOKENS_OF_RANK = (5, 1, 0, 7)  # one rank has nothing to send, and takes part all the same


def everything(dropping: bool, choices: int = CHOICES) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    total = sum(TOKENS_OF_RANK)
    x = torch.randn(total, WIDTH, dtype=torch.float64, generator=generator)
    # The last expert is never chosen.
    expert = torch.rand(total, EXPERTS - 1, generator=generator).argsort(1)[:, :choices]
    weight = torch.rand(total, choices, dtype=torch.float64, generator=generator)
    kept = torch.rand(total, choices, generator=generator) < 0.6 if dropping else None
    return x, expert, weight, kept


def answer(dispatcher: Dispatcher, x: Tensor, routing: Routing, first_expert: int, scale: float) -> Tensor:
    """Expert e multiplies by e + 1; a split expert's part gives its share of that."""
    arrived = dispatcher.dispatch(x, routing)
    numbers = torch.arange(len(arrived.rows_per_expert_e), dtype=x.dtype) + first_expert + 1
    return dispatcher.combine(multiplied(arrived, numbers * scale), arrived.ticket)


def make(kind: str, groups: Groups, capacity: int | None) -> Dispatcher:
    if kind == "all_to_all":
        return AllToAllDispatcher(EXPERTS, groups["ep"], groups["etp"], capacity)
    if kind == "all_to_all_aligned":
        return AlignedAllToAllDispatcher(AllToAllDispatcher(EXPERTS, groups["ep"], groups["etp"], capacity), MULTIPLE)
    if kind == "all_gather_fixed":
        block = groups["expert_block"]
        tokens = tuple(TOKENS_OF_RANK[rank] for rank in block.ranks)
        return AllGatherDispatcher(EXPERTS, block, groups["ep"], tokens, capacity)
    return DISPATCHERS[kind](RUN, groups, SYNC_SPLIT_SIZES)


# Every dispatcher, and again with counts that are known beforehand: padded capacities, fixed numbers of tokens.
KINDS = [(kind, None) for kind in get_args(NamedDispatcher)]
KINDS += [("all_gather_fixed", None), ("all_to_all", 14), ("all_to_all_aligned", 14), ("all_gather_fixed", 14)]


def test_every_named_dispatcher_is_in_the_table() -> None:
    assert DISPATCHERS.keys() == set(get_args(NamedDispatcher))


@pytest.mark.parametrize(("kind", "capacity"), KINDS)
@pytest.mark.parametrize(("ep", "etp"), slow_except([(4, 1), (2, 2), (1, 4), (2, 1)], (4, 1), (2, 2)))
@pytest.mark.parametrize("dropping", slow_except([False, True], True))
def test_every_dispatcher_equals_the_local_one(
    kind: str, capacity: int | None, ep: int, etp: int, dropping: bool
) -> None:
    def work(groups: Groups) -> None:
        x, expert, weight, kept = everything(dropping)
        x_all, weight_all = x.clone().requires_grad_(), weight.clone().requires_grad_()
        expected = answer(LocalDispatcher(EXPERTS), x_all, Routing(expert, weight_all, kept), 0, 1.0)
        expected.square().sum().backward()

        start = sum(TOKENS_OF_RANK[: groups.rank])
        mine = slice(start, start + TOKENS_OF_RANK[groups.rank])
        x_mine, weight_mine = x[mine].clone().requires_grad_(), weight[mine].clone().requires_grad_()
        routing = Routing(expert[mine], weight_mine, None if kept is None else kept[mine])
        first = groups["ep"].index * (EXPERTS // ep)
        # The parts of a split expert differ, as weight slices do, and add up to one.
        scale = (groups["etp"].index + 1) * 2 / (etp * (etp + 1))
        got = answer(make(kind, groups, capacity), x_mine, routing, first, scale)
        got.square().sum().backward()
        torch.testing.assert_close(got, expected[mine])
        torch.testing.assert_close(x_mine.grad, x_all.grad[mine])
        torch.testing.assert_close(weight_mine.grad, weight_all.grad[mine])

    for cpu_exchange in ("shared_memory", "gloo"):
        inner = 2 if kind == "two_level" and ep > 1 else 1
        on_ranks(work, 4, ep=ep, etp=etp, ep_inner=inner, cpu_exchange=cpu_exchange)


COMMUNICATING = ("dispatch_counts", "dispatch_exchange", "combine_exchange")


def counted_parts(dispatcher: Dispatcher, ledger: Ledger) -> tuple[Callable[..., Any], dict[str, int]]:
    """Runs a part by its name, in an autograd graph of its own; and the collectives of each, forward and backward."""
    calls: dict[str, int] = {}
    recorded: list[tuple[str, Recorded]] = []

    def total() -> int:
        return sum(traffic.calls for traffic in ledger.traffic.values())

    def run(name: str, *given: Any) -> Any:
        before = total()
        result, phase = record(Phase(name, Stream.COMPUTE, lambda carry: getattr(dispatcher, name)(*carry)), given)
        calls[name] = total() - before
        recorded.append((name, phase))
        return result

    def backward(gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        name, phase = recorded.pop()
        before = total()
        gradients = backward_phase(phase, gradients)
        calls[f"{name}, backward"] = total() - before
        return gradients

    run.backward = backward  # type: ignore[attr-defined]
    return run, calls


@pytest.mark.parametrize(("kind", "capacity"), KINDS)
@pytest.mark.parametrize("dropping", slow_except([False, True], True))
def test_only_exchanges_communicate_and_parts_give_the_same_bits(
    kind: str, capacity: int | None, dropping: bool
) -> None:
    def work(groups: Groups) -> None:
        x, expert, weight, kept = everything(dropping)
        start = sum(TOKENS_OF_RANK[: groups.rank])
        mine = slice(start, start + TOKENS_OF_RANK[groups.rank])
        dispatcher = make(kind, groups, capacity)
        numbers = torch.arange(EXPERTS // 2, dtype=x.dtype) + groups["ep"].index * (EXPERTS // 2) + 1

        def leaves() -> tuple[Tensor, Routing]:
            probs = weight[mine].clone().requires_grad_()
            return x[mine].clone().requires_grad_(), Routing(expert[mine], probs, None if kept is None else kept[mine])

        x_whole, routing_whole = leaves()
        expected = answer(dispatcher, x_whole, routing_whole, groups["ep"].index * (EXPERTS // 2), 0.5)
        expected.sin().sum().backward()

        x_parts, routing = leaves()
        run, calls = counted_parts(dispatcher, groups["ep"].ledger)
        sent = run("dispatch_prepare", x_parts, routing, run("dispatch_counts", routing))
        arrived = run("dispatch_finish", run("dispatch_exchange", sent))
        rows = arrived.rows_RL.detach().requires_grad_()
        probs = arrived.assignments.probs.detach().requires_grad_()
        leaf = arrived._replace(rows_RL=rows, assignments=arrived.assignments._replace(probs=probs))
        out = multiplied(leaf, numbers * 0.5)
        ticket = arrived.ticket
        got = out.detach().requires_grad_()
        for name in ("combine_prepare", "combine_exchange", "combine_finish"):
            got = run(name, got, ticket)
        assert torch.equal(got, expected)
        gradients: Sequence[Tensor | None] = [got.detach().cos()]
        for _ in range(3):
            gradients = run.backward(gradients)
        torch.autograd.backward(out, gradients[0])
        gradients = [rows.grad, probs.grad]
        for _ in range(3):
            gradients = run.backward(gradients)
        assert torch.equal(gradients[0], x_whole.grad) and torch.equal(gradients[1], routing_whole.probs.grad)
        silent = {name: count for name, count in calls.items() if name.split(",")[0] not in COMMUNICATING}
        assert not any(silent.values()), silent
        assert "dispatch_counts, backward" not in calls
        assert all(calls[f"{way}_exchange{back}"] for way in ("dispatch", "combine") for back in ("", ", backward"))

    on_ranks(work, 4, ep=2, etp=2, ep_inner=2 if kind == "two_level" else 1)


# How a column of one choice may lie in memory: contiguous to torch in every case, for a column has no second entry.
STRIDES = {"of no step": (1, 0), "of a column": (1, 13), "one of many columns": (3, 1)}


def laid_out(column: Tensor, strides: tuple[int, int]) -> Tensor:
    """The same values with these strides."""
    room = column.new_empty(len(column) * max(strides[0], 1))
    laid = room.as_strided(column.shape, strides)
    laid.copy_(column)
    return laid


@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize("kind", get_args(NamedDispatcher))
def test_one_assignment_per_token_may_have_any_stride(kind: str, strides: tuple[int, int]) -> None:
    def work(groups: Groups) -> None:
        x, expert, weight, _ = everything(dropping=False, choices=1)
        expected = answer(LocalDispatcher(EXPERTS), x, Routing(expert, weight, None), 0, 1.0)
        start = sum(TOKENS_OF_RANK[: groups.rank])
        mine = slice(start, start + TOKENS_OF_RANK[groups.rank])
        routing = Routing(laid_out(expert[mine], strides), laid_out(weight[mine], strides), None)
        assert routing.experts.stride() == strides
        got = answer(make(kind, groups, None), x[mine], routing, groups["ep"].index * 2, 1.0)
        torch.testing.assert_close(got, expected[mine])

    on_ranks(work, 4, ep=4, ep_inner=2 if kind == "two_level" else 1)


@pytest.mark.parametrize("capacity", [None, 14])
def test_aligned_rows_are_a_multiple_and_their_padding_is_zero(capacity: int | None) -> None:
    def work(groups: Groups) -> None:
        x, expert, weight, kept = everything(dropping=True)
        start = sum(TOKENS_OF_RANK[: groups.rank])
        mine = slice(start, start + TOKENS_OF_RANK[groups.rank])
        routing = Routing(expert[mine], weight[mine], kept[mine])
        plain = make("all_to_all", groups, capacity).dispatch(x[mine], routing)
        aligned = make("all_to_all_aligned", groups, capacity).dispatch(x[mine], routing)
        assert aligned.rows_per_expert == [-(-rows // MULTIPLE) * MULTIPLE for rows in plain.rows_per_expert]
        assert aligned.rows_per_expert_e.tolist() == aligned.rows_per_expert
        if capacity is not None:
            assert aligned.capacity == aligned.rows_per_expert[0]
            return
        runs = zip(
            aligned.rows_RL.split(aligned.rows_per_expert),
            aligned.assignments.probs.split(aligned.rows_per_expert),
            plain.rows_RL.split(plain.rows_per_expert),
            strict=True,
        )
        for rows, probs, received in runs:
            assert torch.equal(rows[: len(received)], received)
            assert not rows[len(received) :].any() and not probs[len(received) :].any()
        counts = torch.bincount(aligned.assignments.experts.flatten(), minlength=EXPERTS // 4)
        assert counts.tolist() == aligned.rows_per_expert

    on_ranks(work, 4, ep=4)
