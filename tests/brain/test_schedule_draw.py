"""Drawings of orders, and the verb that makes them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moefold.cli.main import main
from moefold.schedule.names import SCHEDULES
from moefold.schedule.passes import add_transfers
from moefold.schedule.simulate import Durations, simulate
from moefold.schedule.timeline_picture import chrome_trace, label, shown, svg, text_grid

SMALL = ["--stages", "4", "--microbatches", "8"]


def test_text_grid() -> None:
    assert text_grid(simulate(SCHEDULES["1f1b"].build(3, 1, 4))).splitlines() == [
        "rank 0 | F0 F1 F2             B0--- F3 B1---    B2---    B3---",
        "rank 1 |    F0 F1       B0--- F2 B1--- F3 B2---    B3---",
        "rank 2 |       F0 B0--- F1 B1--- F2 B2--- F3 B3---",
    ]


def test_a_grid_that_is_too_wide_keeps_both_ends_and_its_columns() -> None:
    timeline = simulate(SCHEDULES["1f1b"].build(3, 1, 40))
    lines = text_grid(timeline, width=80).splitlines()
    assert max(map(len, lines)) <= 80 and all(" ... " in line for line in lines)
    assert lines[0].endswith("B39----") and lines[1].endswith("B39----") and len(lines[1]) < len(lines[0])
    many = text_grid(simulate(SCHEDULES["1f1b"].build(100, 1, 2)), max_ranks=6).splitlines()
    assert [line[:7].strip() for line in many] == ["rank 0", "rank 1", "rank 2", "...", "rank 97", "rank 98", "rank 99"]
    assert list(shown(5, 5)) == [0, 1, 2, 3, 4] and list(shown(6, 5)) == [0, 1, 2, None, 4, 5]


def test_labels_fit_whatever_things_last() -> None:
    order = SCHEDULES["interleaved_overlapped"].build(3, 2, 12)
    times = Durations(forward=0.37, backward_input=0.31, backward_weight=(0.2, 0.5, 0.3, 0.2, 0.2, 0.9), send=0.13)
    timeline = simulate(order, times)
    for rank, line in enumerate(text_grid(timeline, width=10_000).splitlines()):
        words = [word.rstrip("-") for word in line.split("|")[1].split()]
        assert words == [label(order, action) for action in order.actions[rank]]


def test_trace_has_a_slice_per_computation_and_an_arrow_per_message() -> None:
    order = add_transfers(SCHEDULES["dualpipe_v"].build(2, 2, 4))
    events = chrome_trace(simulate(order, Durations(send=0.25)))["traceEvents"]
    by_phase = {phase: [event for event in events if event["ph"] == phase] for phase in "MXsf"}
    assert [len(found) for found in by_phase.values()] == [2, 31, 16, 16]
    ends = {event["id"]: event["ts"] for event in by_phase["f"]}
    assert all(ends[event["id"]] >= event["ts"] + 250 for event in by_phase["s"]) and len(ends) == 16
    pair = next(event for event in by_phase["X"] if "+" in event["name"])
    assert (pair["dur"], pair["args"]["forward"]) == (3000, {"stage": 0, "microbatch": 3})


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_is_well_formed_and_has_a_box_per_computation(name: str) -> None:
    order = SCHEDULES[name].build(3, SCHEDULES[name].virtual or 3, 6)
    root = ElementTree.fromstring(svg(simulate(order)))
    boxes = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if box.get("stroke")]
    kinds = {part.kind for actions in order.actions for action in actions for part in action.parts}
    parts = sum(len(action.parts) for actions in order.actions for action in actions)
    assert len(boxes) == parts + len(kinds) * order.num_virtual
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "forward" in texts and "5" in texts and "rank 2" in texts


def test_the_verb_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, trace = tmp_path / "order.svg", tmp_path / "order.json"
    files = ["--svg", str(picture), "--trace", str(trace)]
    assert main(["schedule", "interleaved", *SMALL, "--virtual", "2", "--width", "200", *files]) == 0
    out = capsys.readouterr().out
    assert "interleaved   ranks 4   stages per rank 2   microbatches 8" in out
    assert "F0a F1a F2a F3a F0b" in out
    assert "finish 28.5   bubble 15.79%   at most 5.5 microbatches in flight on a rank" in out
    assert picture.read_text().startswith("<svg") and json.loads(trace.read_text())["traceEvents"]


def test_the_verb_prints_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", *SMALL, "--json", "--forward", "1,1,1,2"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["ranks"], data["virtual"], data["microbatches"]) == (4, 1, 8)
    assert data["peak_live"] == [4, 3, 2, 1] and data["finish"] > 33
    assert data["actions"][0][0] == {"action": "F0@0", "start": 0.0, "stop": 1.0}


def test_the_verb_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--stages", "8", "--microbatches", "32"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[2:]}
    assert list(rows) == list(SCHEDULES)
    assert rows["1f1b"][1:5] == ["1", "117", "17.95%", "8"]
    assert rows["zb_v"][1:5] == ["2", "99.5", "3.52%", "8"]
    # DualPipeV needs as many microbatches as stages.
    assert main(["schedule", "--stages", "8", "--microbatches", "4", "--json"]) == 0
    assert "dualpipe_v" not in json.loads(capsys.readouterr().out)


def test_splitting_saves_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", *SMALL, "--split", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finish"] == 27


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["interleve", *SMALL], "did you mean 'interleaved'?"),
        (["1f1b", *SMALL, "--virtual", "2"], "1f1b has 1 stages per rank, not 2"),
        (["1f1b", "--stages", "0", "--microbatches", "8"], "parallel.pp: must be positive, not 0"),
        (["--stages", "0", "--microbatches", "8"], "parallel.pp: must be positive, not 0"),
        (["1f1b", *SMALL, "--forward", "1,2"], "2 times for 4 stages of 1f1b; give 1 time or 4"),
        (["1f1b", *SMALL, "--forward", "x"], "'x' are not numbers"),
        (["1f1b", *SMALL, "--forward", "nan"], "a time must be more than 0"),
        (["1f1b", *SMALL, "--send", "-1"], "use 0 or more"),
        (["1f1b", "--stages", "100000", "--microbatches", "100000"], "at most 2,000,000 can be shown"),
        (["--svg", "x", *SMALL], "a file shows one schedule"),
    ],
)
def test_a_wrong_question_gets_one_clear_answer(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
