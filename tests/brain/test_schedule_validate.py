"""Faults seeded into good orders are found, each at its place; sizes of real runs are checked within seconds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.marks import slow_except

from moefold.errors import OrderError
from moefold.schedule.actions import Action, Kind, Order, overlap
from moefold.schedule.names import SCHEDULES
from moefold.schedule.passes import add_transfers, executable, split_backward
from moefold.schedule.simulate import simulate
from moefold.schedule.validate import check, problems

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT
Edit = Callable[[list[Action]], None]


def edited(order: Order, rank: int, edit: Edit) -> Order:
    actions = [list(row) for row in order.actions]
    edit(actions[rank])
    return replace(order, actions=tuple(map(tuple, actions)))


def swap(first: Action, second: Action) -> Edit:
    def edit(actions: list[Action]) -> None:
        i, j = actions.index(first), actions.index(second)
        actions[i], actions[j] = actions[j], actions[i]

    return edit


def remove(action: Action) -> Edit:
    return lambda actions: actions.remove(action)


def repeat(action: Action) -> Edit:
    return lambda actions: actions.insert(actions.index(action) + 1, action)


PLAIN = SCHEDULES["1f1b"].build(4, 1, 8)
WHOLE = add_transfers(PLAIN)
SPLIT = SCHEDULES["zb_h1"].build(4, 1, 8)
PAIRED = SCHEDULES["1f1b_overlapped"].build(4, 1, 8)


@pytest.mark.parametrize(
    ("order", "rank", "edit", "said"),
    [
        (PLAIN, 2, remove(Action(F, 2, 7)), "rank 2, position 14: B7@2 comes before its forward"),
        (PLAIN, 1, remove(Action(B, 1, 4)), "rank 1: stage 1 never does the backward of microbatch 4"),
        (SPLIT, 3, remove(Action(W, 3, 4)), "rank 3: stage 3 never does the weight gradient of microbatch 4"),
        (PLAIN, 0, repeat(Action(F, 0, 5)), "F5@0 is done a second time"),
        (PLAIN, 0, repeat(Action(B, 0, 5)), "the backward of B5@0 is done a second time"),
        (SPLIT, 2, repeat(Action(W, 2, 5)), "the weight gradient of W5@2 is done a second time"),
        (PLAIN, 3, swap(Action(F, 3, 2), Action(B, 3, 2)), "rank 3, position 4: B2@3 comes before its forward"),
        (SPLIT, 0, swap(Action(Kind.BACKWARD_INPUT, 0, 2), Action(W, 0, 2)), "W2@0 comes before its input gradient"),
        (PLAIN, 1, lambda row: row.append(Action(W, 1, 0)), "the weight gradient of W0@1 is done a second time"),
        (PLAIN, 1, lambda row: row.append(Action(F, 2, 0)), "stage 2 is on rank 2, not on rank 1"),
        (PLAIN, 1, lambda row: row.append(Action(F, 1, 8)), "there is no stage 1 with a microbatch 8"),
        (PLAIN, 1, lambda row: row.append(Action(Kind.OVERLAP, 1, 1)), "an OVERLAP has a pair"),
        (
            PAIRED,
            3,
            lambda row: row.insert(1, overlap(Action(F, 3, 0), Action(B, 3, 0))),
            "both are of microbatch 0, so the backward waits for the forward",
        ),
        (WHOLE, 1, remove(Action(Kind.SEND_F, 1, 3)), "the output of stage 1 for microbatch 3 is never sent"),
        (WHOLE, 1, remove(Action(Kind.SEND_B, 1, 3)), "the input gradient of stage 1 for microbatch 3 is never sent"),
        (WHOLE, 1, repeat(Action(Kind.SEND_F, 1, 3)), "SF3@1 sends what is not there"),
        (WHOLE, 1, remove(Action(Kind.RECV_F, 1, 3)), "F3@1 uses what has not been received"),
        (WHOLE, 1, repeat(Action(Kind.RECV_F, 1, 3)), "RF3@1 is received a second time"),
        (WHOLE, 1, swap(Action(Kind.SEND_F, 1, 3), Action(F, 1, 3)), "SF3@1 sends what is not there: not made yet"),
        (WHOLE, 2, swap(Action(Kind.RECV_B, 2, 3), Action(B, 2, 3)), "B3@2 uses what has not been received"),
        (WHOLE, 3, lambda row: row.append(Action(Kind.SEND_F, 3, 0)), "SF0@3 has no other rank to go to"),
        (WHOLE, 0, lambda row: row.insert(0, Action(Kind.RECV_F, 0, 0)), "RF0@0 has no other rank"),
    ],
)
def test_a_seeded_fault_is_found_at_its_place(order: Order, rank: int, edit: Edit, said: str) -> None:
    assert problems(order) == []
    found = problems(edited(order, rank, edit))
    assert any(said in str(fault) for fault in found), found
    assert found[0].rank == rank


def test_a_receive_that_nobody_sends_to() -> None:
    found = problems(edited(WHOLE, 1, remove(Action(Kind.SEND_F, 1, 7))))
    assert str(found[1]) == "rank 2, position 39: RF7@2 waits for a message that rank 1 never sends"


def test_a_receive_before_any_send() -> None:
    """Rank 0 wants its first gradient before it sends the microbatch that the gradient is of."""

    def first(row: list[Action]) -> None:
        receive = Action(Kind.RECV_B, 0, 0)
        row.remove(receive)
        row.insert(0, receive)

    found = problems(edited(WHOLE, 0, first))
    assert str(found[0]).startswith("rank 0, position 0: deadlock: RB0@0 waits for SB0@1 of rank 1")
    assert str(found[0]).endswith("which is stuck before it at RF0@1")
    assert str(found[1]).startswith("rank 1, position 0: deadlock: RF0@1 waits for SF0@0 of rank 0")


def test_receivers_must_take_messages_in_the_order_of_their_sends() -> None:
    """Each message is sent once and received once before its use, but two are confused."""

    def early(row: list[Action]) -> None:
        late = Action(Kind.RECV_F, 2, 1)
        row.remove(late)
        row.insert(0, late)

    found = problems(edited(WHOLE, 2, early))
    assert str(found[0]) == "rank 2, position 0: message 0 from rank 1 is SF0@1 (its position 2), not RF1@2's"


def test_a_deadlock_names_the_circle_and_shows_the_cells() -> None:
    """Rank 1 of GPipe wants its first gradient before it forwards the second microbatch, rank 2 the other way round."""
    gpipe = SCHEDULES["gpipe"].build(3, 1, 3)
    order = edited(gpipe, 1, lambda row: row.insert(1, row.pop(3)))
    with pytest.raises(OrderError) as raised:
        check(order)
    lines = str(raised.value).splitlines()
    assert "deadlock: B0@1 waits for B0@2 of rank 2 at position 3, which is stuck before it at F1@2" in lines[0]
    assert "rank 1 |" in lines[3] and "F0@1  [B0@1]" in lines[3]
    assert "[F1@2]" in lines[5]
    assert "deadlock: F1@2 waits for F1@1 of rank 1 at position 2, which is stuck before it at B0@1" in lines[-1]
    assert problems(add_transfers(order)), "with the messages written down, too"

    timeline = simulate(order)
    assert timeline.finish == float("inf")
    assert [stuck.action for stuck in timeline.stuck] == [Action(B, 0, 0), Action(B, 1, 0), Action(F, 2, 1)]


def test_a_pair_that_waits_for_its_own_rank_is_a_deadlock() -> None:
    """Rank 0 forwards microbatch 1 only beside the backward of 0; rank 1 wants both forwards first."""
    gpipe = SCHEDULES["gpipe"].build(2, 1, 2)
    pair = overlap(Action(F, 0, 1), Action(B, 0, 0))
    order = replace(gpipe, actions=((Action(F, 0, 0), pair, Action(B, 0, 1)), gpipe.actions[1]))
    assert "deadlock" in str(problems(order)[0])


def test_the_message_points_at_the_cell() -> None:
    with pytest.raises(OrderError) as raised:
        check(edited(PLAIN, 3, swap(Action(F, 3, 2), Action(B, 3, 2))))
    first, *lines = str(raised.value).splitlines()
    assert first.endswith("cannot run: rank 3, position 4: B2@3 comes before its forward")
    assert lines == [
        "",
        "rank 1 |  F0@1   F1@1   F2@1   B0@1   F3@1   B1@1   F4@1   B2@1   F5@1",
        "rank 2 |  F0@2   F1@2   B0@2   F2@2   B1@2   F3@2   B2@2   F4@2   B3@2",
        "rank 3 |  F0@3   B0@3   F1@3   B1@3  [B2@3]  F2@3   F3@3   B3@3   F4@3",
        "                                     ^^^^^^ position 4",
    ]


def test_any_one_change_to_an_order_is_noticed() -> None:
    """Drop, double or move any action: nothing slips through, except moves that are as good as before."""
    draw = random.Random(1)
    for name, schedule in SCHEDULES.items():
        order = executable(name, 3, schedule.virtual or 2, 8)
        for _ in range(60):
            rank = draw.randrange(3)
            at = draw.randrange(len(order.actions[rank]))
            assert problems(edited(order, rank, lambda row, at=at: row.pop(at))), (name, rank, at)
            assert problems(edited(order, rank, lambda row, at=at: row.insert(at, row[at]))), (name, rank, at)


def test_lists_that_do_not_fit_the_sizes() -> None:
    assert "lists of 3 ranks, not of 4" in str(problems(replace(PLAIN, actions=PLAIN.actions[:3]))[0])
    assert "3 stages have a rank, not 4" in str(problems(replace(PLAIN, rank_of_stage=(0, 1, 2)))[0])


def test_a_thoroughly_wrong_order_is_reported_briefly() -> None:
    broken = replace(PLAIN, actions=tuple(row[::-1] for row in PLAIN.actions))
    with pytest.raises(OrderError) as raised:
        check(broken)
    assert len(str(raised.value).splitlines()) < 40 and "also, among others:" in str(raised.value)


@pytest.mark.timing
@pytest.mark.parametrize("name", slow_except(["interleaved", "interleaved_overlapped", "dualpipe_v"], "interleaved"))
def test_the_order_of_deepseek_v3_is_built_and_checked_in_seconds(name: str) -> None:
    start = time.process_time()
    order = check(add_transfers(SCHEDULES[name].build(16, 2, 512)))
    seconds = time.process_time() - start
    assert sum(map(len, order.actions)) > 70_000
    assert seconds < 5, seconds
    assert problems(split_backward(SCHEDULES[name].build(16, 2, 512))) == []


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize(("name", "virtual", "microbatches"), [("1f1b", 1, 4), ("interleaved", 2, 2)])
def test_ten_thousand_ranks_are_checked_in_seconds(name: str, virtual: int, microbatches: int) -> None:
    order = add_transfers(SCHEDULES[name].build(10_000, virtual, microbatches))
    start = time.process_time()
    check(order)
    seconds = time.process_time() - start
    assert seconds < 5, seconds
