"""What one microbatch costs a rank, part by part of a layer: counts alone, no speeds.

The matmuls are the rows of `blueprint/matmuls.py`, sharded over the layout. A tensor-parallel rank sees all tokens of
its context shard in sharded matmuls and 1/tp of them elsewhere (sequence parallelism).

`Work` is a small vector of totals. Time is linear in most of it, so a layer's time is a dot product and a search can
afford thousands of layouts. `parts_of(layer, ...)` names the parts as the recompute options do: a recomputed part runs
forward once more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil

from moefold.blueprint.flops import core_flops, flops_per_position
from moefold.blueprint.matmuls import Matmul, layer_matmuls
from moefold.blueprint.model_shape import Attention, Dense, Layer, MoE, Recurrence
from moefold.plan.op_sizes import Sizes

# Of what the last wave of tiles leaves idle, how much is lost: 183 matmuls that others measured on A100 say a half, as
# libraries take smaller tiles or cut long sums. 500 on B200 say none, so `Sizes.wave` is 0 there.
_LOST_WAVE = 0.5
# A tile is filled and emptied in the time of so many terms of its sum (the same matmuls).
_FILL = 96.0
# Waves of tiles for which attention's last tiles are alone, by 88 kernels on A100 and B200 with 4 to 128 heads. Under a
# causal mask the longest tile takes twice the mean; backward's are shorter and better spread.
_TAIL_FORWARD, _TAIL_BACKWARD = 1.8, 0.6
# `FusedScaleMaskSoftmax.is_kernel_available` of Megatron: heads of a rank times sequences divide by four.
_SOFTMAX_MATRICES = 4


@dataclass(frozen=True, slots=True)
class Work:
    """Totals of one pass. FLOPs count a multiplication and its addition as two; bytes are those of device memory."""

    # Matmuls of dense layers and of experts. Those whose operands take longer to fetch than to multiply count as the
    # arithmetic that would take as long; experts' rows are rounded up to tiles.
    gemm_flops: float = 0.0
    grouped_flops: float = 0.0
    # Elements that are converted to a narrow format: on their own, or while a norm or an activation writes them.
    quantised: float = 0.0
    quantised_fused: float = 0.0
    # Attention's two matmuls (five backward), and scans of recurrences.
    attention_flops: float = 0.0
    scan_flops: float = 0.0
    # Everything that only moves memory: norms, activations, permutations, losses.
    traffic: float = 0.0
    # The same of buffers so long that they pass at nearly the memory's bandwidth.
    streamed: float = 0.0
    # What the GPU runs, and what the host launches. Over experts frameworks loop without Python between.
    kernels: float = 0.0
    launches: float = 0.0
    loops: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Written out, for a search does this a million times."""
        return Work(
            self.gemm_flops + other.gemm_flops,
            self.grouped_flops + other.grouped_flops,
            self.quantised + other.quantised,
            self.quantised_fused + other.quantised_fused,
            self.attention_flops + other.attention_flops,
            self.scan_flops + other.scan_flops,
            self.traffic + other.traffic,
            self.streamed + other.streamed,
            self.kernels + other.kernels,
            self.launches + other.launches,
            self.loops + other.loops,
        )

    def scaled(self, factor: float) -> Work:
        return Work(*(factor * getattr(self, name) for name in _NAMES))


_NAMES = tuple(field.name for field in fields(Work))


@dataclass(frozen=True, slots=True)
class Part:
    """A named piece of a layer: its work forward and backward."""

    name: str
    forward: Work
    backward: Work


def roofline(flops: float, moved: float, s: Sizes) -> float:
    """Arithmetic and fetching overlap, but not perfectly where they take equally long."""
    return float((flops**s.sharpness + (moved * s.balance) ** s.sharpness) ** (1 / s.sharpness))


