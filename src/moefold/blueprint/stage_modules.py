"""Which modules and how many parameters a pipeline rank holds: those that its stages need.

A module that several stages use, on different ranks, is replicated on each of them: the embedding, which also serves
the MTP modules and, where it is tied, the head; the final norm, which the first MTP module reads too. Replicas start
equal and their gradients are summed, so they stay equal.

Ranks of the same pipeline position hold equally many parameters, up to the last piece of an uneven shard, so the
largest rank of a world of any size is found by looking at one rank per position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from moefold.blueprint.parameters import ParameterSpec, is_expert, parameters
from moefold.blueprint.sharding import local_shape, shard_dim
from moefold.blueprint.stages import StageSpec
from moefold.config.model import ModelConfig
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
