"""Scales from the amaxes of earlier steps: the same in every layout, saved, resumed, and left alone by other recipes.

Layouts start from a checkpoint of one process that has a history: where there is none, scales are those of a rank's own
tensors.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.marks import slow_except
from tests.ranks.test_narrow_layouts import LAYOUTS, TENSOR, are_close, metrics
from torch import Tensor

from moefold.checkpoint import state_dict
from moefold.comm.process_groups import Group
from moefold.errors import CheckpointError, RankError
from moefold.parallel import maxima_over_ranks
from moefold.precision.amax_history import AmaxHistory

DELAYED = {
    "precision.recipe": "fp8_delayed",
    "precision.amax_history_len": 3,
    "train.saving.every": 1,
    # Does not depend on `train.steps`.
    "optim.lr_schedule.kind": "constant",
}
EVERY = LAYOUTS | {"tp and etp": TENSOR}
FOUR = DELAYED | {"train.steps": 4}


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """Four steps of one process."""
    return metrics(tmp_path_factory.mktemp("peaceful"), FOUR, 1)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    metrics(folder, DELAYED | {"train.steps": 2}, 1)
    return folder


def resumed(folder: Path, saved: Path, changes: dict[str, object], nproc: int) -> list[tuple[float, float]]:
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    return metrics(folder, changes, nproc)


def test_a_resumed_run_has_the_same_bits(
    peaceful: list[tuple[float, float]], two_steps: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert resumed(tmp_path, two_steps, FOUR, 1) == peaceful
    assert "start anew" not in capfd.readouterr().err


@pytest.mark.parametrize("layout", slow_except(EVERY, "ep", "tp and etp", "context"))
def test_layouts_have_the_scales_of_one_process(
    layout: str, peaceful: list[tuple[float, float]], two_steps: Path, tmp_path: Path
) -> None:
    found = resumed(tmp_path, two_steps, FOUR | EVERY[layout], 2)
    assert len(found) == 4 and are_close(found, peaceful, 1e-11), (found, peaceful)


def not_reduced(x: Tensor, group: Group) -> Tensor:
    return x


@pytest.mark.parametrize("layout", slow_except(["fsdp", "ep"], "ep"))
def test_amaxes_that_are_not_reduced_are_noticed(
    layout: str, two_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the hashes that ranks of a stage compare."""
    monkeypatch.setattr(maxima_over_ranks, "all_reduce_max", not_reduced)
    with pytest.raises(RankError, match=r"amax_history/layers.* differs between replicas"):
        resumed(tmp_path, two_steps, FOUR | LAYOUTS[layout], 2)


def test_a_scale_that_does_not_move_is_noticed(
    peaceful: list[tuple[float, float]], two_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AmaxHistory, "push", lambda self, amaxes: None)
    assert not are_close(resumed(tmp_path, two_steps, FOUR, 1), peaceful, 1e-6)


def test_a_history_that_is_not_read_is_noticed(
    peaceful: list[tuple[float, float]], two_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_dict, "_histories_needed", lambda local_model, offered: iter(()))
    assert not are_close(resumed(tmp_path, two_steps, FOUR, 1), peaceful, 1e-6)


def test_a_history_that_is_not_saved_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dict, "_live_histories", lambda local_model: {})
    with pytest.raises(CheckpointError, match=r"the ranks wrote .* elements of"):
        metrics(tmp_path, DELAYED | {"train.steps": 1}, 1)


def test_a_checkpoint_loads_under_another_recipe(
    two_steps: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """To mxfp8, which leaves the history, and back, where it starts anew; and with a history of another length."""
    mxfp8 = DELAYED | {"precision.recipe": "mxfp8", "train.steps": 3}
    assert len(resumed(tmp_path, two_steps, mxfp8, 1)) == 3
    assert "amax histories of the checkpoint are not used by precision.recipe mxfp8" in capfd.readouterr().err
    assert len(metrics(tmp_path, FOUR, 1)) == 4
    err = capfd.readouterr().err
    assert "start anew" in err and "3 steps" in err and "not used" not in err
    assert len(metrics(tmp_path, FOUR | {"train.steps": 5, "precision.amax_history_len": 2}, 1)) == 5
    assert "start anew: the checkpoint has none of 2 steps" in capfd.readouterr().err


def test_a_run_of_bf16_goes_on_with_delayed_scales(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    metrics(tmp_path, DELAYED | {"precision.recipe": "bf16", "train.steps": 1}, 1)
    assert len(metrics(tmp_path, DELAYED | {"train.steps": 2}, 1)) == 2
    assert "start anew" in capfd.readouterr().err