@lru_cache(maxsize=100_000)
def parts_of(layer: Layer, sizes: Sizes) -> tuple[Part, ...]:
    """The parts of one layer."""
    parts: list[Part] = []
    if isinstance(layer.mixer, Attention):
        parts += _attention(layer, layer.mixer, sizes)
    elif isinstance(layer.mixer, Recurrence):
        parts += _recurrence(layer, layer.mixer, sizes)
    if isinstance(layer.feed, Dense):
        parts += _dense(layer, layer.feed, sizes)
    elif isinstance(layer.feed, MoE):
        parts += _moe_parts(layer, layer.feed, sizes)
    parts.append(_norms(layer, sizes))
    return tuple(parts)


@lru_cache(maxsize=10_000)
def head_of(vocab: int, sizes: Sizes) -> Part:
    """Final norm, logits and the loss. The logits stay in bfloat16 whatever the layers' format."""
    s = sizes
    forward, backward = _gemm(s, s.tokens, s.dim, vocab / s.tp, wide=True)
    logits = s.tokens * vocab / s.tp
    loss = _moving(10 * logits, 12)
    return Part("head", forward + loss, backward + _moving(6 * logits, 10))


def embedding_of(sizes: Sizes) -> Part:
    moved = sizes.tokens * sizes.dim * 2.0 / sizes.tp
    return Part("embedding", _moving(2 * moved, 4), _moving(4 * moved, 4))


def join_of(sizes: Sizes) -> Part:
    """Where an MTP module joins two rows into one."""
    forward, backward = _gemm(sizes, sizes.tokens, 2 * sizes.dim, sizes.dim / sizes.tp)
    return Part("join", forward, backward)


# ---- matmuls ----


def _gemms(layer: Layer, s: Sizes) -> dict[str, tuple[Work, Work]]:
    """Every matmul of the layer as this rank computes it, by name."""
    return {matmul.name: _local(matmul, s) for matmul in layer_matmuls(layer, s.dim)}


def _local(matmul: Matmul, s: Sizes) -> tuple[Work, Work]:
    ways = s.etp if matmul.experts else s.tp
    inner = matmul.inner / ways if matmul.sharded == "inner" else matmul.inner
    outer = max(matmul.least_outer, matmul.outer / ways) if matmul.sharded == "outer" else matmul.outer
    if matmul.experts:
        experts = max(1.0, matmul.experts / s.ep)
        return _grouped(s, _expert_rows(matmul.per_token, s), experts, inner, outer, down=matmul.sharded == "inner")
    # A replicated matrix sees this rank's tokens; MLA's keys and values are computed for all of them.
    every = matmul.sharded is not None or matmul.name == "kv_down"
    rows = s.tokens if every else s.tokens / s.tp
    return _gemm(s, rows, inner, outer, wide=matmul.part == "router")


def _expert_rows(top_k: int, s: Sizes) -> float:
    return s.tokens / s.tp * top_k * s.imbalance * s.etp


def _gemm(s: Sizes, rows: float, inner: float, outer: float, *, wide: bool = False) -> tuple[Work, Work]:
    """One linear layer, forward and backward. A narrow one converts its input, and its output's gradient."""
    flops = 2.0 * rows * inner * outer
    operand = s.word if wide else s.operand_bytes
    x, w, y = rows * inner, inner * outer, rows * outer
    narrow = s.narrow and not wide
    # Matmuls that stay wide in a narrow run take as long as more arithmetic of the narrow kind; bytes take as long.
    slower = s.wide_slower if wide else 1.0
    flops *= slower
    forward = roofline(in_waves(flops, y, inner, s), operand * (x + w) + s.word * y, s)
    # The weight's gradient is added to a buffer: read and written.
    backward = roofline(in_waves(flops, x, outer, s), operand * (y + w) + s.word * x, s) + roofline(
        in_waves(flops, w, rows, s), operand * (x + y) + 2 * s.gradient_bytes * w, s
    )
    first, second = 1 + 2 * narrow, 2 + 2 * narrow
    return (
        Work(gemm_flops=forward, quantised_fused=x if narrow else 0.0, kernels=first, launches=first),
        Work(gemm_flops=backward, quantised_fused=y if narrow else 0.0, kernels=second, launches=second),
    )


