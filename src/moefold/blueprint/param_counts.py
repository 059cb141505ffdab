"""How large a model is, to the digit, and what the different ways of counting leave out.

`total` counts every trained parameter; it is what `sum(p.numel() for p in model.parameters())` gives, here and in
transformers. `active` takes away the experts that a token does not choose, (E - top_k)/E of the routed experts'
parameters, and keeps everything else, the embedding and the head included. The loss-free bias is a buffer in both
worlds and in neither number. `matrices` and `active_matrices` leave out all vectors (norms, biases, sinks), as tables
of published runs do.

DeepSeek-V3 shows how published numbers differ:

    671,026,404,352  total
        - 1,006,592  weights of norms: 61 * (2*7168 + 1536 + 512) + 7168
    671,025,397,760  matrices, the published number
    671,026,419,200  total + 14,848 = 58 * 256 entries of the loss-free bias, for those who count the buffer

     37,552,282,624  active
        - 1,006,592  the same norms, all of which every token uses
     37,551,276,032  active matrices, the published number

Published counts leave multi-token prediction out, and so do the recipes; with `model.num_mtp: 1` it is in `total`:

     11,610,067,968  mtp: the module's own, published as 11.5B unique parameters
    682,636,472,320  total
    + 1,853,358,080  the embedding and the head once more, which published files repeat beside the module
    684,489,830,400  elements of the published files' weights (the 685B), without the bias and FP8 scales
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from moefold.blueprint.model_shape import Layer, MoE
from moefold.blueprint.parameters import (
    ParameterSpec,
    block_parameters,
    is_expert,
    is_mtp,
    module_parameters,
    parameters,
)
from moefold.blueprint.sharding import cuts
from moefold.config.model import ModelConfig

VECTORS = frozenset({"norm", "centred_norm", "bias", "sink", "log_decay", "decay_bias"})


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters; `experts` are the routed experts with their biases, all layers together.

    `mtp` and `active_mtp` say how much of `total` and `active` is in the MTP modules.
    """

    total: int
    active: int
    matrices: int
    active_matrices: int
    experts: int
    mtp: int
    active_mtp: int
    by_kind: Mapping[str, int]


def count_parameters(model: ModelConfig) -> Counts:
    specs = parameters(model)
    top_k = model.moe.top_k if model.moe is not None else 0
    by_kind: dict[str, int] = {}
    for spec in specs:
        by_kind[spec.kind] = by_kind.get(spec.kind, 0) + spec.size
    matrices = [spec for spec in specs if spec.kind not in VECTORS]
    ahead = [spec for spec in specs if is_mtp(spec.name)]
    return Counts(
        total=sum(spec.size for spec in specs),
        active=sum(active_size(spec, top_k) for spec in specs),
        matrices=sum(spec.size for spec in matrices),
        active_matrices=sum(active_size(spec, top_k) for spec in matrices),
        experts=sum(spec.size for spec in specs if is_expert(spec.name)),
        mtp=sum(spec.size for spec in ahead),
        active_mtp=sum(active_size(spec, top_k) for spec in ahead),
        by_kind=by_kind,
    )


def active_size(spec: ParameterSpec, top_k: int) -> int:
    """What one token uses; exact, for the first dim of a stack of experts counts them."""
    return spec.size // spec.shape[0] * top_k if is_expert(spec.name) else spec.size


# ---- of one layer of any shape ----


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Entries of a layer's matrices: those that tp shards, those replicated on tp ranks, and the routed experts'."""

    sharded: int = 0
    replicated: int = 0
    experts: int = 0

    def on_rank(self, tp: int, ep: int, etp: int) -> tuple[float, float]:
        """What one rank has before data parallelism shards it: dense parameters, and experts."""
        return self.sharded / tp + self.replicated, self.experts / (ep * etp)


@lru_cache(maxsize=10_000)
def layer_counts(layer: Layer, dim: int) -> LayerCounts:
    """Matrices only: vectors are one part in ten thousand, and published counts leave them out."""
    sharded = replicated = experts = 0
    for spec in block_parameters("layers.0.", layer, dim):
        if spec.kind in VECTORS:
            continue
        if is_expert(spec.name):
            experts += spec.size
        elif any(cut.axis == "tp" for cut in cuts(spec)):
            sharded += spec.size
        else:
            replicated += spec.size
    return LayerCounts(sharded, replicated, experts)


@lru_cache(maxsize=10_000)
def active_layer_size(layer: Layer, dim: int) -> int:
    """Parameters of a block that one token uses."""
    return _active(block_parameters("layers.0.", layer, dim), layer)


@lru_cache(maxsize=10_000)
def active_module_size(block: Layer, dim: int) -> int:
    """The same of an MTP module, its join included."""
    return _active(module_parameters("mtp.0.", block, dim), block)


def _active(specs: Iterable[ParameterSpec], layer: Layer) -> int:
    top_k = layer.feed.top_k if isinstance(layer.feed, MoE) else 0
    return sum(active_size(spec, top_k) for spec in specs)
