"""Which ranks hold which pipeline stage, in a world of any size.

`pp` is the outermost axis of both grids, so the ranks of one pipeline position are a run of consecutive numbers, the
same in both. Stages go round the positions (`loop`: stage s is at s mod P), or there and back (`v`: the second half
returns, so that the first position holds the first and the last stage, the embedding and the loss).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moefold.blueprint.stages import StageSpec
from moefold.errors import LayoutError, Problem
from moefold.tables import text_table
from moefold.topology.folded_layout import FoldedLayout

Placement = Literal["loop", "v"]


@dataclass(frozen=True)
class StagePlace:
    """A stage, the pipeline position that holds it, which of that position's stages it is, and the ranks there."""

    stage: StageSpec
    position: int
    virtual: int
    ranks: range


def place_stages(
    stages: Sequence[StageSpec], layout: FoldedLayout, placement: Placement = "loop"
) -> tuple[StagePlace, ...]:
    """Every stage's ranks, in the order of the stages."""
    positions = layout.size("pp")
    if not stages or len(stages) % positions or (placement == "v" and len(stages) != 2 * positions):
        needed = f"{2 * positions}" if placement == "v" else f"a multiple of {positions}"
        raise LayoutError(
            Problem("parallel.vpp", f"{len(stages)} stages do not fit {positions} pipeline ranks", f"use {needed}")
        )
    stride = layout.attention.stride("pp")
    places = []
    for stage in stages:
        virtual, position = divmod(stage.index, positions)
        if placement == "v" and virtual == 1:
            position = positions - 1 - position
        places.append(StagePlace(stage, position, virtual, range(position * stride, (position + 1) * stride)))
    return tuple(places)


def stage_table(places: Sequence[StagePlace]) -> str:
    """One line per stage: who holds it, and what it is."""
    rows = [
        (place.stage.index, place.position, place.virtual, _span(place.ranks), describe_stage(place.stage))
        for place in places
    ]
    return text_table(("stage", "position", "virtual", "ranks", "holds"), rows)


def describe_stage(stage: StageSpec) -> str:
    """`embedding, layers 0-2`."""
    parts = ["embedding"] if stage.embedding else []
    if stage.layers:
        parts.append(("layers " if len(stage.layers) > 1 else "layer ") + _span(stage.layers))
    if stage.mtp:
        parts.append("MTP " + ", ".join(map(str, stage.mtp)))
    parts += ["loss"] if stage.loss else []
    return ", ".join(parts) or "nothing"


def _span(numbers: range) -> str:
    return str(numbers.start) if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}"
