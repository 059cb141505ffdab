"""What one microbatch costs a rank, part by part of a layer: counts alone, no speeds.

    t  tokens of the microbatch after context parallelism cut it; each tensor-parallel rank sees all of them in its
       products (widths are cut) and 1/tp of them elsewhere (sequence parallelism)
    D  the model's width      R  rows of tokens that reach this rank's experts      f  an expert's width

`Work` is a small vector of totals. Time is linear in most of it, so a layer is priced by a scalar product and a search
can afford thousands of layouts. `parts_of(layer, ...)` names the parts as the recompute options do, for a part that is
recomputed simply runs forward once more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from moefold.plan.shape import Attention, Dense, Layer, Mixture, Recurrence
from moefold.plan.workload import Workload

# Grouped products of accelerators work in tiles of this many rows per expert; a processor takes rows as they come.
TILE = 128
# How sharply the slower of fetching and multiplying wins: 4 adds 19 % where both are equal. Without anything that runs
# beside, as in one thread, they add up.
_SHARPNESS = 4.0


@dataclass(frozen=True, slots=True)
class Work:
    """Totals of one pass. FLOPs count a multiplication and its addition as two; bytes are those of device memory."""

    # Products of dense layers and of experts. Those whose operands take longer to fetch than to multiply count as the
    # arithmetic that would take as long; experts' rows are rounded up to tiles.
    gemm_flops: float = 0.0
    grouped_flops: float = 0.0
    # Elements that are converted to a narrow format: on their own, or while a norm or an activation writes them.
    quantised: float = 0.0
    quantised_fused: float = 0.0
    # Attention's two products (five backward), and scans of recurrences.
    attention_flops: float = 0.0
    scan_flops: float = 0.0
    # Everything that only moves memory: norms, activations, permutations, losses.
    traffic: float = 0.0
    # What the card runs, and what the host launches. Over experts programs loop without Python between.
    kernels: float = 0.0
    launches: float = 0.0
    loops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def scaled(self, factor: float) -> Work:
        return Work(*(factor * getattr(self, name) for name in _NAMES))


_NAMES = tuple(field.name for field in fields(Work))


@dataclass(frozen=True, slots=True)
class Part:
    """A named piece of a layer: its work forward and backward."""

    name: str
    forward: Work
    backward: Work


@dataclass(frozen=True)
class Sizes:
    """What of a job a layer's work depends on."""

    dim: int
    seq_len: int
    tokens: float
    tp: int
    ep: int
    etp: int
    imbalance: float
    narrow: bool
    operand_bytes: float
    gradient_bytes: float
    fused: bool
    exact: bool
    # FLOPs that the card does while it fetches one byte.
    balance: float
    # Bytes of an element where products are not narrow.
    word: float = 2.0
    tile: int = TILE
    sharpness: float = _SHARPNESS


def sizes_of(workload: Workload) -> Sizes:
    narrow = workload.dtypes.format not in ("bf16", "fp16", "float32")
    measured = workload.cluster.machine is not None
    operand = {"nvfp4": 0.56, "float32": 4.0}.get(workload.dtypes.format, 1.0 if narrow else 2.0)
    return Sizes(
        dim=workload.model.dim,
        seq_len=workload.batch.seq_len,
        tokens=workload.batch.tokens / workload.degrees.cp,
        tp=workload.degrees.tp,
        ep=workload.degrees.ep,
        etp=workload.degrees.etp,
        imbalance=_imbalance(workload),
        narrow=narrow,
        operand_bytes=operand,
        gradient_bytes=workload.dtypes.gradient_bytes,
        fused=workload.options.compiled or workload.options.dispatcher in ("deepep", "hybridep"),
        exact=workload.options.drops,
        balance=_balance(workload),
        word=workload.dtypes.word,
        tile=1 if measured else TILE,
        sharpness=1.0 if measured else _SHARPNESS,
    )


def _imbalance(workload: Workload) -> float:
    """Where ranks share cores, all get equal parts of them until those with less to do are done; then the busiest gets
    a core to itself. So it makes up for some of what it has more."""
    machine, ep, busiest = workload.cluster.machine, workload.degrees.ep, workload.options.imbalance
    if machine is None or busiest == 1.0:
        return busiest
    if ep == 1:
        return 1.0
    shared = max(1.0, machine.slowdown(workload.cluster.num_gpus))
    others = max(0.0, ep - busiest) / (ep - 1)
    return (busiest + others * (shared - 1)) / shared


def _balance(workload: Workload) -> float:
    gpu, form = workload.cluster.gpu, workload.dtypes.format
    peak = gpu.bf16_tflops if form in ("bf16", "fp16", "float32") else gpu.fp8_tflops or gpu.bf16_tflops
    return peak * (2 if form == "nvfp4" else 1) / gpu.memory_tb_s


