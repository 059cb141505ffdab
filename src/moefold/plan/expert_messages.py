"""Collectives of dispatch and combine, by dispatcher, forward and backward.

Routing is that of the balanced router: assignment k of token n goes to expert (n * K + k) mod E. Then every count is
known, and the bytes are those of a real step, to the byte.

    all_to_all      a row per assignment there and back, its prob beside it
    all_to_all_bounded   the same in parts of a fixed number of rows, empty ones among them
    all_gather      every token of the group to every rank; expert outputs are summed in float32
    deduplicated    a row per token and rank that has one of its experts, with its K probs and K expert numbers
    two_level       a row per token and host, then a row per token and rank of that host

Rows that go to experts, and gradients that do, have the bytes of `precision.dispatch`; those that come back are in
`precision.compute`. With `parallel.exchange_chunks` all of this is sent once per chunk of a rank's tokens, counts too.

Tensor parallelism gathers tokens before a sharded matmul and sums its outputs after it; the backward of a gather is a
sum of gradients, that of a sum a gather. Sums are reduce_scatters in `precision.tp_reduce`; parts of them that are
narrowed go by an all_to_all. With `parallel.overlap: [tensor_parallel]` those around a layer's matmuls go in chunks, a
collective each; those of the embedding and of the loss do not.

`Tally` adds such collectives up by operation and group, here and in `plan/collective_counts.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, cast

from moefold.batching.zigzag import held_spans
from moefold.blueprint.narrow_bytes import cast_bytes
from moefold.blueprint.row_bounds import row_bounds
from moefold.config.moe import MoEConfig
from moefold.config.precision import BYTES, Format
from moefold.config.precision_recipes import TP_REDUCE_CASTS
from moefold.config.run import RunConfig
from moefold.plan.dispatch_choice import ENGINE_DISPATCHERS, dispatcher_in_use, planned_as, sent_row_bytes
from moefold.topology.folded_layout import FoldedLayout, levels, shard_sizes

# Bytes of a prob, of an expert number in a message, and of a count.
_PROB, _NUMBER, _COUNT = 4, 2, 8
# Parts of the ep group; callers count them only where they have more than one rank.
_LEVELS = tuple(f"{name}_{level}" for name in ("ep", "dense_shard", "expert_shard") for level in ("across", "inside"))

Key = tuple[str, str]


@dataclass
class Tally:
    """Calls and bytes by operation and group; groups of one rank send nothing."""

    layout: FoldedLayout
    calls: Counter[Key] = field(default_factory=Counter)
    sizes: Counter[Key] = field(default_factory=Counter)

    def add(self, name: str, group: str, size: int, count: int = 1) -> None:
        """``count`` times ``size`` bytes."""
        axis = "cp" if group.startswith("context_") else group
        if count and (axis in _LEVELS or self.layout.size(axis) > 1):
            self.calls[name, group] += count
            self.sizes[name, group] += size * count


class Tokens(NamedTuple):
    """Tokens of a microbatch on this rank and in its context shard, and bytes of an entry as sent and as reduced."""

    mine: int
    shared: int
    word: int
    wide: int


def tokens_of(run: RunConfig, layout: FoldedLayout) -> Tokens:
    tokens = run.data.micro_batch * run.data.seq_len
    shared = tokens // layout.size("cp")
    word = BYTES[cast(Format, run.precision.compute)]
    return Tokens(shared // layout.size("tp"), shared, word, max(4, word))


def expert_messages(run: RunConfig, layout: FoldedLayout, rank: int, moe: MoEConfig, times: int, tally: Tally) -> None:
    """``times``: layers and microbatches together."""
    # Other libraries do not send through our process groups, so nothing of theirs is counted.
    if layout.size("expert_block") > 1 and dispatcher_in_use(run) not in ENGINE_DISPATCHERS:
        name = dispatcher_in_use(run)
        send = _SENDERS[name if name in _SENDERS else planned_as(run)]
        for chunk in range(run.parallel.exchange_chunks):
            send(run, layout, rank, moe, times, tally, chunk)


def _all_to_all_messages(
    run: RunConfig, layout: FoldedLayout, rank: int, moe: MoEConfig, times: int, tally: Tally, chunk: int
) -> None:
    """Dispatch of rows and probs and combine of expert outputs; twice, for their gradients go the other way."""
    tokens, dim = tokens_of(run, layout), moe.latent_dim or run.model.dim
    sent = _chunk_size(run, tokens.mine, chunk) * moe.top_k
    received = received_rows(run, layout, rank, chunk)
    counts = moe.num_experts * _COUNT
    if moe.capacity is None:
        tally.add("all_to_all", "ep", counts, times)
        tally.add("all_gather", "etp", counts, times)
    row = sent_row_bytes(run, dim, tokens.word)
    tally.add("all_to_all", "ep", sent * row, 2 * times)
    tally.add("all_to_all", "ep", received * dim * tokens.word, 2 * times)
    for rows in (sent, received):
        tally.add("all_to_all", "ep", rows * _PROB, times)
    # Ranks that shard an expert gather each other's rows, and sum their outputs; all are padded to the most rows.
    most = max(received_rows(run, layout, peer, chunk) for peer in layout.ranks("etp", rank))
    etp = layout.size("etp")
    tally.add("all_gather", "etp", most * row, 2 * times)
    tally.add("all_gather", "etp", most * _PROB, times)
    tally.add("reduce_scatter", "etp", etp * most * dim * tokens.wide, 2 * times)
    tally.add("reduce_scatter", "etp", etp * most * _PROB, times)


def _bounded_messages(
    run: RunConfig, layout: FoldedLayout, rank: int, moe: MoEConfig, times: int, tally: Tally, chunk: int
) -> None:
    """As with all_to_all, in parts of a fixed number of rows; nothing depends on the routing."""
    tokens, dim, etp = tokens_of(run, layout), moe.latent_dim or run.model.dim, layout.size("etp")
    # The last shard may be smaller by a token; all have the bounds of the largest.
    most = max(len(_tokens_of_rank(run, layout, context, shard)) for context, shard in _shards(layout))
    rows = row_bounds(run, most).pair * layout.size("ep")
    sent, back = sent_row_bytes(run, dim, tokens.word), dim * tokens.word
    tally.add("all_to_all", "ep", moe.num_experts * _COUNT, times)
    tally.add("all_gather", "etp", moe.num_experts * _COUNT, times)
    tally.add("all_to_all", "ep", rows * sent, 2 * times)
    tally.add("all_to_all", "ep", rows * back, 2 * times)
    tally.add("all_to_all", "ep", rows * _PROB, 2 * times)
    tally.add("all_gather", "etp", rows * sent, 2 * times)
    tally.add("all_gather", "etp", rows * _PROB, times)
    tally.add("reduce_scatter", "etp", etp * rows * dim * tokens.wide, 2 * times)
    tally.add("reduce_scatter", "etp", etp * rows * _PROB, times)


def _shards(layout: FoldedLayout) -> list[tuple[int, int]]:
    return [(context, shard) for context in range(layout.size("cp")) for shard in range(layout.size("tp"))]


def _chunk_size(run: RunConfig, tokens: int, chunk: int) -> int:
    return shard_sizes(tokens, run.parallel.exchange_chunks)[chunk]


def received_rows(run: RunConfig, layout: FoldedLayout, rank: int, chunk: int) -> int:
    """Rows of a chunk that this rank receives from its ep peers if assignment n * K + k goes to expert
    (n * K + k) mod E."""
    assert run.model.moe is not None
    experts, top_k = run.model.moe.num_experts, run.model.moe.top_k
    each = experts // layout.size("ep")
    first = layout.index("ep", rank) * each
    by_place: dict[tuple[int, int], int] = {}
    rows = 0
    for peer in layout.ranks("ep", rank):
        place = layout.coordinate(peer, "cp"), layout.coordinate(peer, "tp")
        if place not in by_place:
            by_place[place] = _count_assignments(
                _tokens_of_chunk(run, layout, *place, chunk), top_k, experts, first, first + each
            )
        rows += by_place[place]
    return rows


def _tokens_of_rank(run: RunConfig, layout: FoldedLayout, context: int, shard: int) -> list[int]:
    """The numbers of a rank's tokens in their microbatch."""
    lengths, cp, tp = (run.data.seq_len,) * run.data.micro_batch, layout.size("cp"), layout.size("tp")
    shared = [token for start, stop in held_spans(lengths, context, cp) for token in range(start, stop)]
    starts = (0, *accumulate(shard_sizes(len(shared), tp)))
    return shared[starts[shard] : starts[shard + 1]]


