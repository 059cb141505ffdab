"""F9: whatever is wrong with a checkpoint is noticed before any tensor changes, and an older one is taken instead."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.checkpoint.damages import (
    Damage,
    directory_damages,
    file_damages,
    forged_indexes,
    forged_manifests,
    forged_tables,
    random_damage,
)
from tests.checkpoint.saved_runs import everything, fill_moments, same, small_run, trained_alone
from tests.support import on_ranks
from torch import Tensor

from moefold.checkpoint.load import latest, load_into, load_latest
from moefold.checkpoint.save import Saver
from moefold.checkpoint.state_dict import chunks_of
from moefold.checkpoint.step_dirs import verify
from moefold.comm.process_groups import Groups
from moefold.errors import CheckpointError, MismatchError
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.parallelize import LocalModel, build_local_model
from moefold.pipeline.step import make_optimizer
from moefold.prove.proof_inputs import proof_init

OLDER, NEWER = 4, 8


def save_on_two_ranks(root: Path, seed: int) -> None:
    """Two steps of different contents."""

    def work(groups: Groups) -> None:
        for step in (OLDER, NEWER):
            run = replace(small_run(ep=2), seed=seed + step)
            local_model = build_local_model(run, groups, torch.device("cpu"), proof_init)
            optimizer = make_optimizer(local_model)
            fill_moments(local_model, optimizer, seed + step)
            saver = Saver(root, groups["world"], 0, background=False)
            saver.begin(step, chunks_of(local_model, optimizer), {"step": step})

    on_ranks(work, 2, ep=2)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints of a run, and of another one."""
    root = tmp_path_factory.mktemp("originals")
    save_on_two_ranks(root / "ours", seed=0)
    save_on_two_ranks(root / "stranger", seed=100)
    return root / "ours", root / "stranger"


class Patient:
    """A live model, a root with two checkpoints, and what each of them holds."""

    def __init__(self, original: Path, root: Path) -> None:
        self.original, self.root = original, root
        self.local_model: LocalModel
        self.optimizer: ModelOptimizer
        self.local_model, self.optimizer = trained_alone(seed=77)
        load_into(original / f"step_{OLDER:08d}", self.local_model, self.optimizer)
        self.in_older = everything(self.local_model, self.optimizer)
        load_into(original / f"step_{NEWER:08d}", self.local_model, self.optimizer)
        self.in_newer = everything(self.local_model, self.optimizer)
        assert not same(self.in_older, self.in_newer)
        shutil.copytree(original, root)

    def suffers(self, name: str, damage: Damage, falls_back: bool = True) -> str:
        """Damage the newer one, see it refused and passed over, and heal it; returns the reason given."""
        newer = self.root / f"step_{NEWER:08d}"
        damage(newer)
        before = everything(self.local_model, self.optimizer)
        with pytest.raises(CheckpointError) as refused:
            load_into(newer, self.local_model, self.optimizer)
        assert same(before, everything(self.local_model, self.optimizer)), name
        assert isinstance(refused.value, MismatchError) or str(self.root) in str(refused.value), name
        if falls_back and not isinstance(refused.value, MismatchError):
            said: list[str] = []
            found = load_latest(self.root, self.local_model, self.optimizer, said.append)
            assert found is not None and found[1] == {"step": OLDER}, name
            assert same(self.in_older, everything(self.local_model, self.optimizer)), name
            assert f"step {NEWER}" in said[0], name
            self._set(self.in_newer)
        self._heal()
        return str(refused.value)

    def _set(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.local_model.model.named_parameters():
            parameter.detach().copy_(values[f"parameter/{name}"])

    def _heal(self) -> None:
        newer = self.root / f"step_{NEWER:08d}"
        for path in self.root.iterdir():
            if path.name != f"step_{OLDER:08d}":
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
        shutil.copytree(self.original / newer.name, newer)


@pytest.fixture(scope="module")
def patient(originals: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Patient:
    return Patient(originals[0], tmp_path_factory.mktemp("patient") / "root")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_hundred_random_damages(patient: Patient, seed: int) -> None:
    dice = random.Random(seed)
    for number in range(100):
        # Falling back loads the older one in full; once in five times is enough to see that it does.
        patient.suffers(*random_damage(dice), falls_back=number % 5 == 0)


def structural(originals: tuple[Path, Path]) -> Iterator[tuple[str, Damage]]:
    older, stranger = originals[0] / f"step_{OLDER:08d}", originals[1] / f"step_{NEWER:08d}"
    yield from file_damages(older, stranger)
    yield from directory_damages(older)
    yield from forged_manifests()
    yield from forged_tables()
    yield from forged_indexes()


def test_every_structural_damage(patient: Patient, originals: tuple[Path, Path]) -> None:
    reasons = {name: patient.suffers(name, damage) for name, damage in structural(originals)}
    assert len(reasons) >= 50
    assert "lacks" in reasons["table: a chunk less"] or "bytes" in reasons["table: a chunk less"]
    assert "not in the manifest" in reasons["a rank too many"]
    assert "regular file" in reasons["ranks_00000/rank_00000.safetensors a pipe"]
    assert "damaged" in reasons["ranks_00000/rank_00001.safetensors of another run"]


def test_the_newest_that_passes_quickly_is_found_and_ruins_are_not_built_on(
    originals: tuple[Path, Path], tmp_path: Path
) -> None:
    assert latest(tmp_path / "nowhere") is None
    root = tmp_path / "root"
    shutil.copytree(originals[0], root)
    assert latest(root) == root / f"step_{NEWER:08d}"
    (root / "step_00000099").mkdir()
    (root / "step_00000098.3.tmp").mkdir()
    (root / "latest").write_text("step_00000099")
    said: list[str] = []
    assert latest(root, log=said.append) == root / f"step_{NEWER:08d}"
    assert len(said) == 1 and "step_00000099" in said[0]
    for step in (OLDER, NEWER):
        (root / f"step_{step:08d}" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none that verifies"):
        latest(root, log=said.append)
    with pytest.raises(CheckpointError, match="was not committed"):
        verify(root / "step_00000098.3.tmp")


def test_ranks_that_see_different_damage_choose_the_same_checkpoint(
    originals: tuple[Path, Path], tmp_path: Path
) -> None:
    """Only rank 1 hashes the damaged file; both must go back."""
    root = tmp_path / "root"
    shutil.copytree(originals[0], root)
    path = root / f"step_{NEWER:08d}" / "ranks_00000/rank_00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)

    def work(groups: Groups) -> int:
        local_model = build_local_model(small_run(tp=2), groups, torch.device("cpu"), proof_init)
        optimizer = make_optimizer(local_model)
        before = everything(local_model, optimizer)
        with pytest.raises(CheckpointError, match="damaged" if groups.rank == 1 else "refused by rank 1"):
            load_into(root / f"step_{NEWER:08d}", local_model, optimizer)
        assert same(before, everything(local_model, optimizer))
        found = load_latest(root, local_model, optimizer, lambda _: None)
        assert found is not None
        return int(found[1]["step"])

    assert on_ranks(work, 2, tp=2) == [OLDER, OLDER]
