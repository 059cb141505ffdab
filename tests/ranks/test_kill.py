"""A run that is killed again and again is, bit for bit, the run that was never killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.kill import (
    assert_nothing_committed_was_lost,
    assert_same_steps,
    plan_kills,
    run_with_kills,
    small_run,
    steps_for,
)

from moefold.config.parallel import ParallelConfig
from moefold.optim.optimizer import TorchAdamW
from moefold.recipes.catalog import RECIPES

# (world, layout, background save); every layout has more than one rank per set of experts.
LAYOUTS = {
    "two ranks": (2, ParallelConfig(ep=2), True),
    "two ranks, tensor": (2, ParallelConfig(tp=2, ep=2), False),
    "four ranks": (4, ParallelConfig(ep=4), True),
    "four ranks, folded": (4, ParallelConfig(tp=2, ep=4), True),
    "four ranks, split": (4, ParallelConfig(ep=2, etp=2, dp_replicate=2), False),
    "pipeline": (4, ParallelConfig(pp=2, ep=2), True),
    # Weight gradients fill whatever waits there are, and no bit may depend on how long those were.
    "pipeline, overlapped": (4, ParallelConfig(pp=2, ep=2, schedule="1f1b_overlapped"), True),
    "flat": (4, ParallelConfig(ep=2, sharding="flat"), True),
    "flat pipeline": (4, ParallelConfig(pp=2, ep=2, sharding="flat"), True),
    "flat pipeline in a V": (
        4,
        ParallelConfig(pp=2, vpp=2, ep=2, schedule="dualpipe_v", stages="Ett|t||L", sharding="flat"),
        False,
    ),
    "pipeline in a V": (4, ParallelConfig(pp=2, vpp=2, ep=2, schedule="dualpipe_v", stages="Ett|t||L"), False),
}
# Each takes minutes; the others are run at night.
IN_CI = ("two ranks", "two ranks, tensor")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.nightly) for name in LAYOUTS],
)
def test_planned_kills_change_nothing(name: str, tmp_path: Path) -> None:
    """Each of the twelve points once per layout, in another order for each; of the thirteen, where there are stages."""
    kills = 13 if LAYOUTS[name][1].pp > 1 else 12
    assert_killing_changes_nothing(name, kills, seed=list(LAYOUTS).index(name) + 1, folder=tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [2, 4])
def test_two_hundred_kills(world: int, tmp_path: Path) -> None:
    names = [name for name, (size, _, _) in LAYOUTS.items() if size == world and not name.startswith("flat")]
    happened = 0
    for seed in range(100, 109):
        name = names[seed % len(names)]
        happened += assert_killing_changes_nothing(name, kills=24, seed=seed, folder=tmp_path / str(seed))
    assert happened >= 200


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_few_kills_of_flat_sharding_change_nothing(tmp_path: Path) -> None:
    assert_killing_changes_nothing("flat", kills=3, seed=5, folder=tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_sixty_kills_of_flat_sharding(tmp_path: Path) -> None:
    names = [name for name in LAYOUTS if name.startswith("flat")]
    happened = 0
    for seed, name in enumerate(names, 200):
        happened += assert_killing_changes_nothing(name, kills=20, seed=seed, folder=tmp_path / name)
    assert happened >= 60


def assert_killing_changes_nothing(name: str, kills: int, seed: int, folder: Path) -> int:
    """Run twice, once in peace; returns how many kills happened, which is all that were planned."""
    world, parallel, background = LAYOUTS[name]
    # Ranks are forked; what an optimizer built here has done to its class must not disarm a kill.
    TorchAdamW([torch.zeros(1, requires_grad=True)])
    base, plan = RECIPES["debug_mla"](), plan_kills(kills, world, seed, pipeline=parallel.pp > 1)
    steps = steps_for(plan)
    peace, war = (small_run(base, folder / side, parallel, background, steps) for side in ("peace", "war"))
    peaceful, digests, _ = run_with_kills(peace, world, [])
    killed, digests_after, happened = run_with_kills(war, world, plan)
    assert happened == kills
    assert digests_after == digests
    assert_same_steps(peaceful, killed, steps)
    assert_nothing_committed_was_lost(killed)
    return happened
