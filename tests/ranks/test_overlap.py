"""Overlap is real: on a slow link between two hosts, all-to-alls are hidden by another microbatch's compute, or by that
of the same one.

Two network namespaces with two ranks each, experts spread over all four (`tests/throttled_exchange.py`, which also
measures the figures of docs/pipelines.md). What counts as exposed is the time in which a rank waits for an exchange and
computes nothing.
"""

from __future__ import annotations

import pytest
from tests.throttled_exchange import PLAIN, SETTINGS, over_the_link, run_config
from tests.two_hosts import possible

WORLD, STEPS = 4, 2


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not possible(), reason="needs the right to make network namespaces")
@pytest.mark.parametrize(
    ("name", "microbatches", "most"), [("pairs", 12, 0.08), ("4 chunks, shared expert beside", 1, 0.3)]
)
def test_all_to_alls_are_hidden_by_compute(name: str, microbatches: int, most: float) -> None:
    found = {}
    for setting in (PLAIN, name):
        run = run_config(SETTINGS[setting], WORLD, microbatches, shared=microbatches == 1)
        found[setting] = over_the_link(run, STEPS, WORLD)
        print(setting, [{k: round(v, 5) for k, v in answer.items()} for answer in found[setting]])
    for plain, overlapped in zip(found[PLAIN], found[name], strict=True):
        assert overlapped["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert overlapped["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)
    assert min(answer["exposed"] for answer in found[PLAIN]) >= 0.30
    assert max(answer["exposed"] for answer in found[name]) <= most
