"""Who holds which stage: the same in both grids, for the smallest world and for the largest, in seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from moefold.blueprint.stage_modules import StagePlace, place_stages, stage_table
from moefold.blueprint.stages import parse_stages, stages_of
from moefold.config.model import ModelConfig
from moefold.config.parallel import ParallelConfig
from moefold.errors import LayoutError
from moefold.topology.folded_layout import GROUPS, FoldedLayout, fold


def wrong_places(places: Sequence[StagePlace], layout: FoldedLayout) -> list[str]:
    """Walk over every rank: stages, pipelines and both grids must agree."""
    held: dict[int, list[StagePlace]] = {rank: [] for rank in range(layout.world)}
    for place in places:
        for rank in place.ranks:
            held[rank].append(place)
    each = len(places) // layout.size("pp")
    found = [f"rank {rank} holds {len(own)} stages" for rank, own in held.items() if len(own) != each]
    for rank, own in held.items():
        for name, grid in (("attention", layout.attention), ("expert", layout.expert)):
            at = grid.coordinate(rank, "pp")
            found += [f"the {name} grid puts rank {rank} at {at}" for place in own if place.position != at]
    # Microbatches flow along these groups: each must meet every stage, whoever else is in the world.
    for group in layout.attention.groups(GROUPS["pp"].axes):
        met = sorted(place.stage.index for rank in group for place in held[rank])
        if met != list(range(len(places))):
            found.append(f"the pipeline of ranks {group[0]}, ... meets stages {met}")
    return found


@pytest.mark.timing
def test_16384_ranks_hold_deepseek_v3_in_under_five_seconds() -> None:
    start = time.perf_counter()
    stages = parse_stages("Et*3|(tt|)*29m|L", 61, 1)
    layout = fold(ParallelConfig(pp=16, vpp=2, tp=4, cp=2, ep=64), 16_384)
    places = place_stages(stages, layout)
    assert not wrong_places(places, layout)
    table = stage_table(places).splitlines()
    assert time.perf_counter() - start < 5
    assert len(table) == 2 + 32
    assert table[2].split(maxsplit=4) == ["0", "0", "0", "0-1023", "embedding, layers 0-2"]
    assert table[-2].split(maxsplit=4) == ["30", "14", "1", "14336-15359", "MTP 0"]
    assert table[-1].split(maxsplit=4) == ["31", "15", "1", "15360-16383", "loss"]


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_every_rank_holds_its_share_in_every_world(pp: int, vpp: int) -> None:
    parallel = ParallelConfig(pp=pp, vpp=vpp, tp=2, cp=2, ep=4)
    layout = fold(parallel, 8 * pp)
    stages = stages_of(ModelConfig(num_layers=5), parallel)
    places = place_stages(stages, layout)
    assert not wrong_places(places, layout)
    for place in places:
        assert place.position == place.stage.index % pp
        assert tuple(place.ranks) == layout.ranks("stage", place.ranks[0])


def test_a_v_returns_to_where_it_began() -> None:
    layout = fold(ParallelConfig(pp=4), 8)
    stages = stages_of(ModelConfig(num_layers=8), ParallelConfig(pp=4, vpp=2))
    places = place_stages(stages, layout, "v")
    assert not wrong_places(places, layout)
    assert [place.position for place in places] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert places[-1].ranks == range(0, 2)
    with pytest.raises(LayoutError, match="use 8"):
        place_stages(stages[:4], layout, "v")
    with pytest.raises(LayoutError, match="a multiple of 4"):
        place_stages(stages[:6], layout)


def test_a_stage_on_the_wrong_ranks_is_noticed() -> None:
    layout = fold(ParallelConfig(pp=2), 4)
    places = place_stages(stages_of(ModelConfig(), ParallelConfig(pp=2)), layout)
    missing = wrong_places((places[0], replace(places[1], ranks=range(2, 3))), layout)
    assert missing[0] == "rank 3 holds 0 stages"
    swapped = (replace(places[0], ranks=places[1].ranks), replace(places[1], ranks=places[0].ranks))
    assert "the attention grid puts rank 2 at 1" in wrong_places(swapped, layout)
