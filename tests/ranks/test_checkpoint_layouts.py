"""Saved under one layout, loaded under another: every global tensor comes back bit for bit, moments included."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.saved_runs import everything, fill_moments, same, small_run
from tests.support import on_ranks

from moefold.checkpoint.load import Checkpoint, load_latest
from moefold.checkpoint.save import Saver
from moefold.checkpoint.state_dict import chunks_of, run_record, tensors_elsewhere
from moefold.checkpoint.step_dirs import verify
from moefold.comm.process_groups import Groups
from moefold.config.parallel import RankOrderConfig
from moefold.config.run import RunConfig
from moefold.parallel.parallelize import build_local_model
from moefold.pipeline.step import make_optimizer
from moefold.prove.proof_inputs import proof_init

# (world, degrees)
Layout = tuple[int, dict[str, Any]]


def ordered(layout: Layout, dense: str, expert: str) -> Layout:
    return layout[0], {**layout[1], "rank_order": RankOrderConfig(dense, expert)}


ALONE: Layout = (1, {})
# Everything at once: a pipeline of two times two stages with documents cut over two ranks, one folded over tp and dp,
# and documents cut over four ranks without a pipeline.
PIPED: Layout = (8, {"pp": 2, "vpp": 2, "cp": 2, "ep": 2, "schedule": "interleaved"})
FOLDED: Layout = (8, {"pp": 2, "tp": 2, "ep": 4})
CUT: Layout = (4, {"cp": 4, "ep": 4})
# Rank 0 holds the first stage and the last one; a rank holds nothing at all.
IN_A_V: Layout = (4, {"pp": 2, "vpp": 2, "schedule": "dualpipe_v", "stages": "Et|t|tm|L"})
EMPTY: Layout = (3, {"pp": 3, "stages": "Ettt||mL"})

# Of the saving and of the loading run: every axis once.
PAIRS: list[tuple[Layout, Layout]] = [
    ((3, {}), (4, {"tp": 2, "ep": 2, "etp": 2})),
    # Other ranks are neighbours, on either side.
    (ordered((4, {"tp": 2, "ep": 2}), "dp-tp-cp-pp", "etp-edp-ep-pp"), (4, {"tp": 2, "ep": 2})),
    ((4, {"ep": 2, "etp": 2, "cp": 2}), ordered((8, {"tp": 2, "ep": 2, "etp": 2}), "dp-cp-tp-pp", "edp-ep-etp-pp")),
    (IN_A_V, EMPTY),
    (ALONE, (4, {"tp": 2, "ep": 4})),
    ((4, {"tp": 2, "ep": 4}), ALONE),
    ((4, {"ep": 4}), (4, {"ep": 4})),
    ((4, {"ep": 4}), (2, {"tp": 2, "ep": 2})),
    ((2, {"ep": 2}), (4, {"ep": 2, "etp": 2})),
    ((4, {"ep": 2, "dp_replicate": 2, "edp_replicate": 2}), (2, {})),
    ((2, {}), (4, {"ep": 2, "dp_replicate": 2, "edp_replicate": 2})),
    ((4, {"tp": 4, "etp": 4}), (4, {"ep": 4})),
    ((4, {"tp": 2, "etp": 2}), (3, {})),
    ((8, {"tp": 2, "ep": 2, "etp": 2}), (4, {"dp_replicate": 4, "edp_replicate": 2})),
    ((2, {"tp": 2, "ep": 2}), (8, {"tp": 2, "ep": 8})),
    (PIPED, FOLDED),
    (FOLDED, CUT),
    (CUT, PIPED),
    (ALONE, PIPED),
    (EMPTY, IN_A_V),
    (ALONE, FOLDED),
    (ALONE, CUT),
    (PIPED, ALONE),
    (FOLDED, ALONE),
    (CUT, ALONE),
    (FOLDED, PIPED),
    (PIPED, CUT),
    (CUT, FOLDED),
    (IN_A_V, PIPED),
    (FOLDED, EMPTY),
]


def flat(layout: Layout, **more: Any) -> Layout:
    return layout[0], {**layout[1], "sharding": "flat", **more}


def four_steps(layout: Layout, ranks_per_host: int) -> Layout:
    """Ranges are numbered by place on the host first."""
    return flat(layout, param_sync="hierarchical", ranks_per_host=ranks_per_host)


# Between FSDP and flat sharding, in both directions, and between flat layouts.
PAIRS += [
    ((2, {"tp": 2, "ep": 2}), flat((3, {}))),
    (flat(IN_A_V), (3, {})),
    (flat((3, {})), (4, {"tp": 2, "ep": 2, "etp": 2})),
    ((3, {}), flat((4, {"tp": 2, "ep": 2, "etp": 2}))),
    (flat(ALONE), (4, {"ep": 4})),
    ((4, {"ep": 4}), flat(ALONE)),
    (flat(PIPED), FOLDED),
    (FOLDED, flat(PIPED)),
    (flat(CUT), PIPED),
    (PIPED, flat(CUT)),
    (flat((8, {"ep": 2})), flat((5, {}))),
    ((4, {"ep": 2, "dp_replicate": 2, "edp_replicate": 2}), flat((4, {"ep": 2}))),
    (flat((4, {"ep": 2, "dp_replicate": 2, "edp_replicate": 2})), (2, {})),
    ((2, {}), flat((4, {"dp_replicate": 4, "edp_replicate": 2}))),
    (EMPTY, flat(IN_A_V)),
    (flat(EMPTY), flat(FOLDED)),
    (four_steps((4, {}), 2), flat((2, {"tp": 2, "ep": 2}))),
    ((3, {}), four_steps((4, {"ep": 2}), 2)),
    (four_steps((8, {"ep": 2}), 4), four_steps((8, {"pp": 2, "ep": 2}), 2)),
]
# The pairs that `make check` tries.
QUICK = (0, 1, 2, len(PAIRS) - 19, len(PAIRS) - 18, len(PAIRS) - 3)


def label(pair: tuple[Layout, Layout]) -> str:
    def word(name: str, size: Any) -> str:
        return f"{size.dense}+{size.expert}" if isinstance(size, RankOrderConfig) else f"{name}{size}"

    sides = ("x".join([str(world), *(word(*each) for each in degrees.items())]) for world, degrees in pair)
    return "-to-".join(sides)


def run_of(degrees: dict[str, Any]) -> RunConfig:
    """With an MTP module, so that pipelines hold some weights more than once."""
    run = small_run(**degrees)
    return replace(run, model=replace(run.model, num_mtp=1))


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            pair, marks=() if n in QUICK else pytest.mark.nightly if n >= len(PAIRS) - 19 else pytest.mark.slow
        )
        for n, pair in enumerate(PAIRS)
    ],
    ids=label,
)
def test_any_layout_to_any_layout(pair: tuple[Layout, Layout], tmp_path: Path) -> None:
    (world, degrees), (new_world, new_degrees) = pair

    def save(groups: Groups) -> None:
        torch.manual_seed(groups.rank)
        local_model = build_local_model(run_of(degrees), groups, torch.device("cpu"), proof_init)
        optimizer = make_optimizer(local_model)
        fill_moments(local_model, optimizer, seed=1)
        saver = Saver(tmp_path, groups["world"], 0, about=run_record(local_model))
        elsewhere = tensors_elsewhere(local_model, optimizer)
        saver.begin(5, chunks_of(local_model, optimizer), {"train": {"step": 5}}, elsewhere)
        # What happens to the live tensors after `begin` must not reach the file.
        for piece in local_model.pieces():
            piece.parameter.detach().zero_()
        assert saver.finish() == 5

    def load(groups: Groups) -> list[float]:
        expected = build_local_model(run_of(new_degrees), groups, torch.device("cpu"), proof_init)
        its_optimizer = make_optimizer(expected)
        fill_moments(expected, its_optimizer, seed=1)
        local_model = build_local_model(run_of(new_degrees), groups, torch.device("cpu"))
        optimizer = make_optimizer(local_model)
        torch.manual_seed(77)
        found = load_latest(tmp_path, local_model, optimizer)
        assert found is not None and found[1] == {"train": {"step": 5}}
        assert same(everything(expected, its_optimizer), everything(local_model, optimizer))
        return torch.rand(2).tolist()

    on_ranks(save, world, **degrees)
    manifest = verify(tmp_path / "step_00000005")
    sizes = {name: size for name, size in degrees.items() if isinstance(size, int)}
    assert manifest.world == world and manifest.layout.items() >= sizes.items()
    drawn = on_ranks(load, new_world, **new_degrees)
    # With as many ranks as before each goes on with its own random numbers, otherwise with new ones of its own.
    before = [torch.rand(2, generator=torch.Generator().manual_seed(rank)).tolist() for rank in range(new_world)]
    assert (drawn == before) == (world == new_world)
    assert len({tuple(numbers) for numbers in drawn}) == new_world


@pytest.mark.slow
def test_the_bytes_of_model_and_moments_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    def digest(path: Path) -> str:
        checkpoint, digest = Checkpoint(path), hashlib.sha256()
        for name in sorted(checkpoint.names()):
            digest.update(name.encode())
            digest.update(checkpoint.read(name).numpy().tobytes())
        return digest.hexdigest()

    found = set()
    layouts = [ALONE, (2, {"tp": 2}), (4, {"ep": 4}), PIPED, FOLDED, CUT, flat(PIPED), flat((3, {}))]
    for number, (world, degrees) in enumerate(layouts):
        root = tmp_path / str(number)

        def save(groups: Groups, root: Path = root, degrees: dict[str, Any] = degrees) -> None:
            local_model = build_local_model(run_of(degrees), groups, torch.device("cpu"), proof_init)
            optimizer = make_optimizer(local_model)
            fill_moments(local_model, optimizer, seed=1)
            saver = Saver(root, groups["world"], 0, background=False)
            saver.begin(1, chunks_of(local_model, optimizer), {}, tensors_elsewhere(local_model, optimizer))
            assert saver.advance() == 1 and saver.advance() is None

        on_ranks(save, world, **degrees)
        found.add(digest(root / "step_00000001"))
    assert len(found) == 1
