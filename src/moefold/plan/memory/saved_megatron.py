"""What Megatron Core with Transformer Engine keeps, tensor by tensor; and how other frameworks differ.

Norms are fused with the matrix after them and keep both their input and their output. Flash attention keeps queries,
keys, values, its output and one number per head. An activation keeps its input; the matrix after it keeps the
activation's output as its operand. In FP8 each matrix keeps its own narrow copy of its input: two matrices that share
an input keep two, and an input that something else also needs as a word is kept in both forms.

The rows are held against the Megatron Core report: 15 live microbatches of 4 layers of DeepSeek-V3 are 131.0 GiB.
"""

from __future__ import annotations

from moefold.config.memory import Recomputed
from moefold.plan.memory.saved_activations import Saved


def _drops(*kinds: Recomputed) -> frozenset[Recomputed]:
    return frozenset(kinds)


_BLOCK = _drops("attention")
_NORM = _drops("attention", "norms")
_UP = _drops("attention", "mla_up")
_MLP = _drops("feed_forward")
_MOE = _drops("experts")
_ACTIVATION = _drops("experts", "activation")

ATTENTION = (
    Saved("attention", "layer input", lambda s: s.D, offload="attn_norm"),
    Saved("attention", "normed input", lambda s: s.D, "operand", dropped=_NORM, offload="qkv_linear"),
    # MLA projects the normed input down twice, so two matrices keep it.
    Saved("attention", "normed input, again", lambda s: s.D * (s.kv_latent > 0), "copy", dropped=_NORM),
    Saved("attention", "latents", lambda s: s.q_latent + s.kv_latent + s.rope * (s.kv_latent > 0), dropped=_BLOCK),
    Saved("attention", "normed latents", lambda s: s.q_latent + s.kv_latent, "operand", dropped=_UP),
    Saved("attention", "queries", lambda s: s.query, cut="heads", dropped=_UP, offload="core_attn"),
    Saved("attention", "keys", lambda s: s.key, cut="heads", dropped=_UP, offload="core_attn"),
    Saved("attention", "values", lambda s: s.value, cut="heads", dropped=_UP, offload="core_attn"),
    Saved("attention", "context", lambda s: s.context, cut="heads", dropped=_BLOCK, offload="attn_proj"),
    Saved("attention", "context as operand", lambda s: s.context, "copy", "heads", _BLOCK, "attn_proj"),
    # With an all-to-all over heads, ranks save the context before and after it.
    Saved("attention", "context sent", lambda s: s.context, cut="heads", dropped=_BLOCK, needs="context_parallel"),
    Saved("attention", "log of sums", lambda s: s.heads, "single", "heads", _drops("attention", "core_attention")),
    Saved(
        "attention",
        "scores",
        lambda s: s.heads * s.length,
        cut="heads",
        dropped=_drops("attention", "core_attention"),
        offload="core_attn",
        lacks="flash",
    ),
    Saved("attention", "dropout mask", lambda s: s.D, "byte", needs="dropout"),
)
RECURRENCE = (
    Saved("recurrence", "layer input", lambda s: s.D, offload="attn_norm"),
    Saved("recurrence", "normed input", lambda s: s.D, "operand", dropped=_drops("norms")),
    Saved("recurrence", "projections", lambda s: s.projected, cut="heads"),
    Saved("recurrence", "scanned", lambda s: s.inner, cut="heads"),
    Saved("recurrence", "gated", lambda s: s.inner, "operand", cut="heads"),
    Saved("recurrence", "states", lambda s: s.states, "single", "heads"),
)
DENSE = (
    Saved("dense", "input", lambda s: s.D, offload="mlp_norm"),
    Saved("dense", "normed input", lambda s: s.D, "operand", dropped=_drops("feed_forward", "norms")),
    Saved("dense", "before activation", lambda s: s.up, cut="heads", dropped=_MLP),
    Saved("dense", "after activation", lambda s: s.hidden, "operand", "heads", dropped=_MLP),
    Saved("dense", "dropout mask", lambda s: s.D, "byte", needs="dropout"),
)
MOE = (
    Saved("moe", "input", lambda s: s.D, offload="mlp_norm"),
    # The router reads words; the shared expert's matrix keeps its own operand.
    Saved("moe", "normed input", lambda s: s.D, dropped=_drops("norms")),
    Saved("moe", "normed input, again", lambda s: s.D * (s.shared > 0), "copy", dropped=_drops("experts", "norms")),
    # Logits, probabilities, and the routing map.
    Saved("moe", "routing", lambda s: 2 * s.experts + s.top_k, "single", dropped=_MOE),
    Saved("moe", "routing map", lambda s: s.experts, "byte", dropped=_MOE),
    Saved("moe", "shared, before activation", lambda s: s.shared_up, cut="heads", dropped=_MOE),
    Saved("moe", "shared, after activation", lambda s: s.shared, "operand", "heads", dropped=_MOE),
    Saved("moe", "in the latent dim", lambda s: s.travel * (s.travel != s.D), dropped=_MOE),
    Saved("moe", "rows", lambda s: s.top_k * s.travel, "operand", "rows", _MOE, "expert_fc1"),
    Saved("moe", "before activation", lambda s: s.top_k * s.up, "word", "columns", _MOE, "moe_act"),
    Saved("moe", "after activation", lambda s: s.top_k * s.hidden, "operand", "columns", _ACTIVATION),
    Saved("moe", "expert outputs", lambda s: s.top_k * s.travel, "word", "rows", _MOE, lacks="weighted_inside"),
    Saved("moe", "dropout mask", lambda s: s.D, "byte", needs="dropout"),
)
MEGATRON: tuple[Saved, ...] = ATTENTION + RECURRENCE + DENSE + MOE


