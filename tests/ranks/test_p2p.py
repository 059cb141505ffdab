"""Messages between stages: in sequence, of any shapes, without waiting for each other."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from tests.marks import slow_except
from tests.support import on_ranks
from torch import Tensor

from moefold.comm.p2p import Expected, P2PChannels, all_reduce_p2p
from moefold.comm.process_groups import Groups


def _pipes(groups: Groups, expected: list[Expected], dtype: torch.dtype = torch.float64, ahead: int = 2) -> P2PChannels:
    return P2PChannels(groups["pp"], dtype, torch.device("cpu"), deque(expected), posted_ahead=ahead)


def _message(sender: int, number: int, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    return [torch.full(shape, 100.0 * sender + 10 * number + part) for part, shape in enumerate(shapes)]


# What is sent in turn: uneven, of several tensors, some or all of them empty, and no tensor at all.
SHAPES: list[tuple[tuple[int, ...], ...]] = [
    ((3, 4),),
    ((7, 4), (1, 4), (5, 4)),
    ((0, 4),),
    ((2, 4), (0, 4), (2, 4)),
    (),
    ((1, 4),),
]


@pytest.mark.parametrize("ahead", slow_except([1, 2, 5, 100], 5, 100))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_messages_arrive_in_the_order_of_sending(dtype: torch.dtype, ahead: int) -> None:
    """From one rank to the next, and back at the same time; nobody receives before everything was sent."""

    def work(groups: Groups) -> None:
        pp = groups["pp"]
        neighbours = [rank for rank in (pp.index - 1, pp.index + 1) if 0 <= rank < pp.size]
        expected = [Expected(peer, shapes) for shapes in SHAPES for peer in neighbours]
        pipes = _pipes(groups, expected, dtype, ahead)
        for number, shapes in enumerate(SHAPES):
            for peer in neighbours:
                pipes.send([tensor.to(dtype) for tensor in _message(pp.index, number, shapes)], peer)
        for number, shapes in enumerate(SHAPES):
            for peer in neighbours:
                arrived, sent = pipes.receive(), _message(peer, number, shapes)
                assert len(arrived) == len(sent)
                for got, want in zip(arrived, sent):
                    assert got.dtype == dtype and torch.equal(got, want.to(dtype))
        pipes.finish()

    on_ranks(work, 3, pp=3)


def test_a_peer_may_be_waited_for_while_another_has_sent_long_ago() -> None:
    """Receives are in order of use, whatever the order in which different peers send."""

    def work(groups: Groups) -> list[float]:
        pp = groups["pp"]
        if pp.index:
            pipes = _pipes(groups, [Expected(0, ((1,),))] if pp.index == 2 else [])
            if pp.index == 2:
                pipes.receive()  # rank 0 has had rank 1's message
            pipes.send([torch.tensor([float(pp.index)], dtype=torch.float64)], 0)
            pipes.finish()
            return []
        pipes = _pipes(groups, [Expected(1, ((1,),)), Expected(2, ((1,),))], ahead=2)
        first = pipes.receive()[0].item()
        pipes.send([torch.zeros(1, dtype=torch.float64)], 2)
        second = pipes.receive()[0].item()
        pipes.finish()
        return [first, second]

    assert on_ranks(work, 3, pp=3)[0] == [1.0, 2.0]


def test_what_is_sent_may_change_hands_at_once() -> None:
    """A cut of a larger tensor goes out as it looks, and large messages do not wait for their receiver."""

    def work(groups: Groups) -> None:
        pp = groups["pp"]
        size, other = 1 << 19, 1 - pp.index
        pipes = _pipes(groups, [Expected(other, ((size,), (4, 3)))] * 3)
        wide = torch.arange(12, dtype=torch.float64).view(3, 4) + pp.index
        for number in range(3):
            # Both send first: 4 MB are more than any buffer of the network holds.
            pipes.send([torch.full((size,), 10.0 * number + pp.index, dtype=torch.float64), wide.t()], other)
        for number in range(3):
            large, turned = pipes.receive()
            assert large.unique().tolist() == [10.0 * number + other]
            assert torch.equal(turned, (wide - pp.index + other).t())
        pipes.finish()

    on_ranks(work, 2, pp=2)


def test_gradients_stay_behind() -> None:
    def work(groups: Groups) -> None:
        pp = groups["pp"]
        pipes = _pipes(groups, [Expected(1 - pp.index, ((2,),))])
        pipes.send([torch.ones(2, dtype=torch.float64, requires_grad=True) * 2], 1 - pp.index)
        (arrived,) = pipes.receive()
        assert not arrived.requires_grad and arrived.tolist() == [2.0, 2.0]
        pipes.finish()

    on_ranks(work, 2, pp=2)


def test_the_ledger_counts_what_is_sent() -> None:
    def work(groups: Groups) -> list[int]:
        pp = groups["pp"]
        pipes = _pipes(groups, [Expected(1 - pp.index, ((5, 2), (0, 2)))])
        pipes.send([torch.ones(5, 2, dtype=torch.float64), torch.ones(0, 2, dtype=torch.float64)], 1 - pp.index)
        pipes.receive()
        pipes.finish()
        return [*pp.ledger.of("send", "pp")]

    assert on_ranks(work, 2, pp=2) == [[2, 5 * 2 * 8]] * 2


# ---- a sum over some of the ranks ----


@pytest.mark.parametrize("members", [(0, 3), (1, 2, 3), (0, 1, 2, 3), (2,)])
def test_members_get_the_same_bits_and_others_take_no_part(members: tuple[int, ...]) -> None:
    """1 and 1e8 and -1e8 in float32: whoever adds in another order gets another sum."""
    parts = [torch.tensor([[1.0, 1e8], [-1e8, 0.1]]).roll(rank) * (1 + rank / 7) for rank in range(4)]
    want = parts[members[0]].clone()
    for member in members[1:]:
        want += parts[member]

    def work(groups: Groups) -> None:
        pp = groups["pp"]
        if pp.index in members:
            mine = parts[pp.index].clone()
            assert torch.equal(all_reduce_p2p(mine, members, pp), want)
            assert torch.equal(mine, parts[pp.index])

    on_ranks(work, 4, pp=4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(0, 3),
        lambda: torch.tensor(2.0),
        lambda: torch.arange(6.0).view(2, 3).t(),
        lambda: torch.arange(12.0).view(3, 4)[:, 1:3],
        lambda: torch.arange(4.0).bfloat16(),
    ],
    ids=["empty", "scalar", "turned", "cut", "bfloat16"],
)
def test_any_tensor_can_be_summed(make: object) -> None:
    assert callable(make)

    def work(groups: Groups) -> None:
        pp = groups["pp"]
        x = make()
        total = all_reduce_p2p(x * (pp.index + 1), (0, 1), pp)
        assert total.shape == x.shape and torch.equal(total, x * 3)
        # As it lies, too: gradients are summed in whatever layout they have.
        assert torch.equal(all_reduce_p2p(x, (0, 1), pp), x * 2)

    on_ranks(work, 2, pp=2)


def test_bfloat16_is_summed_in_a_wider_dtype() -> None:
    """256 + 1 + 1: in bfloat16 each 1 by itself would be rounded away."""

    def work(groups: Groups) -> None:
        mine = torch.tensor([(256.0, 1.0, 1.0)[groups["pp"].index]]).bfloat16()
        assert all_reduce_p2p(mine, (0, 1, 2), groups["pp"]).item() == 258.0

    on_ranks(work, 3, pp=3)


def test_several_sums_follow_each_other() -> None:
    """As tied weights of several kinds would: different members each time, in the same order everywhere."""

    def work(groups: Groups) -> None:
        pp = groups["pp"]
        for number, members in enumerate(((0, 1), (1, 2), (0, 2), (0, 1, 2))):
            if pp.index in members:
                total = all_reduce_p2p(torch.full((1000,), float(pp.index + number)), members, pp)
                assert total.unique().tolist() == [sum(members) + number * len(members)]

    on_ranks(work, 3, pp=3)
