"""What a pipeline stage consists of: the modules and parameters that its rank holds, and the ranks that hold it.

A module that several stages use, on different ranks, is replicated on each of them: the embedding, which also serves
the MTP modules and, where it is tied, the head; the final norm, which the first MTP module reads too. Replicas start
equal and their gradients are summed, so they stay equal.

`pp` is the outermost axis of both grids, so the ranks of one pipeline position are a run of consecutive numbers, the
same in both. Stages go round the positions (`loop`: stage s is at s mod P), or there and back (`v`: the second half
returns, so that the first position holds the first and the last stage, the embedding and the loss). Ranks of the same
position hold equally many parameters, up to the last piece of an uneven shard, so the largest rank of a world of any
size is found by looking at one rank per position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from moefold.blueprint.parameters import ParameterSpec, is_expert, parameters
from moefold.blueprint.sharding import local_shape, shard_dim
from moefold.blueprint.stages import StageSpec
from moefold.config.model import ModelConfig
from moefold.errors import LayoutError, Problem
from moefold.tables import text_table
from moefold.topology.folded_layout import FoldedLayout


@dataclass(frozen=True)
class Parts:
    embedding: bool
    layers: tuple[int, ...]
    mtp: tuple[int, ...]
    # The norms of the final hidden state and of each MTP module's, which the loss and the next module both read.
    final_norm: bool
    mtp_norms: tuple[int, ...]
    # The head, unless the embedding serves as it.
    loss: bool

    def holds(self, name: str) -> bool:
        """Whether the parameter or buffer of this name is among them."""
        first, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if first == "layers":
            return int(number) in self.layers
        if first == "mtp":
            return int(number) in self.mtp
        if first == "mtp_norms":
            return int(number) in self.mtp_norms
        return {"embedding": self.embedding, "final_norm": self.final_norm, "head": self.loss}[first]


def parts_of(stages: Iterable[StageSpec], model: ModelConfig) -> Parts:
    held = tuple(stages)
    loss = any(stage.loss for stage in held)
    looks_ahead = tuple(module for stage in held for module in stage.mtp)
    return Parts(
        embedding=any(stage.embedding for stage in held) or bool(looks_ahead) or (loss and model.tied_embeddings),
        layers=tuple(layer for stage in held for layer in stage.layers),
        mtp=looks_ahead,
        final_norm=loss or 0 in looks_ahead,
        mtp_norms=tuple(depth for depth in range(model.num_mtp) if loss or depth + 1 in looks_ahead),
        loss=loss,
    )


def part_names(stage: StageSpec) -> tuple[str, ...]:
    """What a stage's forward runs through, in order, and its backward in reverse.

    >>> part_names(StageSpec(1, False, range(4, 6), (0,), True))
    ('layer 4', 'layer 5', 'ahead 0', 'loss')
    """
    layers = (f"layer {layer}" for layer in stage.layers)
    ahead = (f"ahead {depth}" for depth in stage.mtp)
    return (*["embedding"] * stage.embedding, *layers, *ahead, *["loss"] * stage.loss)


def first_part(name: str, stage: StageSpec) -> int:
    """The number of the first part of the stage that reads this parameter, which the stage holds.

    Before it the parameter may still be under way, and when the stage's last backward has left it, the parameter's
    gradient is complete: parts that read it too come later, and go backward earlier.
    """
    folder, _, rest = name.partition(".")
    number = int(rest.partition(".")[0]) if folder in ("layers", "mtp", "mtp_norms") else 0
    readers = {
        "embedding": ("embedding", *(f"ahead {depth}" for depth in stage.mtp)),
        "layers": (f"layer {number}",),
        "mtp": (f"ahead {number}",),
        # An MTP module reads the hidden state before it after that one's norm, and the loss reads all of them.
        "final_norm": ("ahead 0",),
        "mtp_norms": (f"ahead {number + 1}",),
        "head": (),
    }[folder]
    parts = part_names(stage)
    return min(parts.index(reader) for reader in (*readers, "loss") if reader in parts)


def whole_model(model: ModelConfig) -> StageSpec:
    """The one stage of a model that is not cut."""
    return StageSpec(0, True, range(model.num_layers), tuple(range(model.num_mtp)), True)


# ---- parameters of one rank, after all sharding ----


@dataclass(frozen=True)
class RankParams:
    """`computed` is what tp, ep, etp and pp leave to a rank; `at_rest` is what sharded data parallelism then leaves."""

    stage: int
    computed: int
    at_rest: int


def largest_rank_params(model: ModelConfig, layout: FoldedLayout, parts_of_rank: Sequence[Parts]) -> RankParams:
    """``parts_of_rank`` has the parts of every pipeline rank; what several of them hold, each of them holds."""
    shares = [
        _share(rank, (spec for spec in parameters(model) if parts.holds(spec.name)), layout)
        for rank, parts in enumerate(parts_of_rank)
    ]
    return max(shares, key=lambda share: (share.at_rest, share.computed))


def _share(stage: int, specs: Iterable[ParameterSpec], layout: FoldedLayout) -> RankParams:
    computed = at_rest = 0
    for spec in specs:
        shape = local_shape(spec, layout)
        computed += prod(shape)
        at_rest += _largest_shard(shape, layout.size("expert_shard" if is_expert(spec.name) else "dense_shard"))
    return RankParams(stage, computed, at_rest)


def _largest_shard(shape: tuple[int, ...], ways: int) -> int:
    size = shape[shard_dim(shape, ways)]
    return prod(shape) // size * -(-size // ways)


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
