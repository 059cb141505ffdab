"""What moefold's own model saves for the backward, tensor by tensor.

A test runs the model with saved-tensor hooks and finds these bytes. Norms save their input and one number per row;
their output is saved as the next matmul's input. Attention saves what the fused kernel reads and returns; with sinks
the context is cut from a padded output. An activation saves
both halves of its input and its output; where the token's prob multiplies it, the product alone.

`step` is the step of `memory.retain` with which a row is discarded or offloaded. Only latent attention has a step
for queries, keys and values. A row that a collective gave can only be offloaded (`received`). `narrow` are the
elements of it that a narrow matmul keeps in its own format where the step is quantized.

A recomputed phase saves its input alone. What dispatch received passes between phases, so it stays: rows, or tokens
where those come once per rank and become rows there.
"""

from __future__ import annotations

from moefold.config.memory import Recomputed
from moefold.plan.memory.saved_activations import Saved, Sizes


def _drops(*kinds: Recomputed) -> frozenset[Recomputed]:
    return frozenset(kinds)


_ATTENTION, _FEED, _EXPERTS = _drops("attention"), _drops("feed_forward"), _drops("experts")


def _is_latent(s: Sizes) -> bool:
    return s.kv_latent > 0


def _latents(s: Sizes) -> int:
    return s.q_latent + s.kv_latent


def _rows(s: Sizes) -> int:
    return s.top_k * s.travel


def _hidden(s: Sizes) -> int:
    return s.hidden


def _hidden_rows(s: Sizes) -> int:
    return s.top_k * s.hidden


def _is_cut(s: Sizes) -> bool:
    """Whether the context is a slice of a padded output."""
    return s.sinks > 0