def _roofline(flops: float, moved: float, s: Sizes) -> float:
    """Arithmetic and fetching overlap, but not perfectly where they take equally long."""
    return float((flops**s.sharpness + (moved * s.balance) ** s.sharpness) ** (1 / s.sharpness))


@lru_cache(maxsize=100_000)
def parts_of(layer: Layer, sizes: Sizes) -> tuple[Part, ...]:
    """The parts of one layer."""
    parts: list[Part] = []
    if isinstance(layer.mixer, Attention):
        parts += _attention(layer.mixer, sizes)
    elif isinstance(layer.mixer, Recurrence):
        parts += _recurrence(layer.mixer, sizes)
    if isinstance(layer.feed, Dense):
        parts += _dense(layer.feed, sizes)
    elif isinstance(layer.feed, Mixture):
        parts += _mixture(layer.feed, sizes)
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
    """Where a module that predicts further ahead joins two rows into one."""
    forward, backward = _gemm(sizes, sizes.tokens, 2 * sizes.dim, sizes.dim / sizes.tp)
    return Part("join", forward, backward)


# ---- products ----


def _gemm(s: Sizes, rows: float, inner: float, outer: float, *, wide: bool = False) -> tuple[Work, Work]:
    """One linear layer, forward and backward. A narrow one converts its input, and its output's gradient."""
    flops = 2.0 * rows * inner * outer
    operand = s.word if wide else s.operand_bytes
    x, w, y = rows * inner, inner * outer, rows * outer
    narrow = s.narrow and not wide
    # Products that stay wide in a narrow run take as long as more arithmetic of the narrow kind.
    slower = 2.0 / s.operand_bytes if wide and s.narrow else 1.0
    forward = slower * _roofline(flops, operand * (x + w) + s.word * y, s)
    # The weight's gradient is added to a buffer: read and written.
    backward = slower * (
        _roofline(flops, operand * (y + w) + s.word * x, s)
        + _roofline(flops, operand * (x + y) + 2 * s.gradient_bytes * w, s)
    )
    first, second = 1 + 2 * narrow, 2 + 2 * narrow
    return (
        Work(gemm_flops=forward, quantised_fused=x if narrow else 0.0, kernels=first, launches=first),
        Work(gemm_flops=backward, quantised_fused=y if narrow else 0.0, kernels=second, launches=second),
    )


