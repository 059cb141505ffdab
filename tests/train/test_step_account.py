"""The account of a step from stamps, against a walk through every tick of the clock, and mutants of the account."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from moefold.comm.spans import Mark, Operation, RankStep, Span
from moefold.train.profile import account as accounting
from moefold.train.profile.account import account, axis_of
from moefold.train.profile.causes import causes_of, measured_wall
from moefold.train.profile.step_account import Link, StepAccount, together, wall_seconds

TICKS = 400
GROUPS = ("ep", "dense_shard", "tp", "pp", "world", "context_2")


def random_spans(draw: random.Random, stream: int, begin: int, end: int, depth: int, waits: list[int]) -> list[Span]:
    """Nested spans inside of an interval, in ticks; the innermost ones may wait for an operation."""
    found, at = [], begin
    while at < end - 4 and depth:
        start, until = sorted(draw.sample(range(at, end), 2))
        leaf = depth == 1 or draw.random() < 0.4
        if leaf and waits and draw.random() < 0.6:
            found.append(Span(stream, "comm", "waits", start, until, (waits.pop(0),)))
        elif leaf and stream == 0 and draw.random() < 0.2:
            found.append(Span(stream, "wait", "for the comm stream", start, until))
        else:
            found.append(Span(stream, draw.choice(("compute", "host", "gc")), "works", start, until))
            found += random_spans(draw, stream, start, until, depth - 1, waits)
        at = until + draw.randrange(1, 20)
    return found


def random_steps(seed: int, world: int) -> tuple[list[RankStep], list[int]]:
    draw = random.Random(seed)
    groups = [draw.choice(GROUPS) for _ in range(12)]
    steps = []
    for rank in range(world):
        starts = sorted(draw.sample(range(TICKS), len(groups)))
        peers = tuple(range(world))
        operations = [
            Operation(f"communicator of {group}", number, "all_reduce", group, peers, 8, start)
            for number, (group, start) in enumerate(zip(groups, starts, strict=True))
        ]
        waits = list(range(len(groups)))
        spans = random_spans(draw, 0, 0, TICKS, 3, waits[::2]) + random_spans(draw, 1, 0, TICKS, 2, waits[1::2])
        names = ["before step", "data", "step", "update", "checkpoint", "agreement"]
        marks = [Mark(name, at) for name, at in zip(names, sorted(draw.sample(range(TICKS), len(names))), strict=True)]
        steps.append(RankStep(rank, 7, 0, TICKS, marks, spans, operations))
    return steps, [rank * 2 // world for rank in range(world)]


def tick_by_tick(steps: list[RankStep], stages: list[int]) -> list[Counter[str]]:
    """What each rank does at every tick, looked up from the beginning each time."""

    def of_comm(step: RankStep, span: Span, tick: int) -> str:
        own = step.operations[span.operations[0]]
        others = [
            (other.rank, op.start)
            for other in steps
            for op in other.operations
            if (op.communicator, op.number) == (own.communicator, own.number)
        ]
        if any(tick < start and stages[rank] == stages[step.rank] for rank, start in others):
            return f"wait.{axis_of(own.group)}"
        if any(tick < start for _, start in others):
            return "bubble"
        return f"comm.{axis_of(own.group)}"

    def innermost(step: RankStep, stream: int, tick: int) -> Span | None:
        found = [span for span in step.spans if span.stream == stream and span.start <= tick < span.end]
        return min(found, key=lambda span: (span.end - span.start, -step.spans.index(span))) if found else None

    def state(step: RankStep, tick: int) -> str:
        mark = "before step"
        for each in step.marks:
            if each.at <= tick:
                mark = each.name
        if mark == "checkpoint":
            return "save"
        span = innermost(step, 0, tick)
        if span is None:
            return {"data": "data", "before step": "host", "agreement": "host"}.get(mark, "other")
        if span.kind == "wait":
            span = innermost(step, 1, tick)
            if span is None:
                return "host"
        return of_comm(step, span, tick) if span.kind == "comm" else span.kind

    return [Counter(state(step, tick) for tick in range(TICKS)) for step in steps]


@pytest.mark.parametrize("seed", range(30))
def test_components_are_those_of_a_walk_through_all_ticks(seed: int) -> None:
    steps, stages = random_steps(seed, 1 + seed % 4)
    found = account(steps, stages)
    assert [Counter(each) for each in found.components] == tick_by_tick(steps, stages)
    assert found.residue() == 0


def late_rank() -> StepAccount:
    """Rank 1 starts the all-to-all 30 ticks after rank 0; the transfer takes 20. Then stage 1 sends 40 ticks late."""
    ranks, told = (0, 1), []
    for rank, late in ((0, 0), (1, 30)):
        op = Operation("ep", 1, "all_to_all", "ep", ranks, 1 << 20, 100 + late)
        message = Operation("0 to 2", 1, "receive", "pp", (2,), 1 << 20, 10)
        spans = [
            Span(0, "compute", "F0@0", 0, 100 + late),
            Span(0, "comm", "all_to_all ep", 100 + late, 150, (0,)),
            Span(0, "comm", "receive pp", 150, 200, (1,)),
        ]
        told.append(RankStep(rank, 1, 0, 200, [Mark("step", 0)], spans, [op, message]))
    sent = Operation("0 to 2", 1, "send", "pp", (0,), 1 << 20, 190)
    told.append(RankStep(2, 1, 0, 200, [Mark("step", 0)], [Span(0, "compute", "F0@1", 0, 200)], [sent]))
    return account(told, [0, 0, 1])


def check_late_rank() -> None:
    found = late_rank()
    assert found.components[0] == {"compute": 100, "wait.ep": 30, "comm.ep": 20, "bubble": 40, "comm.pp": 10}
    assert found.components[1] == {"compute": 130, "comm.ep": 20, "bubble": 40, "comm.pp": 10}
    assert found.components[2] == {"compute": 200}
    # Others waited for rank 1 in the all-to-all, and for rank 2 in the messages.
    assert found.late == [0, 30, 80]
    assert [(link.axis, link.ranks, link.seconds) for link in found.links if link.axis == "ep"] == [("ep", (0, 1), 40)]
    assert found.residue() == 0


def test_waiting_for_a_late_rank_is_no_transfer_and_waiting_for_a_stage_is_a_bubble() -> None:
    check_late_rank()


def _twice(real: Callable[..., Any]) -> Callable[..., Any]:
    def both(*given: Any) -> Any:
        pieces = list(real(*given))
        return pieces + [piece for piece in pieces if piece.component == "comm.ep"]

    return both


def _as(old: str, new: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: [
            piece._replace(component=new) if piece.component == old else piece for piece in real(*given)
        ]

    return change


class _OwnStarts(accounting.Starts):
    def ready(self, op: Operation, rank: int) -> Any:
        return super().ready(op._replace(peers=(rank,)), rank)


MUTANTS = {
    "an axis counted twice": ("pieces_of", _twice),
    "a wait booked as compute": ("pieces_of", _as("wait.ep", "compute")),
    "a bubble booked as transfer": ("pieces_of", _as("bubble", "comm.pp")),
    "a transfer booked as waiting": ("pieces_of", _as("comm.ep", "wait.ep")),
    "stages not told apart": ("Starts", lambda real: lambda steps, stages: real(steps, [0] * len(stages))),
    "starts of other ranks not looked at": (
        "Starts",
        lambda real: lambda steps, stages: _OwnStarts(steps, stages),
    ),
    "late ranks not named": ("_add_late", lambda real: lambda *given: None),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_mutants_of_the_account_are_noticed(name: str) -> None:
    where, change = MUTANTS[name]
    with patch.object(accounting, where, change(getattr(accounting, where))), pytest.raises((AssertionError, KeyError)):
        check_late_rank()


def test_save_and_validation_have_all_that_happens_inside() -> None:
    op = Operation("world", 1, "all_reduce", "world", (0,), 8, 12)
    spans = [Span(0, "comm", "all_reduce world", 12, 18, (0,))]
    step = RankStep(0, 1, 0, 30, [Mark("checkpoint", 10), Mark("validation", 20)], spans, [op])
    assert account([step]).components == [{"host": 10, "save": 10, "validation": 10}]


def test_an_account_is_the_same_after_it_was_written() -> None:
    found = late_rank()
    assert StepAccount.from_json(found.to_json()) == found


def test_components_together() -> None:
    parts = together({"compute": 1.0, "comm.ep": 2.0, "comm.tp": 3.0, "wait.ep": 4.0, "bubble": 5.0})
    assert {name: value for name, value in parts.items() if value} == {
        "compute": 1.0,
        "communication": 5.0,
        "imbalance": 4.0,
        "bubble": 5.0,
    }


def steps_of(ranks: list[dict[str, float]], links: list[Link] | None = None) -> list[StepAccount]:
    walls = [sum(parts.values()) for parts in ranks]
    return [StepAccount(n, walls, ranks, [0.0] * len(ranks), links or [], [0] * len(ranks)) for n in (1, 2)]


def test_the_link_of_one_rank_is_named_where_all_slow_groups_share_it() -> None:
    links = [
        Link("ep", (0, 1), "all_to_all", 8, 80_000_000, 0.2),
        Link("ep", (2, 3), "all_to_all", 8, 80_000_000, 4.0),
        Link("dp", (0, 2), "all_reduce", 8, 80_000_000, 0.2),
        Link("dp", (1, 3), "all_reduce", 8, 80_000_000, 4.0),
    ]
    (cause,) = [each for each in causes_of(steps_of([{"compute": 5.0, "comm.ep": 1.0}] * 4, links)) if each.ranks]
    assert (cause.kind, cause.ranks) == ("link", (3,)) and cause.what.startswith("slow link of rank 3: ")


@pytest.mark.parametrize(
    ("parts", "wall"),
    [
        ({"compute": 7.0, "comm.ep": 2.0, "host": 1.0}, "compute"),
        ({"compute": 6.0, "comm.ep": 2.0, "comm.tp": 1.0, "host": 1.0}, "communication"),
        ({"compute": 6.0, "wait.ep": 3.0, "host": 1.0}, "compute"),
        ({"compute": 6.0, "bubble": 3.0, "host": 1.0}, "compute"),
        ({"compute": 8.0, "host": 1.0, "gc": 1.0}, "host"),
        ({"compute": 7.0, "host": 1.0, "data": 2.0}, "host"),
    ],
)
def test_the_measured_wall_is_decided_by_the_planners_rule(parts: dict[str, float], wall: str) -> None:
    assert measured_wall(steps_of([parts] * 2)) == wall


def test_memory_is_the_wall_where_it_is_full() -> None:
    full = [replace(each, memory_bytes=[96, 10], capacity_bytes=100) for each in steps_of([{"compute": 1.0}] * 2)]
    assert measured_wall(full) == "memory"


def test_shares_of_uneven_steps_are_those_of_the_table() -> None:
    """The table has means over the steps: so has the step that causes are a share of, whatever one slow step does."""
    steps = [StepAccount(n, [wall], [{"compute": 0.4 * wall, "comm.ep": 0.6 * wall}], [0.0]) for n, wall in
             ((1, 9.0), (2, 1.0), (3, 1.0))]  # fmt: skip
    (communication,) = (cause for cause in causes_of(steps) if cause.what.startswith("communication"))
    assert communication.share == pytest.approx(0.6) and wall_seconds(steps) == pytest.approx(11 / 3)
