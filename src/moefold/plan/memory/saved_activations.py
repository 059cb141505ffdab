"""What a layer keeps between its forward and its backward, as data: one row per tensor.

A row says what the tensor is, how many elements a token has of it, in which format it is held, over which ranks it is
cut, which kinds of recomputation drop it, and which name an offload knows it by. `saved_megatron.py` and its
neighbours have the rows of each framework; this file adds them up for a layer under a workload's settings.

    kind       bytes of an element
    word       2 (4 in float32): the tensor as it is computed
    operand    as a matmul reads it: a word, or one byte and a share of a scale in FP8, half a byte in FP4
    copy       an operand whose word is kept anyway, so it costs nothing unless the format is narrow
    single     4
    byte       1

    cut        who has it
    tokens     every tensor-parallel rank has its share of the tokens (all of them without sequence parallelism)
    whole      every tensor-parallel rank has all tokens
    heads      every tensor-parallel rank has its heads or columns, for all tokens
    rows       rows that were routed to the rank's experts; expert-tensor ranks all have them
    columns    the same rows, and expert-tensor ranks share their dim
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from moefold.blueprint.model_shape import Attention, DeltaNet, Dense, Layer, MoE, Recurrence
from moefold.blueprint.narrow_bytes import saved_bytes
from moefold.config.memory import Recomputed, RetainedStep
from moefold.plan.workload import Workload

Kind = Literal["word", "operand", "copy", "single", "byte"]
Cut = Literal["tokens", "whole", "heads", "rows", "columns"]
Part = Literal["attention", "recurrence", "dense", "moe"]


@dataclass(frozen=True)
class Sizes:
    """Elements per token of everything that a row may be made of; 0 where a layer has none of it."""

    D: int
    length: int
    heads: int = 0
    query: int = 0
    key: int = 0
    value: int = 0
    context: int = 0
    q_latent: int = 0
    kv_latent: int = 0
    rope: int = 0
    # What RoPE rotates, which heads have norms, which have a sink, and whose scores need a mask.
    rotated: int = 0
    normed: int = 0
    sinks: int = 0
    masked: float = 0.0
    # What enters an activation (both halves of a gated one) and what leaves it.
    up: int = 0
    hidden: int = 0
    shared_up: int = 0
    shared: int = 0
    experts: int = 0
    top_k: int = 0
    # Dim in which tokens travel to experts; the same if experts have biases; the hidden dim if the activation clamps.
    travel: int = 0
    biased: int = 0
    # Tokens that a rank gets of others and keeps, per token of its own.
    received: float = 0.0
    # A gate on attention's output, and on the shared expert's: its columns, and whether there is one.
    gate: int = 0
    shared_gate: int = 0
    # What a recurrence projects its input to, what its convolution reads, its inner dim, and the state between blocks.
    projected: int = 0
    channels: int = 0
    inner: int = 0
    states: float = 0.0
    # Pairs of a token with those of its chunk, of all heads.
    scores: int = 0


@dataclass(frozen=True)
class Saved:
    """One tensor that a framework keeps for the backward."""

    part: Part
    name: str
    elements: Callable[[Sizes], float]
    kind: Kind = "word"
    cut: Cut = "tokens"
    # Any of these drops it; whole layers ("full") drop all but the layer's input.
    dropped: frozenset[Recomputed] = frozenset()
    offload: str = ""
    # It exists only with, or only without, this setting.
    needs: str = ""
    lacks: str = ""
    # Our own framework: the step of a block (`memory.retain`) that it belongs to; None: always kept.
    step: RetainedStep | None = None
    # With this setting it is what a collective gave: it can be offloaded and not discarded.
    received: str = ""
    # Too small to be offloaded: it falls only where the step is discarded.
    discard_only: bool = False
    # Elements that narrow matmuls keep of it where the step is quantized; None: it stays as it is.
    narrow: Callable[[Sizes], float] | None = None


@dataclass(frozen=True)
class Setting:
    """All of a workload that decides what a layer keeps."""

    framework: str
    # Bytes of an element as it is computed, and as a matmul's input waits for its weight gradient.
    word: float
    operand: float
    tp: int
    etp: int
    recompute: frozenset[Recomputed]
    offloaded: frozenset[str]
    length: int
    # Of a microbatch, where a framework shares something between them.
    sequences: int
    imbalance: float
    # Share of the layers whose activations all wait in the host's memory.
    offloaded_share: float
    # Names of what is on: see `setting_of`.
    on: frozenset[str]
    # Our own framework: steps of `memory.retain` that are recomputed; those that wait in the host's memory are among
    # `offloaded`.
    discarded: frozenset[RetainedStep] = frozenset()
    # Steps whose outputs are kept as weight gradients read them (`operand`).
    quantized: frozenset[RetainedStep] = frozenset()
    # Steps of which the rows that are there are kept in pages, and for how many times an even routing.
    paged: frozenset[RetainedStep] = frozenset()
    page_bound: float = 1.0
    # Ranks of experts, where tokens come once per rank and their rows are recomputed; else 1.
    ep: int = 1

    def __hash__(self) -> int:
        # A key of caches that a search asks a hundred thousand times.
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Kept:
    """Bytes per token of a microbatch, before context parallelism cuts the tokens."""

    # What stays until the backward, by part and name.
    kept: tuple[tuple[str, float], ...]
    total: float
    # What was dropped or sent away and is back while the layer's own backward runs.
    again: float
    # Gradients of the widest part, alive at the same time.
    backward: float
    # Of what is away, what waits in the host's memory.
    away: float
    # What recomputation and offloading save, by name of the tensor.
    saved: tuple[tuple[str, float], ...]
    # Of what is recomputed, what is there when attention goes backward and what at the feed-forward's fullest moment;
    # what the latter keeps, and of this what the experts of an MoE layer keep; attention's gradients.
    again_attention: float = 0.0
    again_feed: float = 0.0
    kept_feed: float = 0.0
    kept_experts: float = 0.0
    backward_attention: float = 0.0
    # Of `away`, what is attention's. A layer comes back as a whole, and its first tensor that is read asks for the next
    # layer: whether one was read when the feed-forward's activation goes backward, and when its first matrix does.
    away_attention: float = 0.0
    read_at_activation: bool = False
    read_at_first_matrix: bool = False
    # Of `again_feed`, rows that are read from their pages by the first matrix, and not before.
    read_last: float = 0.0
    # What deferred weight gradients hold: inputs of matmuls and gradients of their outputs.
    deferred: float = 0.0


def setting_of(workload: Workload) -> Setting:
    """The same for all layers of a workload."""
    parallel, framework = workload.parallel, workload.framework
    on = []
    if framework.attention != "unfused":
        on.append("flash")
    if workload.weighted_inside:
        on.append("weighted_inside")
    if framework.dropout:
        on.append("dropout")
    if framework.sequence_parallel:
        on.append("sequence_parallel")
    if parallel.cp > 1:
        on.append("context_parallel")
    if parallel.tp > 1:
        on.append("tensor_parallel")
        if workload.is_own and "tensor_parallel" in parallel.overlap:
            on.append("tensor chunks")
    if workload.repeated_matmuls == "all":
        on.append("own_products")
    if workload.is_own:
        on += [f"{phase} again" for phase in workload.recompute]
        on.append(workload.dispatcher)
    away = workload.run.memory.offload_layers * parallel.pp / max(1, len(workload.model.layers))
    return _one_of_each(
        Setting(
            framework=framework.name,
            word=workload.word,
            operand=saved_bytes(workload.casts, workload.word),
            tp=parallel.tp,
            etp=parallel.etp,
            recompute=workload.recompute,
            offloaded=frozenset(workload.run.memory.offload) | workload.retained("offload"),
            length=workload.run.data.seq_len,
            sequences=workload.run.data.micro_batch if workload.is_own else 1,
            imbalance=workload.row_buffer * workload.row_padding,
            offloaded_share=min(1.0, away),
            on=frozenset(on),
            discarded=workload.retained("discard"),
            quantized=workload.retained("quantize"),
            paged=workload.retained("page"),
            page_bound=workload.run.memory.page_bound * (1 - workload.run.memory.page_spill),
            ep=parallel.ep if workload.is_own and _comes_once(workload) else 1,
        )
    )


def _comes_once(workload: Workload) -> bool:
    return "experts" in workload.recompute and workload.dispatcher in ("deduplicated", "two_level", "all_gather")


@lru_cache(maxsize=10_000)
def _one_of_each(setting: Setting) -> Setting:
    """Equal ones are one object, which caches find without comparing."""
    return setting


@lru_cache(maxsize=10_000)
def sizes_of(layer: Layer, dim: int, length: int, sequences: int = 1) -> Sizes:
    """The layer's sizes under the names that rows use."""
    found: dict[str, float] = {}
    a, feed = layer.mixer, layer.feed
    if isinstance(a, Attention):
        found |= {
            "heads": a.heads,
            "query": a.heads * a.qk_dim,
            "key": a.kv_heads * a.qk_dim,
            "value": a.kv_heads * a.v_dim,
            "context": a.heads * a.v_dim,
            "q_latent": a.q_latent,
            "kv_latent": a.kv_latent,
            "rope": a.rope_dim,
            "rotated": a.rope_dim or (a.qk_dim if a.rotated is None else a.rotated),
            "normed": (a.qk_norm != "none") * (a.heads + a.kv_heads),
            "sinks": a.sinks,
            "gate": a.heads * a.v_dim * a.output_gate,
            "masked": (length + 1) / sequences if a.sinks and not (a.window or a.chunk) else 0,
        }
    elif isinstance(a, Recurrence):
        inner = a.heads * a.head_dim
        found |= {"inner": inner, "projected": 2 * inner + 2 * a.groups * a.state + a.heads}
        # One state per head and block of 256 tokens.
        found |= {"heads": a.heads, "states": inner * a.state / 256}
    if isinstance(a, DeltaNet):
        found |= {"channels": a.channels, "states": inner * a.state / a.chunk, "projected": a.channels + inner}
        found |= {"scores": a.heads * a.chunk, "key": a.groups * a.state, "query": a.heads * a.state}
    if isinstance(feed, Dense):
        found |= {"up": (1 + feed.gated) * feed.dim, "hidden": feed.dim}
    elif isinstance(feed, MoE):
        found |= {"up": (1 + feed.gated) * feed.dim, "hidden": feed.dim, "experts": feed.experts}
        found |= {"top_k": feed.top_k, "travel": feed.latent or dim, "biased": feed.biased * (feed.latent or dim)}
        found |= {"shared_gate": int(feed.shared_gate)}
        found |= {"shared": feed.shared_hidden_dim, "shared_up": (1 + feed.gated) * feed.shared_hidden_dim}
    return Sizes(dim, length, **found)  # type: ignore[arg-type]


