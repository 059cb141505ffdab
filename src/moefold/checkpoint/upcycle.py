"""Upcycling: a dense model becomes an MoE model whose initial output is about, or exactly, the same.

Granular upcycling (E2G2T2: two copies of two shards, top two): the feed-forward is cut along its hidden dim into G
shards, whose outputs add up to the whole. Each shard is copied E times, and the router is random but has the same rows
for every shard. So the shards of one copy have equal scores and are selected together: T experts are T/G whole copies.
Plain upcycling is G = 1. Two schemes differ in probs and in the scale of the weights:

exact
    A token's probs are normalized to a sum of one. A shard has 1/G of its copy's prob, so down is scaled by G. The
    initial output is the dense model's, for any router.
scaled
    He et al. 2024 (arXiv 2410.07524), and section 7.6 of the Megatron Core MoE report: softmax over all E * G experts,
    then top-k, probs not normalized. An untrained router gives each expert a prob of about 1 / (E * G), so the top T
    add up to T/G * 1 / (E * G) of the dense output, and the weights are scaled to compensate:

        s = E * G^2 / T

    Each of a SwiGLU's three matrices is scaled by the cube root of s, as up and down are linear and silu nearly so. The
    initial output is close to the dense model's, not equal: probs are not exactly uniform, silu(a z) is not a silu(z).

    expert number = shard * copies + copy          router row = that of its copy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from moefold.blueprint.parameters import parameters
from moefold.checkpoint.tensor_spec import Box, TensorSource, whole
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig
from moefold.errors import ConversionError, Problem
from moefold.nn.init import normal_part

Scheme = Literal["exact", "scaled"]
# Softmax over all experts before the top-k in both; the schemes differ in whether the selected probs are normalized.
ROUTERS: dict[Scheme, RouterConfig] = {
    "exact": RouterConfig(score="softmax", score_when="before_topk", normalize=True),
    "scaled": RouterConfig(score="softmax", score_when="before_topk", normalize=False),
}


@dataclass(frozen=True)
class Upcycling:
    """`experts` and `top_k` count shards: E2G2T2 is experts=4, shards=2, top_k=2."""

    experts: int
    top_k: int
    shards: int = 1
    scheme: Scheme = "exact"

    @property
    def copies(self) -> int:
        return self.experts // self.shards

    @property
    def gate_up_scale(self) -> float:
        return 1.0 if self.scheme == "exact" else self._cube_root

    @property
    def down_scale(self) -> float:
        return float(self.shards) if self.scheme == "exact" else self._cube_root

    @property
    def _cube_root(self) -> float:
        """Of E * G^2 / T, which compensates for the probs of T experts under a uniform softmax."""
        scale: float = (self.copies * self.shards**2 / self.top_k) ** (1 / 3)
        return scale


def upcycled_model(dense: ModelConfig, how: Upcycling) -> ModelConfig:
    """The MoE model that a dense model becomes; no layer stays dense."""
    wrong = list(_problems(dense, how))
    if wrong:
        raise ConversionError(*wrong)
    moe = MoEConfig(
        num_experts=how.experts,
        top_k=how.top_k,
        expert_hidden_dim=dense.dense_hidden_dim // how.shards,
        router=ROUTERS[how.scheme],
    )
    return replace(dense, moe=moe, num_dense_layers=0)


def _problems(dense: ModelConfig, how: Upcycling) -> list[Problem]:
    found = []
    if dense.moe is not None:
        found.append(Problem("model.moe", "the model is already an MoE model", "upcycling needs a dense one"))
    if min(how.experts, how.top_k, how.shards) < 1 or how.top_k > how.experts:
        message = f"{how.experts} experts, top_k {how.top_k}, {how.shards} shards"
        return [*found, Problem("experts", message, "use 1 or more of each, and top_k <= experts")]
    if how.experts % how.shards:
        found.append(Problem("experts", f"{how.experts} is not a multiple of {how.shards} shards"))
    if how.top_k % how.shards:
        fix = "all shards of a copy must be selected together, or the output is not the dense model's"
        found.append(Problem("top_k", f"{how.top_k} is not a multiple of {how.shards} shards", fix))
    if dense.dense_hidden_dim % how.shards:
        found.append(Problem("shards", f"hidden dim {dense.dense_hidden_dim} does not divide by {how.shards}"))
    return found


class Upcycled:
    """The MoE model's tensors, computed from the dense model's when they are read."""

    def __init__(self, dense: TensorSource, model: ModelConfig, how: Upcycling, seed: int) -> None:
        self.dense, self.model, self.how, self.seed = dense, model, how, seed
        self._shapes = {f"parameter/{spec.name}": spec.shape for spec in parameters(model)}

    def names(self) -> Sequence[str]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self.dense.dtype("parameter/embedding.weight")

    @property
    def num_bytes(self) -> int:
        return sum(prod(shape) * self.dtype(name).itemsize for name, shape in self._shapes.items())

    def read(self, name: str, box: Box | None = None) -> Tensor:
        layer, _, leaf = name.rpartition(".feed_forward.")
        computed = {
            "router.weight": self._router,
            "experts.gate_up": self._gate_up,
            "experts.down": self._down,
        }
        values = computed[leaf](layer) if leaf in computed else self.dense.read(name)
        return values if box is None else values[box]

    def _router(self, layer: str) -> Tensor:
        """Random rows for the copies, repeated for every shard."""
        name = f"{layer}.feed_forward.router.weight".removeprefix("parameter/")
        shape = (self.how.copies, self.model.dim)
        rows = torch.empty(shape, dtype=self.dtype(name))
        normal_part(self.seed, name, shape, whole(shape), self.model.init_std, rows)
        return rows.repeat(self.how.shards, 1)

    def _gate_up(self, layer: str) -> Tensor:
        shards = self.dense.read(f"{layer}.feed_forward.gate_up").unflatten(1, (self.how.shards, -1)).transpose(0, 1)
        return shards.repeat_interleave(self.how.copies, dim=0).mul_(self.how.gate_up_scale)

    def _down(self, layer: str) -> Tensor:
        shards = self.dense.read(f"{layer}.feed_forward.down").unflatten(1, (self.how.shards, -1)).transpose(0, 1)
        return shards.repeat_interleave(self.how.copies, dim=0).mul_(self.how.down_scale)