def in_waves(flops: float, results: float, terms: float, s: Sizes) -> float:
    """Sums of so many terms, of which a GPU computes a wave at once. The last wave is full in part. Of less than half a
    wave libraries cut the sums, so that no more is idle."""
    if not s.wave:
        return flops
    waves = max(0.5, results / s.wave)
    return flops * (1 + _LOST_WAVE * (ceil(waves) / waves - 1)) * (1 + _FILL / terms)


def attention_tails(rows: float, s: Sizes) -> tuple[float, float]:
    """How much longer attention takes, forward and backward, where it has few rows of queries over all heads: its last
    tiles leave multiprocessors idle."""
    return 1 + _TAIL_FORWARD * s.query_wave / rows, 1 + _TAIL_BACKWARD * s.key_wave / rows


def _grouped(s: Sizes, rows: float, experts: float, inner: float, outer: float, *, down: bool) -> tuple[Work, Work]:
    """The same for the experts of a rank. Each expert's rows fill whole tiles, the last one in part, unless a
    capacity makes all row counts alike."""
    per_expert = rows / experts
    spare = 0.0 if s.exact else s.tile * (0.5 if per_expert > s.tile else 1 - 0.5 * per_expert / s.tile)
    padded = experts * (per_expert + spare)
    flops = 2.0 * padded * inner * outer
    x, w, y = rows * inner, experts * inner * outer, rows * outer
    forward = roofline(flops, s.operand_bytes * (x + w) + s.word * y, s)
    backward = roofline(flops, s.operand_bytes * (y + w) + s.word * x, s) + roofline(
        flops, s.operand_bytes * (x + y) + 2 * s.gradient_bytes * w, s
    )
    loops = experts * (1 + 2 * s.narrow)
    # What enters the second matmul, and the gradient of what the first one gives, come out of the activation.
    ends = s.fused_experts and s.narrow
    return (
        Work(
            grouped_flops=forward,
            quantised=0.0 if not s.narrow or (ends and down) else x,
            kernels=4,
            launches=2,
            loops=loops,
        ),
        Work(
            grouped_flops=backward,
            quantised=0.0 if not s.narrow or (ends and not down) else y,
            kernels=8,
            launches=4,
            loops=2 * loops,
        ),
    )


def _sum(*pairs: tuple[Work, Work]) -> tuple[Work, Work]:
    forward, backward = pairs[0]
    for more_forward, more_backward in pairs[1:]:
        forward, backward = forward + more_forward, backward + more_backward
    return forward, backward


def _moving(traffic: float, kernels: float) -> Work:
    return Work(traffic=traffic, kernels=kernels, launches=kernels)


def _moves(forward: float, backward: float, kernels: float) -> tuple[Work, Work]:
    return _moving(forward, kernels), _moving(backward, kernels)


# ---- mixers ----