def _sink_entries(s: Sizes) -> int:
    """A sink is one more entry of queries, keys, values and outputs."""
    return s.sinks * (2 * s.heads + 2 * (s.heads * s.key // max(1, s.query)))


MOEFOLD: tuple[Saved, ...] = (
    # ---- attention ----
    Saved("attention", "phase input", lambda s: s.D, needs="attention again"),
    Saved("attention", "input", lambda s: s.D, dropped=_ATTENTION),
    Saved(
        "attention",
        "inverse RMS of the input",
        lambda s: 1,
        "single",
        dropped=_ATTENTION,
        step="attention_norm",
        discard_only=True,
    ),
    Saved(
        "attention",
        "normed input",
        lambda s: s.D * (not _is_latent(s)),
        cut="whole",
        dropped=_ATTENTION,
        step="attention_norm",
        received="tensor_parallel",
        narrow=lambda s: s.D * (not _is_latent(s)),
    ),
    Saved(
        "attention",
        "normed input, for latents",
        lambda s: s.D * _is_latent(s),
        dropped=_ATTENTION,
        step="attention_norm",
        narrow=lambda s: s.D * _is_latent(s),
    ),
    Saved("attention", "latents", lambda s: _latents(s) + s.rope * _is_latent(s), dropped=_ATTENTION),
    Saved(
        "attention",
        "inverse RMS of latents",
        lambda s: 2 * _is_latent(s),
        "single",
        dropped=_ATTENTION,
        step="latent_norm",
        discard_only=True,
    ),
    Saved(
        "attention",
        "normed latents",
        lambda s: _latents(s) + s.rope * _is_latent(s),
        cut="whole",
        dropped=_ATTENTION,
        step="latent_norm",
        received="tensor_parallel",
        # The entries that carry positions are not an input of a matmul.
        narrow=_latents,
    ),
    Saved(
        "attention",
        "heads before their norms",
        lambda s: (s.query + s.key) * (s.normed > 0),
        cut="heads",
        dropped=_ATTENTION,
    ),
    Saved("attention", "inverse RMS of heads", lambda s: s.normed, "single", "heads", _ATTENTION),
    Saved("attention", "angles", lambda s: s.rotated, "single", "whole", _ATTENTION, step="mla_up"),
    Saved("attention", "queries", lambda s: s.query, cut="heads", dropped=_ATTENTION, step="mla_up"),
    Saved("attention", "keys", lambda s: s.key, cut="heads", dropped=_ATTENTION, step="mla_up"),
    Saved("attention", "values", lambda s: s.value, cut="heads", dropped=_ATTENTION, step="mla_up"),
    Saved(
        "attention",
        "output of the kernel",
        lambda s: s.context,
        cut="heads",
        dropped=_ATTENTION,
        step="core",
        received="context_parallel",
    ),
    Saved(
        "attention",
        "context",
        lambda s: s.context * _is_cut(s),
        cut="heads",
        dropped=_ATTENTION,
        step="core",
        received="context_parallel",
    ),
    Saved(
        "attention",
        "entries of sinks",
        _sink_entries,
        cut="heads",
        dropped=_ATTENTION,
        step="core",
        received="context_parallel",
    ),
    # The last matmul's input: the kernel keeps its output, and the chunks are another copy of it.
    Saved(
        "attention",
        "context in chunks",
        lambda s: s.context * (not _is_cut(s) and not s.gate),
        cut="heads",
        dropped=_ATTENTION,
        needs="tensor chunks",
    ),
    Saved("attention", "mask", lambda s: s.masked, cut="whole", dropped=_ATTENTION),
    Saved(
        "attention",
        "log-sum-exp",
        lambda s: s.heads,
        "single",
        "heads",
        _ATTENTION,
        step="core",
        received="context_parallel",
    ),
    # ---- gates of attention ----
    Saved("attention", "gate of the output", lambda s: s.gate, cut="heads", dropped=_ATTENTION),
    Saved("attention", "gated output", lambda s: s.gate, cut="heads", dropped=_ATTENTION),
    # ---- linear attention: everything between these is made again in its backward ----
    Saved("recurrence", "phase input", lambda s: s.D, needs="attention again"),
    Saved("recurrence", "input", lambda s: s.D, dropped=_ATTENTION),
    Saved(
        "recurrence",
        "inverse RMS of the input",
        lambda s: 1,
        "single",
        dropped=_ATTENTION,
        step="attention_norm",
        discard_only=True,
    ),
    Saved(
        "recurrence",
        "normed input",
        lambda s: s.D,
        cut="whole",
        dropped=_ATTENTION,
        step="attention_norm",
        received="tensor_parallel",
        narrow=lambda s: s.D,
    ),
    Saved("recurrence", "queries, keys and values", lambda s: s.channels, cut="heads", dropped=_ATTENTION),
    Saved("recurrence", "step sizes and decays", lambda s: 2 * s.heads, cut="heads", dropped=_ATTENTION),
    Saved("recurrence", "gate of the output", lambda s: s.inner, cut="heads", dropped=_ATTENTION),
    Saved("recurrence", "output of the rule", lambda s: s.inner, cut="heads", dropped=_ATTENTION, step="core"),
    Saved("recurrence", "gated output", lambda s: s.inner, cut="heads", dropped=_ATTENTION),
    # ---- dense ----
    Saved("dense", "phase input", lambda s: s.D, needs="feed_forward again"),
    Saved("dense", "input", lambda s: s.D, dropped=_FEED),
    Saved(
        "dense", "inverse RMS of the input", lambda s: 1, "single", dropped=_FEED, step="feed_norm", discard_only=True
    ),
    Saved(
        "dense",
        "normed input",
        lambda s: s.D,
        cut="whole",
        dropped=_FEED,
        step="feed_norm",
        received="tensor_parallel",
        narrow=lambda s: s.D,
    ),
    Saved("dense", "before activation", lambda s: s.up, cut="heads", dropped=_FEED, step="dense"),
    Saved("dense", "after activation", _hidden, cut="heads", dropped=_FEED, step="dense", narrow=_hidden),
    # ---- MoE layer: routing and dispatch ----
    Saved("moe", "input", lambda s: s.D),
    Saved("moe", "inverse RMS of the input", lambda s: 1, "single", step="feed_norm", discard_only=True),
    # The router, the shared expert and a phase that is recomputed keep the same tensor.
    Saved("moe", "normed input", lambda s: s.D, step="feed_norm"),
    # Scores, probabilities and the coefficients of balance losses; probs and numbers of the top-k experts.
    Saved("moe", "routing", lambda s: 2 * s.experts + 2 * s.top_k + 2, "single"),
    Saved("moe", "top-k experts", lambda s: 8 * s.top_k, "byte"),
    Saved("moe", "row map at the source", lambda s: 16 * s.top_k, "byte", needs="all_to_all"),
    Saved("moe", "row map", lambda s: 16 * s.top_k, "byte", "rows", _EXPERTS),
    Saved("moe", "in the latent dim", lambda s: s.travel * (s.travel != s.D)),
    # Recomputation gathers them again from this rank's tokens.
    Saved("moe", "rows", _rows, cut="rows", dropped=_EXPERTS, lacks="all_to_all", step="rows", narrow=_rows),
    Saved(
        "moe",
        "received rows",
        _rows,
        cut="rows",
        needs="all_to_all",
        step="rows",
        received="all_to_all",
        narrow=_rows,
    ),
    Saved("moe", "received tokens", lambda s: s.received * s.travel, cut="rows", needs="experts again"),
    # ---- MoE layer: experts ----
    Saved(
        "moe",
        "normed input of all ranks, for the shared expert",
        lambda s: s.D * (s.shared > 0),
        cut="whole",
        dropped=_EXPERTS,
        needs="tensor_parallel",
        step="feed_norm",
        received="tensor_parallel",
    ),
    Saved("moe", "shared, before activation", lambda s: s.shared_up, cut="heads", dropped=_EXPERTS, step="shared"),
    Saved(
        "moe",
        "shared, after activation",
        lambda s: s.shared,
        cut="heads",
        dropped=_EXPERTS,
        step="shared",
        narrow=lambda s: s.shared,
    ),
    Saved("moe", "shared, before its gate", lambda s: s.D * s.shared_gate, dropped=_EXPERTS),
    Saved("moe", "before activation", lambda s: s.top_k * s.up, cut="columns", dropped=_EXPERTS, step="gate_up"),
    Saved(
        "moe", "after activation", _hidden_rows, cut="columns", dropped=_EXPERTS, step="activation", narrow=_hidden_rows
    ),
    Saved(
        "moe",
        "what probs multiply outside the activation",
        lambda s: s.top_k * s.travel,
        cut="rows",
        dropped=_EXPERTS,
        lacks="weighted_inside",
    ),
    Saved("moe", "biases of rows", lambda s: s.top_k * s.biased, cut="rows", dropped=_EXPERTS),
)
