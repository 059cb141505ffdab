"""Phases of a growing batch: tokens and days add up, smaller ones are slower, and what does not divide is refused."""

from __future__ import annotations

import json

import pytest

import moefold
from moefold.cli.main import main
from moefold.config.loading import override
from moefold.errors import ConfigError
from moefold.hardware.cluster import cluster_of
from moefold.plan.search.batch_ramp import days_of, parse_ramp, ramp_phases, ramp_words
from moefold.plan.search.proposal import with_framework
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import Workload, changed, workload_of_run
from moefold.recipes.catalog import recipe


@pytest.fixture(scope="module")
def workload() -> Workload:
    changes = {"parallel.pp": 4, "parallel.ep": 8, "parallel.sharding": "flat", "data.global_batch": 1024}
    return workload_of_run(override(recipe("qwen3_30b_a3b"), changes), cluster_of("H100", 64))


def test_a_ramp_is_read() -> None:
    assert parse_ramp("512:1B, 1024:2.5T") == ((512, 10**9), (1024, 25 * 10**11)) and parse_ramp("") == ()
    for text, words in (("512", "BATCH:TOKENS"), ("512:abc", "'512:abc': cannot read 'abc'"), ("x:1B", "BATCH:TOKENS")):
        with pytest.raises(ConfigError, match=words):
            parse_ramp(text)


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
    assert "phase of 50" in words and "use 48" in words and "phase of 100" in words and "leave some" in words


def test_a_batch_is_refused_where_a_layout_with_it_would_be(workload: Workload) -> None:
    """Megatron's interleaved stages want groups of as many microbatches as there are ranks; moefold's rounds may be
    uneven, and an order that is full in both directions wants more."""
    stages = {"pp": 4, "vpp": 2, "schedule": "interleaved", "stages": None}
    interleaved = changed(workload, parallel=stages)
    assert interleaved.dp == 16
    ramp_phases(interleaved, ((5 * 16, 10**10),), 1e12)
    theirs = with_framework(interleaved, "megatron")
    ramp_phases(theirs, ((4 * 16, 10**10), (8 * 16, 10**10)), 1e12)
    with pytest.raises(ConfigError, match=r"phase of 48 .* groups of pp or more.* use 64"):
        ramp_phases(theirs, ((3 * 16, 10**10),), 1e12)
    full = changed(workload, parallel={"pp": 4, "vpp": 2, "schedule": "dualpipe_v", "stages": None})
    with pytest.raises(ConfigError, match=r"phase of 64 .* use 128"):
        ramp_phases(full, ((4 * 16, 10**10),), 1e12)


def test_the_command_says_the_phases(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = "tp=1,cp=1,pp=1,ep=8,sequences=1,dispatcher=all_to_all,recompute=none"
    words = ["plan", "qwen3_30b_a3b", "--gpu", "H200", "--gpus", "8", "--fix", fixed, "--batch-ramp", "16:1B", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [phase["batch"] for phase in found["batch_ramp"]] == [16, found["chosen"]["layout"]["global_batch"]]
    assert found["goodput"]["days"] == pytest.approx(sum(phase["days"] for phase in found["batch_ramp"]))


def test_the_door_and_a_comparison_know_phases(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = "tp=1,cp=1,pp=1,ep=8,sequences=1,dispatcher=all_to_all"
    made = moefold.plan("qwen3_30b_a3b", gpu="H200", gpus=8, fix=f"{fixed},recompute=none", batch_ramp="16:1B")
    assert [phase.batch for phase in made.proposal.phases] == [16, made.layout["global_batch"]]
    words = ["plan", "qwen3_30b_a3b", "--gpu", "H200", "--gpus", "8", "--batch-ramp", "16:1B"]
    assert main([*words, "--compare", f"{fixed},recompute=none", f"{fixed},recompute=full", "--json"]) == 0
    days = [each["days"] for each in json.loads(capsys.readouterr().out)["plans"]]
    assert days[0] == pytest.approx(made.days) and days[1] > days[0]
