from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from moefold.config.optim import LRPhaseConfig, LRScheduleConfig, OptimConfig
from moefold.optim.lr_schedule import lr_at
from moefold.recipes.catalog import recipe

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


def test_phases_are_what_torch_makes_of_the_same_parts() -> None:
    """Warmup, a plateau, a cosine, a line: torch's schedulers one after the other. Theirs count from 0."""
    phases = (LRPhaseConfig(0.4, 1.0), LRPhaseConfig(0.4, 0.25, "cosine"), LRPhaseConfig(0.2, 0.05, "linear"))
    found = rates(kind="phases", warmup=10, phases=phases)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    parts = [
        LinearLR(optimizer, 0.1, 1.0, total_iters=9),
        ConstantLR(optimizer, 1.0, total_iters=30),
        CosineAnnealingLR(optimizer, T_max=40, eta_min=0.5),
        LinearLR(optimizer, 0.25, 0.05, total_iters=20),
    ]
    theirs = SequentialLR(optimizer, parts, milestones=[9, 39, 79])
    for ours in found:
        assert ours == pytest.approx(theirs.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        theirs.step()


def test_published_schedules() -> None:
    """The sentences of the reports, as numbers: tokens so far, in trillions, and the lr there."""
    sentences = {
        "deepseek_v3": {1e-6: None, 5: 2.2e-4, 9.99: 2.2e-4, 12.15: 1.21e-4, 14.3: 2.2e-5, 14.5: 2.2e-5, 14.8: 7.3e-6},
        "deepseek_v2_lite": {1: 4.2e-4, 4.5: 4.2e-4, 5.0: 4.2e-4 * 0.316, 5.7: 4.2e-4 * 0.316**2},
        "kimi_k2": {5: 2e-4, 9.99: 2e-4, 12.75: 1.1e-4, 15.5: 2e-5},
        "olmoe_1b_7b": {0.0105: 4e-4, 5: 4e-5},
    }
    for name, expected in sentences.items():
        run = recipe(name)
        each = run.data.global_batch * run.data.seq_len
        for trillions, lr in expected.items():
            found = lr_at(max(1, int(trillions * 1e12 / each)), run.train.steps, run.optim)
            wanted = run.optim.lr / run.optim.lr_schedule.warmup if lr is None else lr
            assert found == pytest.approx(wanted, rel=2e-3), (name, trillions)