def _tokens_of_chunk(run: RunConfig, layout: FoldedLayout, context: int, shard: int, chunk: int) -> list[int]:
    held = _tokens_of_rank(run, layout, context, shard)
    starts = (0, *accumulate(shard_sizes(len(held), run.parallel.exchange_chunks)))
    return held[starts[chunk] : starts[chunk + 1]]


def _count_assignments(tokens: list[int], top_k: int, experts: int, first: int, stop: int, once: bool = False) -> int:
    """How many assignments of these tokens are to experts in ``[first, stop)``; ``once``: how many tokens have one."""
    residues = Counter(token * top_k % experts for token in tokens)
    inside = {start: sum(first <= (start + k) % experts < stop for k in range(top_k)) for start in residues}
    return sum(count * (inside[start] > 0 if once else inside[start]) for start, count in residues.items())


def _all_gather_messages(
    run: RunConfig, layout: FoldedLayout, rank: int, moe: MoEConfig, times: int, tally: Tally, chunk: int
) -> None:
    """All tokens of the group are gathered with their assignments; expert outputs are summed."""
    tokens, dim = tokens_of(run, layout), moe.latent_dim or run.model.dim
    mine, group = _chunk_size(run, tokens.mine, chunk), "expert_block"
    everyone = mine * layout.size(group)
    if run.parallel.exchange_chunks > 1:
        tally.add("all_gather", group, (1 + moe.num_experts) * _COUNT, times)
    tally.add("all_gather", group, mine * sent_row_bytes(run, dim, tokens.word), 2 * times)
    tally.add("all_gather", group, mine * moe.top_k * _PROB, times)
    tally.add("all_gather", group, mine * moe.top_k * 8, times)
    tally.add("reduce_scatter", group, everyone * dim * tokens.wide, 2 * times)
    tally.add("reduce_scatter", group, everyone * moe.top_k * _PROB, times)


