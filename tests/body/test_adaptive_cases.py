"""Cases for the adaptive choice are what they claim to be, and a link is found again from times that it made."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from moefold.bench.adaptive_cases import CHOICES, Measured, draw_exchanges, fit_link, measure_choices, with_link
from moefold.bench.adaptive_report import adaptive_data, adaptive_report
from moefold.config.parallel import LinkConfig
from moefold.plan.dispatch_choice import volumes

LINK = LinkConfig(100.0, 0.5, 2.0, 0.25, 8.0, 10.0)


def made_by(link: LinkConfig) -> list[Measured]:
    cases = draw_exchanges(40, seed=2)
    return [
        Measured(case, {name: volumes(case)[name].seconds(link) for name in CHOICES}, "all_to_all")  # type: ignore[index]
        for case in cases
    ]


def test_a_link_is_found_again() -> None:
    assert astuple(fit_link(made_by(LINK))) == pytest.approx(astuple(LINK), rel=0.05)


def test_the_choice_by_the_right_link_is_always_good() -> None:
    measured = with_link(made_by(LINK), LINK)
    assert all(each.ratio == 1.0 for each in measured)
    assert "in 40 of 40 cases" in adaptive_report(measured) and adaptive_data(measured)["good"] == 40


def test_cases_are_measured_on_ranks() -> None:
    measured = measure_choices(2, rounds=1, warm=0, seed=1)
    assert {each.case.ep for each in measured} == {2, 4}
    assert all(seconds > 0 for each in measured for seconds in each.seconds.values())


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_choice_is_good_in_eighteen_of_twenty() -> None:
    measured = measure_choices(20, rounds=15, warm=2)
    assert sum(each.good for each in measured) >= 18, adaptive_report(measured)
