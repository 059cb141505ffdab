"""`benchmarks.adaptive`: a link is recovered from times that it predicts, and cases are measured on ranks."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from benchmarks.adaptive import (
    DISPATCHERS,
    Measured,
    adaptive_json,
    adaptive_report,
    draw_exchanges,
    fit_link,
    main,
    measure_cases,
    with_link,
)
from moefold.config.parallel import LinkConfig
from moefold.errors import ConfigError
from moefold.plan.dispatch_choice import volumes

LINK = LinkConfig(100.0, 0.5, 2.0, 0.25, 8.0, 10.0)


def made_by(link: LinkConfig) -> list[Measured]:
    cases = draw_exchanges(40, seed=2)
    return [
        Measured(case, {name: volumes(case)[name].seconds(link) for name in DISPATCHERS}, "all_to_all")  # type: ignore[index]
        for case in cases
    ]


def test_a_link_is_recovered_from_its_own_times() -> None:
    assert astuple(fit_link(made_by(LINK))) == pytest.approx(astuple(LINK), rel=0.05)


def test_the_pick_of_the_right_link_is_always_good() -> None:
    measured = with_link(made_by(LINK), LINK)
    assert all(each.ratio == 1.0 for each in measured)
    assert "in 40 of 40 cases" in adaptive_report(measured) and adaptive_json(measured)["good"] == 40


def test_cases_are_measured_on_ranks() -> None:
    measured = measure_cases(2, rounds=1, warm=0, seed=1)
    assert {each.case.ep for each in measured} == {2, 4}
    assert all(seconds > 0 for each in measured for seconds in each.seconds.values())


def test_too_few_cases_are_refused() -> None:
    with pytest.raises(ConfigError, match="cases: is 0"):
        main(["0"])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_pick_is_good_in_eighteen_of_twenty() -> None:
    measured = measure_cases(20, rounds=15, warm=2)
    assert sum(each.good for each in measured) >= 18, adaptive_report(measured)