# ---- PyTorch with FSDP2, and other frameworks that call operators one by one ----

# The operator-wise choice ("norms" and "activation" together) keeps every second matmul and attention's output.
_OPERATORS = _drops("activation")
_DROPPED_MLP = _drops("feed_forward", "activation")
_DROPPED_MOE = _drops("experts", "activation")
FSDP2: tuple[Saved, ...] = (
    Saved("attention", "layer input", lambda s: s.D),
    Saved("attention", "normed input", lambda s: s.D, dropped=_NORM),
    Saved("attention", "latents", lambda s: s.q_latent + s.kv_latent + s.rope * (s.kv_latent > 0), dropped=_BLOCK),
    Saved("attention", "normed latents", lambda s: s.q_latent + s.kv_latent, dropped=_NORM),
    # A matmul of its own kind is not on the list of what is kept.
    Saved("attention", "queries", lambda s: s.query, cut="heads", dropped=_BLOCK, lacks="own_products"),
    Saved("attention", "keys", lambda s: s.key, cut="heads", dropped=_drops("attention", "activation")),
    Saved("attention", "values", lambda s: s.value, cut="heads", dropped=_BLOCK, lacks="own_products"),
    Saved("attention", "context", lambda s: s.context, cut="heads", dropped=_BLOCK),
    Saved("attention", "log of sums", lambda s: s.heads, "single", "heads", _BLOCK),
    *RECURRENCE,
    Saved("dense", "input", lambda s: s.D, dropped=_drops("norms")),
    Saved("dense", "normed input", lambda s: s.D, dropped=_drops("feed_forward", "norms")),
    Saved("dense", "gate", lambda s: s.up - s.hidden, cut="heads", dropped=_MLP, lacks="own_products"),
    Saved("dense", "up", lambda s: s.hidden, cut="heads", dropped=_DROPPED_MLP),
    Saved("dense", "after activation", lambda s: s.hidden, cut="heads", dropped=_DROPPED_MLP),
    Saved("moe", "input", lambda s: s.D, dropped=_drops("norms")),
    Saved("moe", "normed input", lambda s: s.D, dropped=_drops("norms")),
    Saved("moe", "routing", lambda s: 2 * s.experts + s.top_k, "single", dropped=_MOE),
    Saved("moe", "shared, before activation", lambda s: s.shared_up, cut="heads", dropped=_MOE),
    Saved("moe", "shared, after activation", lambda s: s.shared, cut="heads", dropped=_DROPPED_MOE),
    Saved("moe", "rows", lambda s: s.top_k * s.travel, cut="rows", dropped=_DROPPED_MOE),
    Saved("moe", "before activation", lambda s: s.top_k * s.up, cut="columns", dropped=_DROPPED_MOE),
    Saved("moe", "after activation", lambda s: s.top_k * s.hidden, cut="columns", dropped=_DROPPED_MOE),
    Saved(
        "moe", "expert outputs", lambda s: s.top_k * s.travel, cut="rows", dropped=_DROPPED_MOE, lacks="weighted_inside"
    ),
)
