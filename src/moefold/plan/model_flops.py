"""FLOPs that a model of any shape needs per token, in the convention of published runs.

The same convention as `plan/flops.py`, which knows moefold's own models to the digit and is held to torch's counter; a
test holds the two to each other. Three times the forward pass, causal attention as half of the square, the head once
more per module that predicts further ahead; not the router, not what is computed twice.
"""

from __future__ import annotations

from functools import lru_cache

from moefold.plan.shape import Attention, Dense, Layer, Mixture, ModelShape, Recurrence


@lru_cache(maxsize=4096)
def model_flops_per_token(model: ModelShape, seq_len: int) -> float:
    """Forward and backward, per token of a sequence of this length."""
    layers = sum(_layer(layer, model.dim, seq_len) for layer in model.layers)
    ahead = model.mtp * (_layer(model.layers[-1], model.dim, seq_len) + 2.0 * 2 * model.dim**2)
    head = (1 + model.mtp) * 2.0 * model.dim * model.vocab
    return 3 * (layers + ahead + head)


@lru_cache(maxsize=4096)
def _layer(layer: Layer, dim: int, seq_len: int) -> float:
    return _mixer(layer.mixer, dim, seq_len) + _feed(layer.feed, dim)


def _mixer(mixer: Attention | Recurrence | None, D: int, seq_len: int) -> float:
    if isinstance(mixer, Recurrence):
        inner = mixer.heads * mixer.head_dim
        projections = D * (2 * inner + 2 * mixer.groups * mixer.state + mixer.heads) + inner * D
        return 2.0 * projections + 2.0 * inner * 2 * mixer.state
    if mixer is None:
        return 0.0
    a = mixer
    query = a.heads * a.qk_dim
    queries = D * a.q_latent + a.q_latent * query if a.q_latent else D * query
    if a.is_latent:
        keys = D * (a.kv_latent + a.rope_dim) + a.kv_latent * a.heads * (a.qk_dim - a.rope_dim + a.v_dim)
    else:
        keys = D * a.kv_heads * (a.qk_dim + a.v_dim)
    reach = min(a.window, seq_len) if a.window else seq_len
    seen = reach - reach**2 / (2 * seq_len)
    return 2.0 * (queries + keys + a.heads * a.v_dim * D) + 2.0 * a.heads * (a.qk_dim + a.v_dim) * seen


def _feed(feed: Dense | Mixture | None, D: int) -> float:
    if feed is None:
        return 0.0
    matrices = 3 if feed.gated else 2
    if isinstance(feed, Dense):
        return 2.0 * matrices * D * feed.dim
    routed = feed.top_k * matrices * (feed.latent or D) * feed.dim
    return 2.0 * (routed + matrices * D * feed.shared_hidden_dim + 2 * D * feed.latent)