# ---- a row per token and rank, not per assignment ----


def _deduplicated_messages(
    run: RunConfig, layout: FoldedLayout, rank: int, moe: MoEConfig, times: int, tally: Tally, chunk: int
) -> None:
    """One all-to-all over the ep group."""
    peers = layout.ranks("ep", rank)
    sent = sum(_rows_once(run, layout, moe, (rank,), peer, 1, chunk) for peer in peers)
    received = {
        end: sum(_rows_once(run, layout, moe, (peer,), end, 1, chunk) for peer in layout.ranks("ep", end))
        for end in layout.ranks("etp", rank)
    }
    _dedup_all_to_all(run, layout, moe, "ep", len(peers), moe.num_experts, sent, received[rank], times, tally)
    _etp_messages(run, layout, moe, len(peers), moe.num_experts, max(received.values()), times, tally)


def _two_level_messages(
    run: RunConfig, layout: FoldedLayout, rank: int, moe: MoEConfig, times: int, tally: Tally, chunk: int
) -> None:
    """One all-to-all between hosts, and one inside of the host for the tokens that came to it."""
    size = run.parallel.ep_inner
    across, inside = levels(layout.ranks("ep", rank), rank, size)
    sent = sum(_rows_once(run, layout, moe, (rank,), peer, size, chunk) for peer in across)
    crossed = sum(_rows_once(run, layout, moe, (peer,), rank, size, chunk) for peer in across)
    of_host = moe.num_experts // len(across)
    # Beside its rows and assignments a host is told how many rows go to each of its ranks.
    numbers = moe.num_experts + len(across) * size
    _dedup_all_to_all(run, layout, moe, "ep_across", len(across), numbers, sent, crossed, times, tally)
    spread = sum(_rows_once(run, layout, moe, across, peer, 1, chunk) for peer in inside)
    received = {}
    for end in layout.ranks("etp", rank):
        peers = levels(layout.ranks("ep", end), end, size)[1]
        holders = (levels(layout.ranks("ep", peer), peer, size)[0] for peer in peers)
        received[end] = sum(_rows_once(run, layout, moe, each, end, 1, chunk) for each in holders)
    _dedup_all_to_all(run, layout, moe, "ep_inside", len(inside), of_host, spread, received[rank], times, tally)
    _etp_messages(run, layout, moe, len(inside), of_host, max(received.values()), times, tally)


def _dedup_all_to_all(
    run: RunConfig,
    layout: FoldedLayout,
    moe: MoEConfig,
    group: str,
    ranks: int,
    experts: int,
    sent: int,
    received: int,
    times: int,
    tally: Tally,
) -> None:
    """Counts; rows there and back, and their gradients; assignments there, and the gradients of probs back."""
    if ranks == 1:
        return
    tokens, dim = tokens_of(run, layout), moe.latent_dim or run.model.dim
    tally.add("all_to_all", group, (ranks + experts) * _COUNT, times)
    tally.add("all_to_all", group, sent * sent_row_bytes(run, dim, tokens.word), 2 * times)
    tally.add("all_to_all", group, received * dim * tokens.word, 2 * times)
    tally.add("all_to_all", group, sent * moe.top_k * (_PROB + _NUMBER), times)
    tally.add("all_to_all", group, received * moe.top_k * _PROB, times)


