"""Phases of a growing batch: tokens and days add up, smaller ones are slower, and what does not divide is refused."""

from __future__ import annotations

import json

import pytest

from moefold.cli.main import main
from moefold.config.loading import override
from moefold.errors import ConfigError
from moefold.hardware.cluster import cluster_of
from moefold.plan.search.batch_ramp import days_of, parse_ramp, ramp_phases, ramp_words
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import Workload, changed, workload_of_run
from moefold.recipes.catalog import recipe


@pytest.fixture(scope="module")
def workload() -> Workload:
    changes = {"parallel.pp": 4, "parallel.ep": 8, "parallel.sharding": "flat", "data.global_batch": 1024}
    return workload_of_run(override(recipe("qwen3_30b_a3b"), changes), cluster_of("H100", 64))


def test_a_ramp_is_read() -> None:
    assert parse_ramp("512:1B, 1024:2.5T") == ((512, 10**9), (1024, 25 * 10**11)) and parse_ramp("") == ()
    with pytest.raises(ConfigError, match="BATCH:TOKENS"):
        parse_ramp("512")


def test_phases_are_steps_of_their_own_batch(workload: Workload) -> None:
    phases = ramp_phases(workload, ((64, 10**10), (256, 10**11)), 1e12, effective=0.9)
    assert [phase.batch for phase in phases] == [64, 256, 1024]
    assert sum(phase.tokens for phase in phases) == pytest.approx(1e12)
    for phase in phases:
        alone = predict_time(changed(workload, data={"global_batch": phase.batch})).step_seconds
        assert phase.step_seconds == alone
        tokens = phase.batch * workload.run.data.seq_len
        assert phase.steps == -(-phase.tokens // tokens)
        assert phase.days == pytest.approx(phase.tokens / tokens * alone / 0.9 / 86400)
    rates = [phase.tokens_per_second_per_gpu for phase in phases]
    assert rates == sorted(rates), "a smaller batch has more bubble"
    assert days_of(phases) > days_of(ramp_phases(workload, (), 1e12, effective=0.9))
    assert "10.0B tokens at 64 sequences" in ramp_words(phases) and ramp_words(phases[-1:]) == ""


def test_all_batches_that_do_not_fit_the_layout_are_said_at_once(workload: Workload) -> None:
    with pytest.raises(ConfigError) as caught:
        ramp_phases(workload, ((50, 10**10), (100, 10**13)), 1e12)
    words = str(caught.value)
    assert "batch of 50" in words and "use 48" in words and "batch of 100" in words and "leave some" in words


def test_the_command_says_the_phases(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = "tp=1,cp=1,pp=1,ep=8,sequences=1,dispatcher=all_to_all,recompute=none"
    words = ["plan", "qwen3_30b_a3b", "--gpu", "H200", "--gpus", "8", "--fix", fixed, "--batch-ramp", "16:1B", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [phase["batch"] for phase in found["batch_ramp"]] == [16, found["chosen"]["layout"]["global_batch"]]
    assert found["goodput"]["days"] == pytest.approx(sum(phase["days"] for phase in found["batch_ramp"]))