def _grouped(s: Sizes, rows: float, experts: float, inner: float, outer: float) -> tuple[Work, Work]:
    """The same for the experts of a rank. Each expert's rows fill whole tiles, the last one in part, unless a
    capacity makes all row counts alike."""
    per_expert = rows / experts
    spare = 0.0 if s.exact else s.tile * (0.5 if per_expert > s.tile else 1 - 0.5 * per_expert / s.tile)
    padded = experts * (per_expert + spare)
    flops = 2.0 * padded * inner * outer
    x, w, y = rows * inner, experts * inner * outer, rows * outer
    forward = _roofline(flops, s.operand_bytes * (x + w) + s.word * y, s)
    backward = _roofline(flops, s.operand_bytes * (y + w) + s.word * x, s) + _roofline(
        flops, s.operand_bytes * (x + y) + 2 * s.gradient_bytes * w, s
    )
    loops = experts * (1 + 2 * s.narrow)
    return (
        Work(grouped_flops=forward, quantised=x if s.narrow else 0.0, kernels=4, launches=2, loops=loops),
        Work(grouped_flops=backward, quantised=y if s.narrow else 0.0, kernels=8, launches=4, loops=2 * loops),
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


def _attention(a: Attention, s: Sizes) -> list[Part]:
    t, D = s.tokens, s.dim
    heads, kv_heads = a.heads / s.tp, max(1.0, a.kv_heads / s.tp)
    if a.is_latent:
        down = _gemm(s, t, D, a.kv_latent + a.rope_dim)
        if a.q_latent:
            down = _sum(down, _gemm(s, t / s.tp if s.tp > 1 else t, D, a.q_latent))
        up = _sum(
            _gemm(s, t, a.q_latent or D, heads * a.qk_dim),
            _gemm(s, t, a.kv_latent, heads * (a.qk_dim - a.rope_dim + a.v_dim)),
            # Queries and keys are put together and rotated.
            _moves(8.0 * t * heads * a.qk_dim, 8.0 * t * heads * a.qk_dim, 8),
        )
        projections = [Part("latents", *down), Part("mla_up", *up)]
    else:
        query = a.heads * a.qk_dim
        rotated = 2.0 * t * (heads + kv_heads) * a.qk_dim
        if a.q_latent:
            first = _sum(_gemm(s, t, D, a.q_latent), _gemm(s, t, a.q_latent, query / s.tp))
        else:
            first = _gemm(s, t, D, query / s.tp)
        inward = _sum(first, _gemm(s, t, D, 2 * kv_heads * a.qk_dim), _moves(2 * rotated, 2 * rotated, 5))
        projections = [Part("qkv", *inward)]
    outward = _gemm(s, t, heads * a.v_dim, D)
    reach = s.seq_len if not a.window else min(a.window, s.seq_len)
    seen = reach - reach**2 / (2 * s.seq_len)
    flops = 2.0 * t * heads * (a.qk_dim + a.v_dim) * seen
    moved = 2.0 * t * (heads * (a.qk_dim + a.v_dim) + kv_heads * (a.qk_dim + a.v_dim))
    core = Part(
        "core_attention",
        Work(attention_flops=flops, traffic=moved, kernels=2, launches=2),
        Work(attention_flops=2.5 * flops, traffic=2.5 * moved, kernels=4, launches=4),
    )
    return [*projections, core, Part("attention_out", *outward)]


def _recurrence(r: Recurrence, s: Sizes) -> list[Part]:
    t, inner = s.tokens, r.heads * r.head_dim / s.tp
    state = r.groups * r.state / s.tp
    inward = _gemm(s, t, s.dim, 2 * inner + 2 * state + r.heads / s.tp)
    outward = _gemm(s, t, inner, s.dim)
    # Chunked scans: products inside chunks of 128 tokens and with the state, plus a convolution over a few tokens.
    scan = 2.0 * t * inner * (2 * r.state + 128)
    moved = 2.0 * t * (3 * inner + 2 * state)
    mixing = Part(
        "scan",
        Work(scan_flops=scan, traffic=4 * moved, kernels=12, launches=12),
        Work(scan_flops=2.5 * scan, traffic=9 * moved, kernels=20, launches=20),
    )
    return [Part("scan_in", *inward), mixing, Part("scan_out", *outward)]


# ---- feed-forward parts ----


def _activation(rows: float, dim: float, *, gated: bool) -> tuple[Work, Work]:
    """Gate and up are read, the product is written; backward reads all three and writes two."""
    inputs = 2 if gated else 1
    return _moves(2.0 * rows * dim * (inputs + 1), 2.0 * rows * dim * (2 * inputs + 2), 2)


def _dense(d: Dense, s: Sizes) -> list[Part]:
    matrices = 2 if d.gated else 1
    return [
        Part(
            "feed_forward",
            *_sum(_gemm(s, s.tokens, s.dim, matrices * d.dim / s.tp), _gemm(s, s.tokens, d.dim / s.tp, s.dim)),
        ),
        Part("dense_activation", *_activation(s.tokens, d.dim / s.tp, gated=d.gated)),
    ]


def _mixture(m: Mixture, s: Sizes) -> list[Part]:
    own = s.tokens / s.tp
    dim = m.latent or s.dim
    rows = own * m.top_k * s.imbalance * s.etp
    local = max(1.0, m.experts / s.ep)
    matrices = 2 if m.gated else 1
    experts = _sum(
        _grouped(s, rows, local, dim, matrices * m.dim / s.etp), _grouped(s, rows, local, m.dim / s.etp, dim)
    )
    # Scores, their softmax and the choice, in float32 over all experts.
    router = _sum(
        _gemm(s, own, s.dim, m.experts, wide=True), _moves(40.0 * own * m.experts, 24.0 * own * m.experts, 25)
    )
    # Rows are sorted by rank, then by expert, and added up on the way back; fused dispatchers move them once less.
    moves = 5.0 if s.fused else 8.0
    permutation = _moves(moves * rows * dim, moves * rows * dim, 10 if s.fused else 24)
    parts = [
        Part("router", *router),
        Part("permutation", *permutation),
        Part("experts", *experts),
        Part("activation", *_activation(rows, m.dim / s.etp, gated=m.gated)),
    ]
    if m.latent:
        parts.append(Part("latent", *_sum(_gemm(s, own, s.dim, m.latent), _gemm(s, own, m.latent, s.dim))))
    if m.shared_hidden_dim:
        shared = Dense(m.shared_hidden_dim, m.gated)
        parts += [Part("shared" if part.name == "feed_forward" else "shared_activation", part.forward, part.backward)
                  for part in _dense(shared, s)]  # fmt: skip
    return parts


def _norms(layer: Layer, s: Sizes) -> Part:
    """Each half reads and writes its rows for the norm and for the sum with the stream."""
    halves = (layer.mixer is not None) + (layer.feed is not None)
    moved = halves * 2.0 * s.tokens / s.tp * s.dim
    return Part("norms", _moving(5 * moved, 3 * halves), _moving(8 * moved, 4 * halves))
