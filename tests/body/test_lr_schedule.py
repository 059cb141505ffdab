from __future__ import annotations

from itertools import pairwise

import pytest

from moefold.config.optim import LRScheduleConfig, OptimConfig
from moefold.optim.lr_schedule import lr_at

STEPS = 100


def rates(**words: object) -> list[float]:
    optim = OptimConfig(lr=2.0, lr_schedule=LRScheduleConfig(**words))
    return [lr_at(step, STEPS, optim) for step in range(1, STEPS + 1)]


def test_warmup_rises_to_the_peak_in_equal_steps() -> None:
    assert rates(kind="constant", warmup=4)[:6] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_way_down_ends_at_the_floor(kind: str) -> None:
    found = rates(kind=kind, warmup=10, floor=0.1)
    assert found[9] == 2.0 and found[-1] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in pairwise(found[9:]))
    assert found[54] == pytest.approx(1.1)  # half way in time is half way down for both


def test_warmup_stable_decay_stays_before_it_falls() -> None:
    found = rates(kind="wsd", warmup=10, decay=20)
    assert set(found[9:80]) == {2.0}
    assert found[89] == pytest.approx(1.0) and found[-1] == 0.0
