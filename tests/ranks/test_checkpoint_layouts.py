"""Saved under one layout, loaded under another: every global tensor comes back bit for bit, moments included."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from tests.checkpoint.saved_runs import everything, fill_moments, optimizer_for, same, small_run
from tests.support import on_ranks

from moefold.checkpoint.collect import about_run, chunks_of
from moefold.checkpoint.load import Checkpoint, load_latest
from moefold.checkpoint.save import Saver
from moefold.checkpoint.verify import verify
from moefold.comm.mesh import Groups
from moefold.parallel.apply import take_share
from moefold.prove.start import busy_values

Layout = tuple[int, dict[str, int]]

ALONE: Layout = (1, {})
# (world, degrees) of the saving and of the loading run.
PAIRS: list[tuple[Layout, Layout]] = [
    (ALONE, (4, {"tp": 2, "ep": 4})),
    ((4, {"tp": 2, "ep": 4}), ALONE),
    ((4, {"ep": 4}), (4, {"ep": 4})),
    ((4, {"ep": 4}), (2, {"tp": 2, "ep": 2})),
    ((2, {"ep": 2}), (4, {"ep": 2, "etp": 2})),
    ((4, {"ep": 2, "dp_replicate": 2, "edp_replicate": 2}), (2, {})),
    ((2, {}), (4, {"ep": 2, "dp_replicate": 2, "edp_replicate": 2})),
    ((4, {"tp": 4, "etp": 4}), (4, {"ep": 4})),
    ((3, {}), (4, {"tp": 2, "ep": 2, "etp": 2})),
    ((4, {"tp": 2, "etp": 2}), (3, {})),
    ((8, {"tp": 2, "ep": 2, "etp": 2}), (4, {"dp_replicate": 4, "edp_replicate": 2})),
    ((2, {"tp": 2, "ep": 2}), (8, {"tp": 2, "ep": 8})),
]


def label(pair: tuple[Layout, Layout]) -> str:
    sides = ("x".join([str(world), *(f"{name}{size}" for name, size in degrees.items())]) for world, degrees in pair)
    return "-to-".join(sides)


@pytest.mark.parametrize("pair", PAIRS, ids=label)
def test_any_layout_to_any_layout(pair: tuple[Layout, Layout], tmp_path: Path) -> None:
    (world, degrees), (new_world, new_degrees) = pair

    def save(groups: Groups) -> None:
        torch.manual_seed(groups.rank)
        share = take_share(small_run(**degrees), groups, torch.device("cpu"), busy_values)
        optimizer = optimizer_for(share)
        fill_moments(share, optimizer, seed=1)
        saver = Saver(tmp_path, groups["world"], 0, about=about_run(share))
        saver.begin(5, chunks_of(share, optimizer), {"train": {"step": 5}})
        # What happens to the live tensors after `begin` must not reach the file.
        for parameter in share.model.parameters():
            parameter.detach().zero_()
        assert saver.finish() == 5

    def load(groups: Groups) -> list[float]:
        expected = take_share(small_run(**new_degrees), groups, torch.device("cpu"), busy_values)
        its_optimizer = optimizer_for(expected)
        fill_moments(expected, its_optimizer, seed=1)
        share = take_share(small_run(**new_degrees), groups, torch.device("cpu"))
        optimizer = optimizer_for(share)
        torch.manual_seed(77)
        found = load_latest(tmp_path, share, optimizer)
        assert found is not None and found[1] == {"train": {"step": 5}}
        assert same(everything(expected, its_optimizer), everything(share, optimizer))
        return torch.rand(2).tolist()

    on_ranks(save, world, **degrees)
    manifest = verify(tmp_path / "step_00000005")
    assert manifest.world == world and manifest.layout.items() >= degrees.items()
    drawn = on_ranks(load, new_world, **new_degrees)
    # With as many ranks as before each goes on with its own random numbers, otherwise with new ones of its own.
    before = [torch.rand(2, generator=torch.Generator().manual_seed(rank)).tolist() for rank in range(new_world)]
    assert (drawn == before) == (world == new_world)
    assert len({tuple(numbers) for numbers in drawn}) == new_world


def test_the_bytes_of_the_model_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    def digest(path: Path) -> str:
        checkpoint, digest = Checkpoint(path), hashlib.sha256()
        for name in sorted(checkpoint.names()):
            digest.update(checkpoint.read(name).numpy().tobytes())
        return digest.hexdigest()

    found = set()
    for number, (world, degrees) in enumerate([(2, {"tp": 2}), (4, {"ep": 4})]):
        root = tmp_path / str(number)

        def save(groups: Groups, root: Path = root, degrees: dict[str, int] = degrees) -> None:
            share = take_share(small_run(**degrees), groups, torch.device("cpu"), busy_values)
            saver = Saver(root, groups["world"], 0, background=False)
            saver.begin(1, chunks_of(share, None), {})
            assert saver.advance() == 1 and saver.advance() is None

        on_ranks(save, world, **degrees)
        found.add(digest(root / "step_00000001"))
    assert len(found) == 1
