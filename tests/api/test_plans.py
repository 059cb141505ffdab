"""`moefold.plan` says what `moefold plan` prints."""

from __future__ import annotations

import json

import pytest

import moefold
from moefold.cli.main import main
from moefold.errors import ConfigError


def test_a_plan_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["qwen3_30b_a3b", "--gpus", "64", "--parallel.pp", "2", "--no-search", "--json"]
    assert main(["plan", *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    plan = moefold.plan(moefold.load_run("qwen3_30b_a3b", {"parallel.pp": 2}), gpus=64, search=False)
    assert json.loads(json.dumps(plan.to_dict())) == printed
    assert plan.command == printed["command"] and "--parallel.pp 2" in plan.command
    chosen = printed["chosen"]
    assert (plan.step_seconds, plan.memory_bytes, plan.wall) == (
        chosen["step_seconds"],
        chosen["memory_bytes"],
        chosen["wall"],
    )
    assert plan.html().startswith("<!doctype html>") and plan.step_interval[0] < plan.step_seconds


def test_the_run_of_a_plan_has_its_layout() -> None:
    run = moefold.load_run("qwen3_30b_a3b")
    plan = moefold.plan(run, gpus=64, fix="tp=1,cp=1,pp=2,vpp=1,ep=16,etp=1,recompute=none")
    assert plan.layout["ep"] == plan.run.parallel.ep == 16 and plan.run.parallel.pp == 2
    assert moefold.check(plan.run, world=64, training=False) == []
    again = moefold.plan(plan.run, gpus=64, search=False)
    assert again.step_seconds == pytest.approx(plan.step_seconds)


def test_every_problem_with_the_question_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as found:
        moefold.plan(moefold.load_run("debug_tiny"), imbalance=0.5, headroom=2.0)
    assert [problem.path for problem in found.value.problems] == ["gpus", "imbalance", "headroom"]