def _etp_messages(
    run: RunConfig,
    layout: FoldedLayout,
    moe: MoEConfig,
    ranks: int,
    experts: int,
    most: int,
    times: int,
    tally: Tally,
) -> None:
    """Ranks that shard an expert gather each other's rows, and sum their outputs; all are padded to the most rows."""
    tokens, dim, etp = tokens_of(run, layout), moe.latent_dim or run.model.dim, layout.size("etp")
    tally.add("all_gather", "etp", (ranks + experts) * _COUNT, times)
    tally.add("all_gather", "etp", most * sent_row_bytes(run, dim, tokens.word), 2 * times)
    tally.add("all_gather", "etp", most * moe.top_k * (_PROB + _NUMBER), times)
    tally.add("reduce_scatter", "etp", etp * most * dim * tokens.wide, 2 * times)
    tally.add("reduce_scatter", "etp", etp * most * moe.top_k * _PROB, times)


def _rows_once(
    run: RunConfig, layout: FoldedLayout, moe: MoEConfig, holders: tuple[int, ...], end: int, size: int, chunk: int
) -> int:
    """How many tokens of these ranks have an assignment on the end's rank, or on its host of ``size`` ranks."""
    number = moe.num_experts // layout.size("ep") * size
    first = layout.index("ep", end) // size * number
    spots = Counter((layout.coordinate(rank, "cp"), layout.coordinate(rank, "tp")) for rank in holders)
    return sum(
        count
        * _count_assignments(
            _tokens_of_chunk(run, layout, *spot, chunk), moe.top_k, moe.num_experts, first, first + number, once=True
        )
        for spot, count in spots.items()
    )


_Sender = Callable[[RunConfig, FoldedLayout, int, MoEConfig, int, Tally, int], None]
_SENDERS: dict[str, _Sender] = {
    "all_to_all": _all_to_all_messages,
    "all_to_all_bounded": _bounded_messages,
    "all_gather": _all_gather_messages,
    "deduplicated": _deduplicated_messages,
    "two_level": _two_level_messages,
}


# ---- tensor parallelism ----


def tp_gather(
    run: RunConfig,
    layout: FoldedLayout,
    dim: int,
    times: int,
    tally: Tally,
    again: bool = False,
    in_chunks: bool = True,
) -> None:
    """``again``: the phase is recomputed, and gathers again."""
    _gather(run, layout, dim, times * (1 + again), tally, in_chunks)
    _tp_sum(run, layout, dim, times, tally, in_chunks, backward=True)


def chunk_tokens(run: RunConfig, layout: FoldedLayout, in_chunks: bool) -> list[int]:
    """Tokens of this rank in each collective; those that have none are not sent."""
    mine, chunked = tokens_of(run, layout).mine, in_chunks and "tensor_parallel" in run.parallel.overlap
    first, *others = shard_sizes(mine, run.parallel.tp_chunks if chunked else 1)
    return [first, *filter(None, others)]


def _gather(run: RunConfig, layout: FoldedLayout, dim: int, times: int, tally: Tally, in_chunks: bool) -> None:
    for tokens in chunk_tokens(run, layout, in_chunks):
        tally.add("all_gather", "tp", tokens * dim * tokens_of(run, layout).word, times)


def _tp_sum(
    run: RunConfig, layout: FoldedLayout, dim: int, times: int, tally: Tally, in_chunks: bool, backward: bool
) -> None:
    """Of activations, or of gradients; narrow parts go by an all_to_all, each with scales of its own."""
    shared, name = tokens_of(run, layout).shared, run.precision.tp_reduce
    if name != "fp8_all_to_all":
        for tokens in chunk_tokens(run, layout, in_chunks):
            size = tokens * layout.size("tp") * dim * BYTES[run.precision.tp_reduce_format]
            tally.add("reduce_scatter", "tp", size, times)
        return
    casts = TP_REDUCE_CASTS[name]
    parts = shard_sizes(shared, layout.size("tp"))
    sent = sum(cast_bytes(casts.backward if backward else casts.forward, rows, dim) for rows in parts)
    tally.add("all_to_all", "tp", sent, times)


def tp_reduce(
    run: RunConfig,
    layout: FoldedLayout,
    dim: int,
    times: int,
    tally: Tally,
    again: bool = False,
    backward: bool = True,
    in_chunks: bool = True,
) -> None:
    """``again``: a recomputed phase repeats it; recomputation leaves out only the last operation of a phase."""
    _tp_sum(run, layout, dim, times * (1 + again), tally, in_chunks, backward=False)
    if backward:
        _gather(run, layout, dim, times, tally, in_chunks)
