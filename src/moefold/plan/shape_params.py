"""How many parameters a pipeline stage holds, cut over its ranks: dense ones and experts apart.

The planner knows models that moefold cannot build, so these counts come from shapes, not from the blueprint; a test
holds the two against each other for every recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from moefold.plan.shape import Attention, Dense, Layer, Mixture, ModelShape, Recurrence


@dataclass(frozen=True, slots=True)
class Parameters:
    """Whole numbers of a layer before any cut. `whole` are repeated on tensor-parallel ranks (latents, routers)."""

    dense: float = 0.0
    whole: float = 0.0
    experts: float = 0.0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.whole + other.whole, self.experts + other.experts)

    @property
    def total(self) -> float:
        return self.dense + self.whole + self.experts


@lru_cache(maxsize=10_000)
def layer_parameters(layer: Layer, dim: int) -> Parameters:
    """Matrices only; norms and biases are one part in ten thousand."""
    return _mixer(layer, dim) + _feed(layer, dim)


def _mixer(layer: Layer, D: int) -> Parameters:
    a = layer.mixer
    if isinstance(a, Attention):
        out = a.heads * a.v_dim * D
        query = a.heads * a.qk_dim
        queries = a.q_latent * query if a.q_latent else D * query
        if a.is_latent:
            up = a.kv_latent * a.heads * (a.qk_dim - a.rope_dim + a.v_dim)
            return Parameters(queries + up + out, D * (a.q_latent + a.kv_latent + a.rope_dim))
        return Parameters(queries + D * a.kv_heads * (a.qk_dim + a.v_dim) + out, D * a.q_latent)
    if isinstance(a, Recurrence):
        inner = a.heads * a.head_dim
        return Parameters(D * (2 * inner + 2 * a.groups * a.state + a.heads) + inner * D)
    return Parameters()


def _feed(layer: Layer, D: int) -> Parameters:
    feed = layer.feed
    if isinstance(feed, Dense):
        return Parameters((3 if feed.gated else 2) * D * feed.dim)
    if isinstance(feed, Mixture):
        matrices = 3 if feed.gated else 2
        experts = feed.experts * matrices * (feed.latent or D) * feed.dim
        shared = matrices * D * feed.shared_hidden_dim
        return Parameters(shared, D * feed.experts + 2 * D * feed.latent, experts)
    return Parameters()


def model_parameters(model: ModelShape) -> Parameters:
    """The whole model, embedding and head included, modules that predict further ahead left out."""
    total = Parameters(model.dim * model.vocab * (1 if model.tied else 2))
    for layer in model.layers:
        total = total + layer_parameters(layer, model.dim)
    return total
