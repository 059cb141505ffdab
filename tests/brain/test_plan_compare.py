"""`moefold plan --compare`: two plans of one question, what each holds and waits for, and which is faster and why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.errors import ConfigError
from moefold.hardware.cluster import cluster_of
from moefold.plan.prediction import TimeLine
from moefold.plan.report.side_by_side import Comparison, compare, comparison_data, verdict
from moefold.plan.search.explain import SWEEP_SPREAD
from moefold.plan.search.proposal import Question
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import workload_of_run
from moefold.recipes.catalog import recipe

QUESTION = Question(recipe("qwen3_30b_a3b"), "qwen3_30b_a3b", cluster_of("H100", 64), searching=False)


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(QUESTION, ["ep=8", "ep=32,pp=2"])


def test_each_plan_is_what_it_pins_and_the_rest_is_the_runs(found: Comparison) -> None:
    first, second = found.plans
    own = predict_time(workload_of_run(QUESTION.run, QUESTION.cluster))
    assert first.time.step_seconds == own.step_seconds, "the run has ep 8 itself"
    parallel = second.workload.parallel
    assert (parallel.ep, parallel.pp, parallel.sharding) == (32, 2, QUESTION.run.parallel.sharding)


def test_data_has_every_line_of_both_and_exchanges_whole(found: Comparison) -> None:
    data = comparison_data(found)
    for index, plan in enumerate(found.plans):
        assert sum(row["exposed"][index] for row in data["time"]) == pytest.approx(plan.time.step_seconds)
        assert sum(row["bytes"][index] for row in data["memory"]) == pytest.approx(plan.memory.total)
        for row in data["time"]:
            line = next((each for each in plan.time.lines if each.name == row["name"]), TimeLine("", "", 0.0))
            assert row["exposed"][index] + row["hidden"][index] == pytest.approx(line.seconds)
    assert data["plans"][1]["layout"]["ep"] == 32 and "--parallel.ep 32" in data["plans"][1]["command"]
    assert data["verdict"] == verdict(found)


def test_the_verdict_names_the_faster_one_its_causes_and_the_planners_error(found: Comparison) -> None:
    words = verdict(found)
    first, second = (plan.time.step_seconds for plan in found.plans)
    assert first < second
    assert words.startswith(f"A is {second / first - 1:.1%} faster than B")
    # Sharded parameters are partly hidden, so they are told whole.
    assert "in sharded parameters (" in words and "in all)" in words
    assert "B has pp 2 instead of 1, ep 32 instead of 8" in words
    assert "within the planner's error" in words and f"{SWEEP_SPREAD['moe']:.0%}" in words
    swapped = replace(found, proposals=found.proposals[::-1])
    assert verdict(swapped).startswith("B is ") and "faster than A" in verdict(swapped)
    same = replace(found, proposals=(found.proposals[0],) * 2)
    assert verdict(same).startswith("Both take the same time")
    chosen = found.proposals[0].chosen
    slow = replace(chosen, time=replace(chosen.time, step_seconds=3 * first), memory=replace(chosen.memory, capacity=1))
    far = replace(found, proposals=(replace(found.proposals[0], chosen=slow), found.proposals[1]))
    assert f"more than the {SWEEP_SPREAD['moe']:.0%}" in verdict(far) and "A does not fit" in verdict(far)


def test_what_is_wrong_with_both_plans_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        compare(QUESTION, ["ep=7,tpp=1", "ep=8,16"])
    assert "plan 'ep=7,tpp=1'" in str(caught.value) and "no choice is called 'tpp'" in str(caught.value)
    assert "plan 'ep=8,16'" in str(caught.value) and "several values" in str(caught.value)
    with pytest.raises(ConfigError, match="experts do not divide over ep"):
        compare(QUESTION, ["ep=7", ""])


def test_the_command_line_compares(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Searched, with a pin that both share."""
    asked = ["plan", "olmoe_1b_7b", "--gpus", "16", "--global-batch", "256"]
    asked += ["--fix", "tp=1,cp=1,vpp=1,etp=1,sequences=1,replicate=1,ep=8"]
    plans = ["--compare", "pp=1", "pp=2,ep=4"]
    assert main([*asked, *plans]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for words in ("A: pp=1", "B: pp=2,ep=4", "A hidden", "tokens/s/GPU", "expert dispatch and combine", "faster than"):
        assert words in told, words
    assert main([*asked, *plans, "--json", "--no-search"]) == 0
    first, second = json.loads(capsys.readouterr().out)["plans"]
    assert (first["layout"]["ep"], first["layout"]["pp"]) == (8, 1)
    assert (second["layout"]["ep"], second["layout"]["pp"]) == (4, 2)
    assert main([*asked, *plans, "--html", str(tmp_path / "page.html")]) == 2
    assert "leave one of them out" in capsys.readouterr().err
