"""Orders of a layer's operations: they run, wrong ones are refused, and times are those of two streams."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moefold.cli.main import main
from moefold.errors import ConfigError, OrderError, UnknownNameError
from moefold.schedule.layer_operations import STEPS, Operation, check_order, simulate_order
from moefold.schedule.layer_orders import AT_ONCE, LAYER_ORDERS, layer_order, mirrored, take_turns

EXCHANGES = ("dispatch_exchange", "combine_exchange")


def names(order: tuple[Operation, ...], *directions: str) -> list[str]:
    return [operation.name for operation in order if operation.direction in directions]


@pytest.mark.parametrize("name", LAYER_ORDERS)
@pytest.mark.parametrize("layers", [1, 3])
def test_times_are_those_of_two_queues(name: str, layers: int) -> None:
    """Against a clock that moves in small ticks and knows nothing but which operations are over."""
    costs = {step.name: 0.25 * (1 + number % 5) for number, step in enumerate(STEPS)}
    timeline = layer_order(name, layers, costs)
    made_by = {value: each for each in timeline.order for value in each.outputs}
    over: dict[Operation, float] = {}
    waiting = {stream: [each for each in timeline.order if each.stream == stream] for stream in ("compute", "comm")}
    running: dict[str, tuple[Operation, float]] = {}
    now = 0.0
    while any(waiting.values()) or running:
        for stream, (operation, stop) in list(running.items()):
            if stop <= now:
                over[operation] = stop
                del running[stream]
        for stream, queue in waiting.items():
            if stream not in running and queue:
                needs = [made_by[value] for value in queue[0].inputs if value in made_by]
                if all(need in over for need in needs):
                    running[stream] = queue[0], now + queue[0].cost
                    queue.pop(0)
        now += 0.125
    assert timeline.finish == pytest.approx(max(over.values()))
    for operation, (_, stop) in zip(timeline.order, timeline.spans, strict=True):
        assert stop == pytest.approx(over[operation])


def test_one_after_the_other_takes_the_sum_and_exposes_every_exchange() -> None:
    timeline = layer_order("sequential", 2)
    assert timeline.finish == pytest.approx(sum(operation.cost for operation in timeline.order))
    assert timeline.exposed == pytest.approx(timeline.busy("comm"))
    assert timeline.bound == pytest.approx(timeline.busy("compute"))


def test_what_runs_beside_an_exchange_hides_it() -> None:
    shared = {"shared_up": 2.5, "shared_down": 2.5}
    exposed = {name: layer_order(name, 2, shared).exposed for name in LAYER_ORDERS}
    counts = 2 * 0.1
    assert exposed["shared_experts"] == pytest.approx(counts)
    assert exposed["shared_beside_dispatch"] == pytest.approx(2 * 2 * 2 + counts)
    assert exposed["shared_beside_combine"] == pytest.approx(2 * 2 * 2 + counts)
    assert exposed["sequential"] == pytest.approx(2 * 4 * 2 + counts)
    assert exposed["forward_backward"] < 0.1 * exposed["sequential"]
    small = {"shared_up": 0.0, "shared_down": 0.0}
    assert layer_order("megascale_operators", 2, small).exposed < layer_order("shared_experts", 2, small).exposed


@pytest.mark.parametrize("name", LAYER_ORDERS)
def test_random_changes_of_an_order_are_refused_or_harmless(name: str) -> None:
    """An operation moved to a random place: refused exactly if something then runs before what it reads."""
    timeline, dice = layer_order(name, 2), random.Random(3)
    operations = timeline.order
    made_by = {value: each for each in operations for value in each.outputs}
    refused = 0
    for _ in range(100):
        order = list(operations)
        order.insert(dice.randrange(len(order)), order.pop(dice.randrange(len(order))))
        place = {operation: number for number, operation in enumerate(order)}
        wrong = any(place[made_by[v]] > place[each] for each in order for v in each.inputs if v in made_by)
        if wrong:
            refused += 1
            with pytest.raises(OrderError, match=r"before .* has written it"):
                check_order(operations, [order])
        else:
            check_order(operations, [order])
    assert refused > 30


def _second(order: list[Operation]) -> list[Operation]:
    return [*order, order[3]]


def _without(order: list[Operation]) -> list[Operation]:
    """The last one, which nothing waits for."""
    return order[:-1]


def _finish_first(order: list[Operation]) -> list[Operation]:
    ids = [str(operation) for operation in order]
    one, two = ids.index("F0.0.combine_exchange"), ids.index("F0.0.combine_finish")
    order[one], order[two] = order[two], order[one]
    return order


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_second, "a second time"),
        (_without, "1 operations are missing: B0.0.attention"),
        (_finish_first, "F0.0.combine_finish reads 0.0.returned before"),
    ],
)
def test_wrong_orders_are_refused(change: Callable[[list[Operation]], list[Operation]], message: str) -> None:
    operations = layer_order("shared_experts").order
    with pytest.raises(OrderError, match=message):
        check_order(operations, [change(list(operations))])


def test_all_ranks_issue_collectives_in_one_sequence() -> None:
    operations = layer_order("forward_forward").order
    other = list(operations)
    places = [n for n, each in enumerate(other) if each.name == "dispatch_counts"]
    assert len(places) == 2
    # Computation may differ between ranks; collectives may not, though each rank's order is valid by itself.
    routes = [n for n, each in enumerate(other) if each.name in ("attention", "route")]
    swapped = [*(other[n] for n in sorted(routes)), *(each for n, each in enumerate(other) if n not in routes)]
    check_order(operations, [operations, swapped])
    first, second = (n for n, each in enumerate(swapped) if each.name == "dispatch_counts")
    swapped[first], swapped[second] = swapped[second], swapped[first]
    ids = [str(each) for each in swapped]
    swapped.insert(ids.index("F0.0.dispatch_counts") + 1, swapped.pop(ids.index("F0.0.dispatch_prepare")))
    ids = [str(each) for each in swapped]
    swapped.insert(ids.index("F0.0.dispatch_prepare") + 1, swapped.pop(ids.index("F0.0.dispatch_exchange")))
    with pytest.raises(OrderError, match=r"rank 1 issues .* where rank 0 issues"):
        check_order(operations, [operations, swapped])


def test_the_backward_mirrors_the_forward() -> None:
    for name in ("sequential", "shared_beside_dispatch", "shared_beside_combine", "shared_experts"):
        order = layer_order(name).order
        forward, backward = names(order, "F"), names(order, "B")
        assert sorted(backward) == sorted(set(forward) - {"dispatch_counts"})
        for exchange, finish, prepare in (
            ("dispatch_exchange", "dispatch_finish", "dispatch_prepare"),
            ("combine_exchange", "combine_finish", "combine_prepare"),
        ):
            beside = forward[forward.index(exchange) + 1 : forward.index(finish)]
            beside_backward = backward[backward.index(exchange) + 1 : backward.index(prepare)]
            assert beside_backward == beside[::-1], name
    assert len(mirrored(LAYER_ORDERS["sequential"].lists[0][1])) == len(STEPS) - 1


def test_turns() -> None:
    assert take_turns([[False, True, False], [True, False]]) == (0, 0, 1, 0, 1)
    assert take_turns([[], [False]]) == (1,) and take_turns([]) == ()
    order = layer_order("forward_backward").order
    assert [str(each) for each in order if each.communicates and each.name not in AT_ONCE] == [
        "B0.0.combine_exchange",
        "F1.0.dispatch_exchange",
        "B0.0.dispatch_exchange",
        "F1.0.combine_exchange",
    ]


def test_exposed_time_of_given_spans() -> None:
    def made(name: str, stream: str, reads: tuple[str, ...], writes: tuple[str, ...], cost: float) -> Operation:
        return Operation("F", 0, 0, name, stream, reads, writes, cost)  # type: ignore[arg-type]

    order = [
        made("a", "compute", (), ("a",), 1.0),
        made("send", "comm", ("a",), ("b",), 4.0),
        made("beside", "compute", ("a",), (), 2.5),
        made("c", "compute", ("b",), (), 1.0),
    ]
    timeline = simulate_order("by hand", order)
    assert timeline.spans == ((0.0, 1.0), (1.0, 5.0), (1.0, 3.5), (5.0, 6.0))
    assert (timeline.finish, timeline.exposed, timeline.bound) == (6.0, 1.5, 4.5)


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(UnknownNameError):
        layer_order("sequentially")
    with pytest.raises(UnknownNameError):
        layer_order("sequential", costs={"expert": 1.0})
    with pytest.raises(ConfigError, match="must be positive"):
        layer_order("sequential", 0)
    with pytest.raises(ConfigError, match="0 or more"):
        layer_order("sequential", costs={"route": -1.0})


def test_the_verb_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "layer.svg", tmp_path / "layer.json"
    words = ["schedule", "shared_experts", "--layers", "1", "--cost", "dispatch_exchange=3"]
    assert main([*words, "--width", "140", "--svg", str(picture), "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith(("compute |", "comm "))]
    assert len(rows) == 2 and max(map(len, rows)) <= 140
    assert rows[1].index("B0:dispa") == rows[0].index("B0:s")
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(events) == len(data["operations"]) and data["exposed"] > 0
    assert main(["schedule", "layers"]) == 0
    assert all(name in capsys.readouterr().out for name in ["megascale_holistic"])
    assert main(["schedule", "1f1b"]) != 0
    assert "--stages, --microbatches: missing" in capsys.readouterr().err
