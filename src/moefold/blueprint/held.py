"""How many parameters one rank holds, after every cut that the layout makes.

Layers are dealt to pipeline stages in contiguous, nearly equal shares, the first stage with the embedding and the last
with the final norm and the head. Inside a stage all ranks hold equally much, up to the last piece of an uneven shard,
so the largest rank of a world of any size is found by looking at one rank per stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from moefold.blueprint.parameters import ParameterSpec, is_expert, parameters
from moefold.blueprint.sharding import local_shape, shard_dim
from moefold.config.model import ModelConfig
from moefold.topology.layout import FoldedLayout
from moefold.topology.shares import share_sizes


@dataclass(frozen=True)
class RankShare:
    """`computed` is what tp, ep, etp and pp leave to a rank; `at_rest` is what sharded data parallelism then leaves."""

    stage: int
    computed: int
    at_rest: int


def largest_share(model: ModelConfig, layout: FoldedLayout) -> RankShare:
    shares = [_share(stage, specs, layout) for stage, specs in enumerate(by_stage(model, layout.size("pp")))]
    return max(shares, key=lambda share: (share.at_rest, share.computed))


def by_stage(model: ModelConfig, stages: int) -> list[list[ParameterSpec]]:
    """Parameters of each stage; a tied embedding is needed at both ends."""
    stage_of_layer = list(_deal(share_sizes(model.num_layers, stages)))
    dealt: list[list[ParameterSpec]] = [[] for _ in range(stages)]
    for spec in parameters(model):
        if spec.name.startswith("layers."):
            dealt[stage_of_layer[int(spec.name.split(".")[1])]].append(spec)
        else:
            dealt[0 if spec.kind == "embedding" else -1].append(spec)
            if spec.kind == "embedding" and model.tied_embeddings and stages > 1:
                dealt[-1].append(spec)
    return dealt


def _deal(sizes: Iterable[int]) -> Iterator[int]:
    for stage, size in enumerate(sizes):
        yield from [stage] * size


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