def _attention(layer: Layer, a: Attention, s: Sizes) -> list[Part]:
    tokens, gemms = s.tokens, _gemms(layer, s)
    heads, kv_heads = a.heads / s.tp, max(1.0, a.kv_heads / s.tp)
    if a.is_latent:
        # Queries and keys are concatenated and rotated.
        rotation = _moves(8.0 * tokens * heads * a.qk_dim, 8.0 * tokens * heads * a.qk_dim, 8)
        up = _sum(gemms["q_up" if a.q_latent else "q"], gemms["kv_up"], rotation)
        down = _sum(gemms["kv_down"], *(gemms[name] for name in ("q_down",) if name in gemms))
        projections = [Part("latents", *down), Part("mla_up", *up)]
    else:
        rotated = 2.0 * tokens * (heads + kv_heads) * a.qk_dim
        inward = [gemms[name] for name in ("q_down", "q_up", "q", "kv") if name in gemms]
        projections = [Part("qkv", *_sum(*inward, _moves(2 * rotated, 2 * rotated, 5)))]
    flops = tokens / s.tp * (core_flops(layer, s.seq_len) + _cut_tiles(a, s))
    moved = 2.0 * tokens * (heads * (a.qk_dim + a.v_dim) + kv_heads * (a.qk_dim + a.v_dim))
    if not s.flash:
        return [*projections, Part("core_attention", *_unfused(a, s)), Part("attention_out", *gemms["out"])]
    forward, backward = attention_tails(heads * tokens, s)
    core = Part(
        "core_attention",
        Work(attention_flops=forward * flops, traffic=moved, kernels=2, launches=2),
        Work(attention_flops=2.5 * backward * flops, traffic=2.5 * moved, kernels=4, launches=4),
    )
    return [*projections, core, Part("attention_out", *gemms["out"])]


def _unfused(a: Attention, s: Sizes) -> tuple[Work, Work]:
    """Two matmuls over the whole square, whose scores are written, read by the softmax and dropout, and read again: 11
    bytes of a score forward and 19 backward.

    Megatron's one kernel for scale, mask and softmax takes four matrices of scores at a time. Where their number on a
    rank is no multiple of that, torch has five: to float32, times the scale, masked, softmax and back, each of which
    reads and writes.
    """
    matrices = s.tokens / s.seq_len * a.heads / s.tp
    scores = matrices * s.seq_len**2
    flops = 2.0 * scores * (a.qk_dim + a.v_dim)
    kernels, forward, backward = (4, 32, 34) if matrices % _SOFTMAX_MATRICES else (0, 0, 0)
    return (
        Work(gemm_flops=flops, streamed=(11 + forward) * scores, kernels=5 + kernels, launches=5 + kernels),
        Work(gemm_flops=2 * flops, streamed=(19 + backward) * scores, kernels=8 + kernels, launches=8 + kernels),
    )


def _cut_tiles(a: Attention, s: Sizes) -> float:
    """Beyond what a token attends to. Scores are computed in square tiles. A window cuts one in half at either end, as
    the diagonal does in the runs that rates were measured on."""
    return flops_per_position(a) * s.tile if 0 < a.window < s.seq_len - s.tile else 0.0


def _recurrence(layer: Layer, r: Recurrence, s: Sizes) -> list[Part]:
    tokens, inner, gemms = s.tokens, r.heads * r.head_dim / s.tp, _gemms(layer, s)
    state = r.groups * r.state / s.tp
    # Chunked scans: beside the matmuls with the state, those inside of chunks of 128 tokens.
    scan = tokens / s.tp * core_flops(layer, s.seq_len) + 2.0 * tokens * inner * 128
    moved = 2.0 * tokens * (3 * inner + 2 * state)
    mixing = Part(
        "scan",
        Work(scan_flops=scan, traffic=4 * moved, kernels=12, launches=12),
        Work(scan_flops=2.5 * scan, traffic=9 * moved, kernels=20, launches=20),
    )
    inputs = [gemms[name] for name in ("in", "qkvz", "ba") if name in gemms]
    out = gemms["linear_out" if "linear_out" in gemms else "out"]
    return [Part("scan_in", *_sum(*inputs)), mixing, Part("scan_out", *out)]


# ---- feed-forward parts ----


def _activation(rows: float, dim: float, *, gated: bool, fused: bool = False) -> tuple[Work, Work]:
    """Gate and up are read, the product is written; backward reads all three and writes two. At the end of a matmul
    what that one has made is not read again."""
    inputs = 2 if gated else 1
    if fused:
        return _moves(2.0 * rows * dim, 2.0 * rows * dim * 2 * inputs, 0)
    return _moves(2.0 * rows * dim * (inputs + 1), 2.0 * rows * dim * (2 * inputs + 2), 2)