def parts_of(layer: Layer) -> tuple[Part, ...]:
    """Which tables apply to a layer."""
    found: list[Part] = []
    if isinstance(layer.mixer, Attention):
        found.append("attention")
    elif layer.mixer is not None:
        found.append("recurrence")
    if isinstance(layer.feed, Dense):
        found.append("dense")
    elif layer.feed is not None:
        found.append("moe")
    return tuple(found)


def row_bytes(row: Saved, sizes: Sizes, setting: Setting) -> float:
    """Bytes per token of one row on one rank, if it is kept at all."""
    if (row.needs and row.needs not in setting.on) or (row.lacks and row.lacks in setting.on):
        return 0.0
    if row.narrow is not None and row.step in setting.quantized:
        return row.narrow(sizes) * setting.operand * _share(row.cut, setting)
    return row.elements(sizes) * element_bytes(row.kind, setting) * _share(row.cut, setting)


def narrow_saving(row: Saved, sizes: Sizes, setting: Setting) -> float:
    """By how many bytes per token the matmuls' operand in a row is smaller than it would be wide."""
    if row.narrow is None or row.step not in setting.quantized or not row_bytes(row, sizes, setting):
        return 0.0
    return row.narrow(sizes) * (setting.word - setting.operand) * _share(row.cut, setting)


def element_bytes(kind: Kind, setting: Setting) -> float:
    if kind == "word":
        return setting.word
    if kind == "operand":
        return setting.operand
    if kind == "copy":
        return setting.operand if setting.operand < setting.word else 0.0
    return 4.0 if kind == "single" else 1.0


def _share(cut: Cut, setting: Setting) -> float:
    tokens = 1 / setting.tp if "sequence_parallel" in setting.on else 1.0
    if cut == "tokens":
        return tokens
    if cut == "whole":
        return 1.0
    if cut == "heads":
        return 1 / setting.tp
    rows = tokens * setting.imbalance
    return rows * setting.etp if cut == "rows" else rows
