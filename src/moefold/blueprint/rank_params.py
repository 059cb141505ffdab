"""How many parameters one rank holds, after every cut that the layout makes.

Ranks of the same pipeline position hold equally much, up to the last piece of an uneven shard, so the largest rank of a
world of any size is found by looking at one rank per position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from moefold.blueprint.parameters import ParameterSpec, is_expert, parameters
from moefold.blueprint.sharding import local_shape, shard_dim
from moefold.blueprint.stage_modules import Parts
from moefold.config.model import ModelConfig
from moefold.topology.folded_layout import FoldedLayout


@dataclass(frozen=True)
class RankShare:
    """`computed` is what tp, ep, etp and pp leave to a rank; `at_rest` is what sharded data parallelism then leaves."""

    stage: int
    computed: int
    at_rest: int


def largest_share(model: ModelConfig, layout: FoldedLayout, parts_of_rank: Sequence[Parts]) -> RankShare:
    """``parts_of_rank`` has the parts of every pipeline rank; what several of them hold, each of them holds."""
    shares = [
        _share(rank, (spec for spec in parameters(model) if parts.holds(spec.name)), layout)
        for rank, parts in enumerate(parts_of_rank)
    ]
    return max(shares, key=lambda share: (share.at_rest, share.computed))


def _share(stage: int, specs: Iterable[ParameterSpec], layout: FoldedLayout) -> RankShare:
    computed = at_rest = 0
    for spec in specs:
        shape = local_shape(spec, layout)
        computed += prod(shape)
        at_rest += _largest_shard(shape, layout.size("expert_shard" if is_expert(spec.name) else "dense_shard"))
    return RankShare(stage, computed, at_rest)


def _largest_shard(shape: tuple[int, ...], ways: int) -> int:
    size = shape[shard_dim(shape, ways)]
    return prod(shape) // size * -(-size // ways)
