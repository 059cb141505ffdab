"""Every pipeline order finishes under NCCL's rules, and what would not is named: the two calls that wait."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.gpu_lab.pipeline_calls import per_direction, pipeline_calls
from tests.marks import slow_except

from moefold.dryrun.fake_cuda.nccl_replay import Call, Logs, disagreements, replay
from moefold.schedule.actions import Action, Kind
from moefold.schedule.names import SCHEDULES


def draw(dice: random.Random) -> tuple[str, int, int, int]:
    """A schedule with sizes that it accepts: pp 2 to 16, vpp 1 to 8, 4 to 64 microbatches."""
    while True:
        name = dice.choice(sorted(SCHEDULES))
        ranks, virtual = dice.randint(2, 16), SCHEDULES[name].virtual or dice.randint(1, 8)
        microbatches = dice.randint(4, 64)
        if dice.random() < 0.5:
            microbatches = max(ranks, microbatches // ranks * ranks)
        if not SCHEDULES[name].problems(ranks, virtual, microbatches):
            return name, ranks, virtual, microbatches


@pytest.mark.parametrize("start", slow_except(range(0, 1050, 50), 0))
def test_1000_drawn_pipelines_finish(start: int) -> None:
    for seed in range(start, start + 50 if start else 15):
        case = draw(random.Random(seed))
        calls = pipeline_calls(*case)
        assert sum(map(len, calls.values())) >= 4
        assert not disagreements(calls), case
        assert replay(calls) is None, case


# ---- what the replay must find ----

Faulty = dict[int, list[Call]]


def one_communicator_for_the_pipeline() -> Faulty:
    return pipeline_calls("1f1b", 2, 1, 4, lambda sender, receiver, ranks: "pp")


def one_communicator_per_pair() -> Faulty:
    """As torch makes them lazily."""
    return pipeline_calls("interleaved", 4, 4, 8, lambda a, b, ranks: f"{min(a, b)}-{max(a, b)}")


def one_communicator_in_a_v() -> Faulty:
    return pipeline_calls("dualpipe_v", 4, 2, 8, lambda a, b, ranks: "pp")


def a_receive_before_the_send_it_answers() -> Faulty:
    """The first rank waits for a gradient before it has sent the forward that makes it."""

    def change(rank: int, actions: list[Action]) -> list[Action]:
        if rank:
            return actions
        first = next(action for action in actions if action.kind is Kind.RECV_B)
        return [first, *(action for action in actions if action is not first)]

    return pipeline_calls("1f1b", 2, 1, 4, per_direction, change)


def a_send_that_is_left_out() -> Faulty:
    def change(rank: int, actions: list[Action]) -> list[Action]:
        sends = [action for action in actions if action.kind is Kind.SEND_F]
        return [action for action in actions if rank or action is not sends[1]]

    return pipeline_calls("gpipe", 3, 1, 4, per_direction, change)


def calls_of(*by_rank: list[tuple[str, str, tuple[int, ...]]]) -> Faulty:
    """(operation, communicator, calls that it waits for) of each of two ranks; transfers go to the other one."""
    return {
        rank: [
            Call(rank, n, what, where, (0, 1), 1 - rank if what in ("send", "recv") else None, (), 1, waits)
            for n, (what, where, waits) in enumerate(calls)
        ]
        for rank, calls in enumerate(by_rank)
    }


def both_ends_send_first() -> Faulty:
    return calls_of(*[[("send", "pp", ()), ("recv", "pp", ())]] * 2)


def two_communicators_in_two_orders() -> Faulty:
    a, b = "all_gather", "all_to_all"
    return calls_of([(a, "fsdp", ()), (b, "ep", (0,))], [(b, "ep", ()), (a, "fsdp", (0,))])


def a_cpu_collective_that_one_rank_makes_earlier() -> Faulty:
    found = calls_of([("all_reduce", "world", ()), ("all_reduce", "tp", ())], [("all_reduce", "tp", ())])
    # gloo blocks the host: what follows on rank 1 is never launched.
    found[1] += [replace(found[0][0], rank=1, number=1, waits=(0,))]
    found[0] = [replace(found[0][0], stream=None), found[0][1]]
    found[1] = [found[1][0], replace(found[1][1], stream=None)]
    return found


FAULTS = [
    one_communicator_for_the_pipeline,
    one_communicator_per_pair,
    one_communicator_in_a_v,
    a_receive_before_the_send_it_answers,
    a_send_that_is_left_out,
    both_ends_send_first,
    two_communicators_in_two_orders,
    a_cpu_collective_that_one_rank_makes_earlier,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_seeded_fault_is_named_with_the_calls_that_wait(fault: object) -> None:
    calls: Logs = fault()  # type: ignore[operator]
    stuck = replay(calls)
    assert stuck is not None
    assert len(stuck.circle) >= 2 and len({call.rank for call in stuck.circle}) == 2, stuck
    assert "waits for" in str(stuck)


def test_transfers_of_one_batch_may_meet_in_any_order() -> None:
    both = calls_of(*[[("send", "ring", ()), ("recv", "ring", ())]] * 2)
    batched = {rank: [replace(call, batch=0) for call in calls] for rank, calls in both.items()}
    assert replay(batched) is None


def test_independent_communicators_may_be_used_in_any_order() -> None:
    assert (
        replay(calls_of([("all_gather", "a", ()), ("x", "b", ())], [("x", "b", ()), ("all_gather", "a", ())])) is None
    )


def test_ranks_that_differ_are_named() -> None:
    base = calls_of([("all_reduce", "tp", ())], [("all_reduce", "tp", ())])
    on_cpu = base | {1: [replace(base[1][0], signature=((), "float64", "cpu"))]}
    assert "cpu" in disagreements(on_cpu)[0]
    assert "no such call on rank 1" in disagreements(base | {1: []})[0]
    sent = calls_of([("send", "c", ()), ("send", "c", ())], [("recv", "c", ())])
    assert "2 messages from rank 0 to rank 1, 1 expected" in disagreements(sent)[0]
