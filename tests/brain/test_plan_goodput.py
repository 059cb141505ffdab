"""Goodput: the renewal formula against a simulation, Daly's closed form and Young's limit."""

from __future__ import annotations

import random
from math import exp, log, sqrt

import pytest

from moefold.errors import ConfigError
from moefold.plan.search.goodput import (
    Faults,
    best_interval,
    days_for,
    effective_share,
    expected_period,
    faults_of,
    goodput,
    young,
)


def simulated(work: float, faults: Faults, periods: int, seed: int) -> tuple[float, float, float]:
    """Shares of time: training that lasts, restarts, and saves that lasted. Failures are drawn one by one."""
    draw = random.Random(seed)

    def gap() -> float:
        return -log(1 - draw.random()) / faults.rate

    clock, down, done = 0.0, 0.0, 0
    until, need = gap(), work + faults.save + faults.write
    while done < periods:
        if until >= need:
            # A checkpoint became whole; the next one is a period away, its write behind the training.
            clock, until, done = clock + need, until - need, done + 1
            need = work + faults.save
            continue
        clock += until
        until = gap()
        while until < faults.restart:
            clock, down, until = clock + until, down + until, gap()
        clock, down, until = clock + faults.restart, down + faults.restart, until - faults.restart
        need = work + faults.save + faults.write
    return done * work / clock, down / clock, done * faults.save / clock


CASES = (
    Faults(rate=1 / 10_000, save=30.0, restart=600.0),
    Faults(rate=1 / 3_000, save=5.0, write=240.0, restart=300.0),
    Faults(rate=1 / 1_500, save=60.0, write=60.0, restart=900.0),
)


@pytest.mark.parametrize("faults", CASES, ids=str)
def test_the_formula_is_what_a_simulation_gives(faults: Faults) -> None:
    for work in (0.5 * best_interval(faults) + faults.write, best_interval(faults), 3 * best_interval(faults)):
        seen, _, _ = simulated(work, faults, periods=40_000, seed=1)
        assert effective_share(work, faults) == pytest.approx(seen, rel=0.01)


@pytest.mark.parametrize("faults", CASES, ids=str)
def test_losses_add_up_and_are_what_a_simulation_gives(faults: Faults) -> None:
    found = goodput(faults)
    parts = (found.effective, found.lost_to_saves, found.lost_to_restarts, found.lost_to_repeats)
    assert sum(parts) == pytest.approx(1) and min(parts) > 0
    seen, down, saves = simulated(found.interval, faults, periods=40_000, seed=2)
    assert (found.effective, found.lost_to_saves) == pytest.approx((seen, saves), rel=0.01)
    assert found.lost_to_restarts == pytest.approx(down, rel=0.03)


@pytest.mark.parametrize("faults", CASES, ids=str)
def test_no_other_interval_is_better(faults: Faults) -> None:
    best = best_interval(faults)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert effective_share(max(best * factor, faults.write), faults) <= effective_share(best, faults) * (1 + 1e-9)


def test_without_a_write_behind_it_is_dalys_formula() -> None:
    faults = Faults(rate=1 / 5_000, save=40.0, restart=700.0)
    for work in (100.0, 1000.0, 9000.0):
        q, p = faults.rate, work + faults.save
        assert expected_period(work, faults) == pytest.approx(exp(q * faults.restart) * (exp(q * p) - 1) / q)


def test_for_rare_failures_it_is_youngs_interval() -> None:
    faults = Faults(rate=1e-8, save=10.0)
    assert young(faults) == sqrt(2 * 10.0 / 1e-8)
    assert best_interval(faults) == pytest.approx(young(faults), rel=0.01)


def test_llama_3s_cluster() -> None:
    """16,384 GPUs at one failure per 50,000 GPU hours: about eight a day; some 90 % of the time is training."""
    found = goodput(faults_of(16_384, 50_000, save=10, write=120, restart=600))
    assert 7 < found.failures_per_day < 9
    assert 0.88 < found.effective < 0.95 and 300 < found.interval < 900
    assert days_for(15.6e12, 16_384 * 400, found.effective) == pytest.approx(27.55 / found.effective, rel=0.01)


def test_a_job_that_fails_faster_than_it_restarts_gets_nothing_done() -> None:
    assert effective_share(1.0, Faults(rate=1.0, save=1.0, restart=1e4)) == 0.0


def test_wrong_numbers_are_all_named() -> None:
    with pytest.raises(ConfigError) as error:
        faults_of(8, mtbf_hours=0, save=-1, restart=float("nan"))
    assert [problem.path for problem in error.value.problems] == ["mtbf-hours", "save-seconds", "restart-seconds"]
