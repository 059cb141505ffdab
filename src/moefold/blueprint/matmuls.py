"""The matmuls of a layer, one row each: what every FLOP count is made of.

A trained matrix [outer, inner] is one matmul per token: y = x @ W.T. So the rows follow from the list of parameters,
and their sharding from the table of shard rules; a count of FLOPs and a count of parameters cannot disagree.

    name            inner  outer  per token    sharded
    q               D      H C    1            outer, over tp
    out             H U    D      1            inner, over tp
    experts.down    F      L      top_k        inner, over etp; the stack of experts over ep

Keys and values are one matmul, as frameworks compute them. Not in the table: attention's scores and weighted values and
the scan of a recurrence, which have no weights (`core_flops` of `blueprint/flops.py`), and the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

from moefold.blueprint.model_shape import Attention, Layer, MoE
from moefold.blueprint.param_counts import VECTORS
from moefold.blueprint.parameters import ParameterSpec, block_parameters, is_expert
from moefold.blueprint.sharding import cuts

Part = Literal["attention", "dense", "shared", "routed", "router"]
# By the beginning of the name inside of a block; the first that fits.
_PARTS: tuple[tuple[str, Part], ...] = (
    ("attention.", "attention"),
    ("recurrence.", "attention"),
    ("feed_forward.router.", "router"),
    ("feed_forward.shared_gate.", "router"),
    ("feed_forward.shared.", "shared"),
    ("feed_forward.experts.", "routed"),
    ("feed_forward.latent_", "routed"),
    ("feed_forward.", "dense"),
)


@dataclass(frozen=True, slots=True)
class Matmul:
    """``y[rows, outer] = x[rows, inner] @ W``, so often per token. `experts`: how many such matrices are stacked."""

    name: str
    part: Part
    inner: int
    outer: int
    per_token: int = 1
    experts: int = 0
    # The dim that tp shards, or etp inside of experts; None is replicated.
    sharded: Literal["inner", "outer"] | None = None
    # Heads of keys and values are not split: the least of `outer` that a rank computes.
    least_outer: int = 0

    @property
    def flops(self) -> float:
        """Forward, per token; a multiplication and its addition are two."""
        return 2.0 * self.per_token * self.inner * self.outer


@lru_cache(maxsize=10_000)
def layer_matmuls(layer: Layer, dim: int) -> tuple[Matmul, ...]:
    """In the order of the forward pass."""
    rows = [_matmul(spec, layer) for spec in block_parameters("", layer, dim) if spec.kind not in VECTORS]
    return tuple(_joined(rows, layer))


def _matmul(spec: ParameterSpec, layer: Layer) -> Matmul:
    part = next(part for beginning, part in _PARTS if spec.name.startswith(beginning))
    name = spec.name.partition(".")[2].removesuffix(".weight")
    routed = layer.feed if is_expert(spec.name) else None
    stacked, top_k = (routed.experts, routed.top_k) if isinstance(routed, MoE) else (0, 1)
    shape = spec.shape[1:] if stacked else spec.shape
    last = len(spec.shape) - 1
    split = [cut.dim for cut in cuts(spec) if cut.axis == ("etp" if stacked else "tp")]
    sharded: Literal["inner", "outer"] | None = None
    if split:
        sharded = "inner" if split[0] == last else "outer"
    return Matmul(name, part, shape[-1], prod(shape[:-1]), top_k, stacked, sharded)


def _joined(rows: list[Matmul], layer: Layer) -> Iterator[Matmul]:
    """Keys and values as one."""
    for row in rows:
        if row.name == "k":
            outer = row.outer + next(other.outer for other in rows if other.name == "v")
            assert isinstance(layer.mixer, Attention)
            yield replace(row, name="kv", outer=outer, least_outer=outer // layer.mixer.kv_heads)
        elif row.name != "v":
            yield row
