"""Activations of one layer under a workload's settings: what is kept, what recomputation drops, what backward needs.

All figures are bytes per token of a microbatch after context parallelism cut the tokens; tensor and expert parallelism
are inside. Results are kept per kind of layer and setting, so that a search pays for them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from moefold.blueprint.model_shape import Attention, Layer
from moefold.config.memory import RetainedStep
from moefold.plan.memory.saved_activations import (
    Kept,
    Part,
    Saved,
    Setting,
    Sizes,
    narrow_saving,
    parts_of,
    row_bytes,
    sizes_of,
)
from moefold.plan.memory.saved_megatron import FSDP2, MEGATRON
from moefold.plan.memory.saved_moefold import MOEFOLD
from moefold.plan.traffic import distinct

# Steps that are there, recomputed, at the fullest moment of a feed-forward's backward. Of an MoE layer these are the
# experts' own: the shared expert and the norm come after them.
FEED_STEPS: Mapping[Part, frozenset[RetainedStep]] = {
    "attention": frozenset(),
    "recurrence": frozenset(),
    "dense": frozenset({"dense", "feed_norm"}),
    "moe": frozenset({"rows", "gate_up", "activation"}),
}
MIXERS: frozenset[Part] = frozenset({"attention", "recurrence"})
# Of an MoE layer, what its experts save: after the dispatch.
EXPERT_STEPS: frozenset[RetainedStep] = frozenset({"shared", "gate_up", "activation"})

TABLES: Mapping[str, tuple[Saved, ...]] = {
    "megatron": MEGATRON,
    "deepspeed": MEGATRON,
    "fsdp2": FSDP2,
    "jax": FSDP2,
    "moefold": MOEFOLD,
}


@lru_cache(maxsize=100_000)
def kept_by(layer: Layer, dim: int, setting: Setting) -> Kept:
    """What one layer keeps of one token."""
    sizes = sizes_of(layer, dim, setting.length, setting.sequences)
    if setting.ep > 1 and sizes.experts:
        copies = setting.ep if "all_gather" in setting.on else distinct(setting.ep, sizes.top_k)
        sizes = replace(sizes, received=copies)
    kept: dict[str, float] = {}
    saved: dict[str, float] = {}
    again = {"attention": 0.0, "feed": 0.0}
    away: dict[tuple[Part, RetainedStep | None], float] = {}
    kept_feed = kept_experts = read_last = 0.0
    for row in rows_of(layer, setting.framework):
        size = row_bytes(row, sizes, setting)
        name = f"{row.part}: {row.name}"
        if is_dropped(row, layer, setting):
            saved[name] = size
            if row.part in MIXERS:
                again["attention"] += size
            elif row.step in FEED_STEPS[row.part] or row.dropped & setting.recompute:
                again["feed"] += size
        elif is_offloaded(row, layer, setting):
            saved[name] = size
            away[row.part, row.step] = away.get((row.part, row.step), 0.0) + size
        else:
            if row.step in setting.paged:
                # Read back into a buffer of the worst case when its layer goes backward; its pages stay in the pool.
                again["feed"] += size
                read_last += size * (row.step == "rows")
                size *= setting.page_bound / setting.imbalance
            kept[name] = size
            kept_feed += size * (row.part in ("dense", "moe"))
            kept_experts += size * (row.step in EXPERT_STEPS)
    deferred = _deferred(sizes, setting)
    narrower = sum(narrow_saving(row, sizes, setting) for row in rows_of(layer, setting.framework))
    read = {step for (part, step), size in away.items() if part not in MIXERS and size}
    return Kept(
        kept=tuple(kept.items()),
        total=sum(kept.values()) * (1 - setting.offloaded_share),
        again=sum(saved.values()),
        backward=_backward(sizes, setting),
        away=sum(away.values()),
        saved=tuple(saved.items()),
        again_attention=again["attention"],
        again_feed=again["feed"],
        kept_feed=kept_feed,
        kept_experts=kept_experts,
        backward_attention=_backward_attention(sizes, setting),
        away_attention=sum(size for (part, _), size in away.items() if part in MIXERS),
        read_at_activation=bool(read & {"activation", "gate_up", "dense"}),
        read_at_first_matrix=bool(read - {"feed_norm", "shared"}),
        read_last=read_last,
        deferred=deferred - narrower if setting.framework == "moefold" else sum(kept.values()),
    )


@lru_cache(maxsize=10_000)
def rows_of(layer: Layer, framework: str) -> tuple[Saved, ...]:
    """The rows of a layer's parts, its input first."""
    parts = parts_of(layer)
    return tuple(row for part in parts for row in TABLES[framework] if row.part == part)