def _dense(layer: Layer, d: Dense, s: Sizes) -> list[Part]:
    gemms = _gemms(layer, s)
    return [
        Part("feed_forward", *_sum(gemms["gate_up"], gemms["down"])),
        Part("dense_activation", *_activation(s.tokens, d.dim / s.tp, gated=d.gated)),
    ]


def _moe_parts(layer: Layer, m: MoE, s: Sizes) -> list[Part]:
    own, gemms = s.tokens / s.tp, _gemms(layer, s)
    dim = m.latent or s.dim
    rows = _expert_rows(m.top_k, s)
    # Scores, their softmax and the top-k, in float32 over all experts.
    scores = [gemms[name] for name in ("router", "shared_gate") if name in gemms]
    router = _sum(*scores, _routing(m, own, s))
    # Rows are sorted by rank, then by expert, and added up on the way back; fused dispatchers move them once less.
    moves = 5.0 if s.fused else 8.0
    permutation = _moves(moves * rows * dim, moves * rows * dim, 10 if s.fused else 24)
    parts = [
        Part("router", *router),
        Part("permutation", *permutation),
        Part("experts", *_sum(gemms["experts.gate_up"], gemms["experts.down"])),
        Part("activation", *_activation(rows, m.dim / s.etp, gated=m.gated, fused=s.fused_experts)),
    ]
    if m.biased:
        parts.append(Part("biases", *_biases(m, rows, dim, s)))
    if m.latent:
        parts.append(Part("latent", *_sum(gemms["latent_down"], gemms["latent_up"])))
    if m.shared_hidden_dim:
        parts.append(Part("shared", *_sum(gemms["shared.gate_up"], gemms["shared.down"])))
        activation = _activation(s.tokens, m.shared_hidden_dim / s.tp, gated=m.gated)
        parts.append(Part("shared_activation", *activation))
    return parts


def _routing(m: MoE, own: float, s: Sizes) -> tuple[Work, Work]:
    """What follows the logits. With the logits' own matmuls, forward and backward of DeepSeek-V3's router are 72
    kernels, and 31 where Transformer Engine fuses them (the guide for DeepSeek-V3 on GB200, section 2.1.4). A softmax
    and a top-k without groups and a bias are fewer."""
    scores = own * m.experts
    if s.fused_router:
        return _moving(18.0 * scores, 15), _moving(14.0 * scores, 13)
    forward, backward = (35, 34) if m.aux_free else (25, 25)
    return _moving(40.0 * scores, forward), _moving(24.0 * scores, backward)


def _biases(m: MoE, rows: float, dim: float, s: Sizes) -> tuple[Work, Work]:
    """The first is added by the grouped GEMM; its gradient is a sum of rows. The second is scaled by a row's weight.

    Megatron Core adds it in a loop over experts (`TEGroupedMLP._apply_bias`): a product with float32 weights (4 bytes
    written), a sum (6 read, 4 written), a concatenation (4 and 4), a cast (4 and 2). Backward goes the same way, and
    sums the product's two gradients.
    """
    forward, backward, loops = (28.0, 40.0, max(1.0, m.experts / s.ep)) if s.biases_apart else (6.0, 8.0, 1.0)
    first = 4.0 * rows * m.dim / s.etp
    return _moving(forward * rows * dim, 3 * loops + 2), _moving(backward * rows * dim + first, 6 * loops + 2)


def _norms(layer: Layer, s: Sizes) -> Part:
    """Each half reads and writes its rows for the norm and for the sum with the hidden state."""
    halves = (layer.mixer is not None) + (layer.feed is not None)
    moved = halves * 2.0 * s.tokens / s.tp * s.dim
    return Part("norms", _moving(5 * moved, 3 * halves), _moving(8 * moved, 4 * halves))
