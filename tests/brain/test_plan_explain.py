"""Words about layouts agree with the numbers they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.config.loading import override
from moefold.hardware.cluster import cluster_of
from moefold.plan.predict import predict
from moefold.plan.search.candidates import choice_of_workload
from moefold.plan.search.explain import changed_choices, memory_differences, time_differences, versus, wall_words
from moefold.plan.search.what_if import answers
from moefold.plan.workload import Workload, workload_of_run
from moefold.recipes.catalog import recipe


def workload(**changes: object) -> Workload:
    keys = {f"parallel.{name}": str(value) for name, value in changes.items()}
    run = override(recipe("qwen3_30b_a3b"), {"data.global_batch": "512", **keys})
    return workload_of_run(run, cluster_of("H100", 64))


def test_differences_add_up_to_the_whole() -> None:
    first, second = predict(workload(ep=8)), predict(workload(ep=32, pp=2))
    times = time_differences(first, second)
    assert sum(each.more for each in times) == pytest.approx(second.time.step_seconds - first.time.step_seconds)
    assert [abs(each.more) for each in times] == sorted((abs(each.more) for each in times), reverse=True)
    held = memory_differences(first, second)
    assert sum(each.more for each in held) == pytest.approx(second.memory.total - first.memory.total)


def test_what_is_chosen_differently_is_named() -> None:
    first, second = choice_of_workload(workload(ep=8)), choice_of_workload(workload(ep=32, pp=2))
    assert changed_choices(first, second) == "pp 2 instead of 1, ep 32 instead of 8"
    kept, away = frozenset({"memory.retain.core=discard"}), frozenset({"memory.retain.core=offload"})
    assert (
        changed_choices(first._replace(savings=kept), first._replace(savings=away))
        == "also retain.core=offload, no retain.core=discard"
    )
    assert changed_choices(first, first) == "the same choices"
    hidden = first._replace(ep_overlap=True, recompute=frozenset({"experts"}))
    assert (
        changed_choices(first, hidden) == "overlapped dispatch on instead of off, recompute experts instead of nothing"
    )


def test_the_paragraph_has_the_numbers() -> None:
    first, second = predict(workload(ep=8)), predict(workload(ep=32, pp=2))
    said = versus(first, second, "The other")
    share = second.time.step_seconds / first.time.step_seconds - 1
    assert f"{abs(share):.1%} {'slower' if share > 0 else 'faster'}" in said and said.startswith("The other has pp 2")
    assert "takes the same time" in versus(first, first, "It")


def test_the_wall_is_named_with_the_shares() -> None:
    found = predict(workload(ep=8))
    said = wall_words(found)
    assert said.startswith(f"{found.wall.capitalize()} binds")
    assert f"compute {found.time.of('compute') / found.time.step_seconds:.0%}" in said


def test_what_if_changes_one_thing() -> None:
    own = workload(ep=16)
    found = {answer.question: answer for answer in answers(own)}
    half = found["EP 8"].prediction
    assert half is not None and half.workload.parallel == replace(own.parallel, ep=8)
    network = found["the network were twice as fast"].prediction
    assert network is not None and network.workload == replace(own, cluster=replace(own.cluster, nic_gb_s=100.0))
    assert network.time.step_seconds <= predict(own).time.step_seconds
    rack = found["the NVLink domain were 72"].prediction
    assert rack is not None and rack.time.step_seconds < predict(own).time.step_seconds
    assert found["MBS 2"].prediction is not None
    for question in ("matmuls were twice as fast", "NVLink were twice as fast", "the network were twice as fast"):
        assert found[question].faster(predict(own)) >= 0, question


def test_a_change_that_no_rule_allows_says_which() -> None:
    own = workload(ep=16, tp=4)
    found = {answer.question: answer for answer in answers(own)}
    assert found["TP 8"].prediction is None and "key/value heads do not divide over tp" in found["TP 8"].reason