def is_dropped(row: Saved, layer: Layer, setting: Setting) -> bool:
    if "full" in setting.recompute:
        return row is not rows_of(layer, setting.framework)[0]
    if row.dropped & setting.recompute:
        return True
    given = row.received and row.received in setting.on
    return row.step in setting.discarded and not given and _has_step(row, layer)


def is_offloaded(row: Saved, layer: Layer, setting: Setting) -> bool:
    return row.offload in setting.offloaded or (row.step in setting.offloaded and _has_step(row, layer))


def _has_step(row: Saved, layer: Layer) -> bool:
    """Queries, keys and values are a step of latent attention alone."""
    return row.step != "mla_up" or (isinstance(layer.mixer, Attention) and layer.mixer.is_latent)


def _backward(sizes: Sizes, setting: Setting) -> float:
    """Gradients that are alive together in the widest part: of what entered, of what was inside, of what came out."""
    tokens = 1.0 if "sequence_parallel" not in setting.on else 1 / setting.tp
    if sizes.experts:
        rows = tokens * setting.imbalance * sizes.top_k
        feed = rows * (2 * sizes.travel * setting.etp + sizes.up + sizes.hidden)
    else:
        feed = (sizes.up + sizes.hidden) / setting.tp + sizes.D * tokens
    return max(_backward_attention(sizes, setting), setting.word * feed)


def _backward_attention(sizes: Sizes, setting: Setting) -> float:
    tokens = 1.0 if "sequence_parallel" not in setting.on else 1 / setting.tp
    if sizes.channels:
        return _backward_rule(sizes) / setting.tp + setting.word * sizes.D * tokens
    attention = (sizes.query + sizes.key + sizes.value + sizes.context) / setting.tp + sizes.D * tokens
    if "flash" not in setting.on:
        # Of probabilities and of scores.
        attention += 2 * sizes.heads * sizes.length / setting.tp
    return setting.word * attention


def _backward_rule(s: Sizes) -> float:
    """What the gated delta rule makes again in its backward, and the gradients beside it, in float32.

    A few dozen tensors; the numbers of each size were fitted to the peaks of twelve layers of all proportions, and are
    within 2 % of them (`tests/body/test_plan_saved.py` holds one).
    """
    return 4.0 * (24.4 * s.key + 11.7 * s.inner + 8.1 * s.scores + 4.3 * s.query + 1.7 * s.states)


def _deferred(s: Sizes, setting: Setting) -> float:
    """Both operands of every weight gradient of a layer; what was discarded or offloaded is back for them."""
    tp = setting.tp
    tokens = 1.0 if "sequence_parallel" not in setting.on else 1 / tp
    elements = 0.0
    if s.channels:
        elements += s.D * (1 + tokens) + (s.projected + 2 * s.heads + s.inner) / tp
    elif s.query:
        # In front of a latent's matrices tokens are whole; values and keys without the rotated part come out of one.
        latents = s.q_latent + s.kv_latent
        heads = s.query + s.key + s.value - s.heads * s.rope
        elements += s.D * (tokens if latents else 1.0) + latents * (1 + tokens) + s.rope * tokens
        elements += (heads + s.context) / tp + s.D * tokens
    if s.experts:
        rows = tokens * setting.imbalance * s.top_k
        elements += rows * (2 * s.travel * setting.etp + s.up + s.hidden)
        elements += s.D * 2 * tokens * (s.shared > 0) + (s.shared_up + s.shared) / tp
    elif s.up:
        elements += (s.up + s.hidden) / tp + s.D * (1 + tokens)
    return elements * setting.word
