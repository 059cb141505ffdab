"""What torchtitan's operator-wise recomputation (`SelectiveAC`) runs again.

Its policy sees one operator after the other. What attention gives, sums over tensor-parallel ranks, exchanges of
tokens and the first, third, ... plain matmul of a block are kept; every second matmul, grouped matmuls of experts,
gathers of tokens and all elementwise work run once more before the backward. A matmul in a format of its own (NVFP4) is
not on the list, so all of those are repeated. The last matmul's result is only added to the hidden state, which
no gradient needs.

    Llama      q  [k]  v  [out]  gate  [up]  down
    DeepSeek   q_down  [q_up]  kv_down  [kv_up]  out  [gate]  up  down
"""

from __future__ import annotations

from functools import lru_cache

from moefold.blueprint.model_shape import Attention, Dense, Layer, MoE

# Elementwise work, sorting, and matmuls that no list names, whole.
_WHOLE = ("norms", "activation", "shared_activation", "dense_activation", "router", "permutation", "experts", "biases")


@lru_cache(maxsize=10_000)
def operator_shares(layer: Layer, dim: int, *, all_matmuls: bool) -> dict[str, float]:
    """Of each part (`op_costs.parts_of`), the share that runs again."""
    repeated: dict[str, float] = {}
    whole: dict[str, float] = {}
    matmuls = _plain_matmuls(layer, dim)
    for number, (part, size) in enumerate(matmuls, 1):
        whole[part] = whole.get(part, 0.0) + size
        if number < len(matmuls) and (all_matmuls or number % 2 == 0):
            repeated[part] = repeated.get(part, 0.0) + size
    return dict.fromkeys(_WHOLE, 1.0) | {part: size / whole[part] for part, size in repeated.items()}


def _plain_matmuls(layer: Layer, dim: int) -> list[tuple[str, float]]:
    """In the order in which a block calls them: the part to which each belongs, and its size against the part's others.
    Recurrences are no model of torchtitan's; a router's matmul is repeated by name and not counted."""
    a, found = layer.mixer, list[tuple[str, float]]()
    if isinstance(a, Attention) and a.is_latent:
        found += [("latents", dim * a.q_latent)] if a.q_latent else []
        found.append(("mla_up", (a.q_latent or dim) * a.heads * a.qk_dim))
        found.append(("latents", dim * (a.kv_latent + a.rope_dim)))
        found.append(("mla_up", a.kv_latent * a.heads * (a.qk_dim - a.rope_dim + a.v_dim)))
    elif isinstance(a, Attention):
        found += [("qkv", a.heads * a.qk_dim), ("qkv", a.kv_heads * a.qk_dim), ("qkv", a.kv_heads * a.v_dim)]
    if isinstance(a, Attention):
        found.append(("attention_out", 1.0))
    feed = layer.feed
    part = "feed_forward" if isinstance(feed, Dense) else "shared"
    if isinstance(feed, Dense) or (isinstance(feed, MoE) and feed.shared_hidden_dim):
        found += [(part, 1.0)] * (2 + feed.gated)
    return found
