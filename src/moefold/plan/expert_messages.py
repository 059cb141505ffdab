"""What tokens send to reach their experts and come back, by dispatcher, forward and backward.

N tokens of a microbatch, t of those on this rank, K choices per token, E experts, P ranks of a group, D width.

Routing is taken as the balanced router does it: choice k of token n goes to expert (n * K + k) mod E. Then every count
is known, and the bytes are those of a real step, to the byte.

    all_to_all      a row per choice there and back, its weight beside it
    all_gather      every token of the block to everyone; answers are summed in float32
    deduplicated    a row per token and rank that it has a choice on, its K weights and K numbers beside it
    two_level       a row per token and host, then a row per token and rank of that host
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate

from moefold.batching.zigzag import places
from moefold.config.moe import MoEConfig
from moefold.config.run import RunConfig
from moefold.plan.collective_tally import Tally, tokens_of
from moefold.plan.dispatch_choice import dispatcher_in_use
from moefold.topology.folded_layout import FoldedLayout, levels
from moefold.topology.shares import share_sizes

# Of a routing weight, of an expert's number as it travels, and of a count.
_WEIGHT, _NUMBER, _COUNT = 4, 2, 8


def expert_messages(run: RunConfig, layout: FoldedLayout, rank: int, moe: MoEConfig, times: int, tally: Tally) -> None:
    """``times``: layers and microbatches together."""
    if layout.size("expert_block") > 1:
        _SENDERS[dispatcher_in_use(run)](run, layout, rank, moe, times, tally)


def _to_experts(run: RunConfig, layout: FoldedLayout, rank: int, moe: MoEConfig, times: int, tally: Tally) -> None:
    """Rows and weights there, answers back; twice, for their gradients go the other way."""
    tokens, dim = tokens_of(run, layout), moe.latent_dim or run.model.dim
    leaving, arriving = tokens.mine * moe.top_k, arriving_rows(run, layout, rank)
    counts = moe.num_experts * _COUNT
    if moe.capacity is None:
        tally.add("all_to_all", "ep", counts, times)
        tally.add("all_gather", "etp", counts, times)
    for rows in (leaving, arriving):
        tally.add("all_to_all", "ep", rows * dim * tokens.word, 2 * times)
        tally.add("all_to_all", "ep", rows * _WEIGHT, times)
    # Ranks that share an expert gather each other's rows, and add their answers up; short ones are filled up.
    most = max(arriving_rows(run, layout, peer) for peer in layout.ranks("etp", rank))
    etp = layout.size("etp")
    tally.add("all_gather", "etp", most * dim * tokens.word, 2 * times)
    tally.add("all_gather", "etp", most * _WEIGHT, times)
    tally.add("reduce_scatter", "etp", etp * most * dim * tokens.wide, 2 * times)
    tally.add("reduce_scatter", "etp", etp * most * _WEIGHT, times)


def arriving_rows(run: RunConfig, layout: FoldedLayout, rank: int) -> int:
    """Rows that come to this rank from its ep peers, if choices are dealt in turn: n * K + k to that number mod E."""
    assert run.model.moe is not None
    experts, top_k = run.model.moe.num_experts, run.model.moe.top_k
    each = experts // layout.size("ep")
    first = layout.index("ep", rank) * each
    by_place: dict[tuple[int, int], int] = {}
    rows = 0
    for peer in layout.ranks("ep", rank):
        place = layout.coordinate(peer, "cp"), layout.coordinate(peer, "tp")
        if place not in by_place:
            by_place[place] = _dealt(_held(run, layout, *place), top_k, experts, first, first + each)
        rows += by_place[place]
    return rows


def _held(run: RunConfig, layout: FoldedLayout, context: int, shard: int) -> list[int]:
    """The numbers of a rank's tokens in their microbatch."""
    lengths, cp, tp = (run.data.seq_len,) * run.data.micro_batch, layout.size("cp"), layout.size("tp")
    shared = [token for start, stop in places(lengths, context, cp) for token in range(start, stop)]
    starts = (0, *accumulate(share_sizes(len(shared), tp)))
    return shared[starts[shard] : starts[shard + 1]]


def _dealt(tokens: list[int], top_k: int, experts: int, first: int, stop: int, once: bool = False) -> int:
    """How many choices of these tokens fall on experts from ``first`` to before ``stop``; ``once``: how many tokens."""
    residues = Counter(token * top_k % experts for token in tokens)
    inside = {start: sum(first <= (start + k) % experts < stop for k in range(top_k)) for start in residues}
    return sum(count * (inside[start] > 0 if once else inside[start]) for start, count in residues.items())


def _to_everyone(run: RunConfig, layout: FoldedLayout, rank: int, moe: MoEConfig, times: int, tally: Tally) -> None:
    """All tokens of the block are gathered with their choices; answers are summed."""
    tokens, dim = tokens_of(run, layout), moe.latent_dim or run.model.dim
    everyone = tokens.mine * layout.size("expert_block")
    group = "expert_block"
    tally.add("all_gather", group, tokens.mine * dim * tokens.word, 2 * times)
    tally.add("all_gather", group, tokens.mine * moe.top_k * _WEIGHT, times)
    tally.add("all_gather", group, tokens.mine * moe.top_k * 8, times)
    tally.add("reduce_scatter", group, everyone * dim * tokens.wide, 2 * times)
    tally.add("reduce_scatter", group, everyone * moe.top_k * _WEIGHT, times)


# ---- rows that go once ----


def _direct(run: RunConfig, layout: FoldedLayout, rank: int, moe: MoEConfig, times: int, tally: Tally) -> None:
    """One hop over the ep group."""
    peers = layout.ranks("ep", rank)
    leaving = sum(_rows_once(run, layout, moe, (rank,), peer, 1) for peer in peers)
    arriving = {
        end: sum(_rows_once(run, layout, moe, (peer,), end, 1) for peer in layout.ranks("ep", end))
        for end in layout.ranks("etp", rank)
    }
    _hop(run, layout, moe, "ep", len(peers), moe.num_experts, leaving, arriving[rank], times, tally)
    _split(run, layout, moe, len(peers), moe.num_experts, max(arriving.values()), times, tally)


def _two_level(run: RunConfig, layout: FoldedLayout, rank: int, moe: MoEConfig, times: int, tally: Tally) -> None:
    """One hop across hosts, and one inside for the tokens of all hosts' ranks that crossed to this one."""
    size = run.parallel.ep_inner
    across, inside = levels(layout.ranks("ep", rank), rank, size)
    leaving = sum(_rows_once(run, layout, moe, (rank,), peer, size) for peer in across)
    crossed = sum(_rows_once(run, layout, moe, (peer,), rank, size) for peer in across)
    of_host = moe.num_experts // len(across)
    _hop(run, layout, moe, "ep_across", len(across), moe.num_experts, leaving, crossed, times, tally)
    spread = sum(_rows_once(run, layout, moe, across, peer, 1) for peer in inside)
    arriving = {}
    for end in layout.ranks("etp", rank):
        peers = levels(layout.ranks("ep", end), end, size)[1]
        holders = (levels(layout.ranks("ep", peer), peer, size)[0] for peer in peers)
        arriving[end] = sum(_rows_once(run, layout, moe, each, end, 1) for each in holders)
    _hop(run, layout, moe, "ep_inside", len(inside), of_host, spread, arriving[rank], times, tally)
    _split(run, layout, moe, len(inside), of_host, max(arriving.values()), times, tally)


def _hop(
    run: RunConfig,
    layout: FoldedLayout,
    moe: MoEConfig,
    group: str,
    ranks: int,
    experts: int,
    leaving: int,
    arriving: int,
    times: int,
    tally: Tally,
) -> None:
    """Counts; rows there and back, and their gradients; choices there, and their weights' gradients back."""
    if ranks == 1:
        return
    tokens, dim = tokens_of(run, layout), moe.latent_dim or run.model.dim
    tally.add("all_to_all", group, (ranks + experts) * _COUNT, times)
    for rows in (leaving, arriving):
        tally.add("all_to_all", group, rows * dim * tokens.word, 2 * times)
    tally.add("all_to_all", group, leaving * moe.top_k * (_WEIGHT + _NUMBER), times)
    tally.add("all_to_all", group, arriving * moe.top_k * _WEIGHT, times)


def _split(
    run: RunConfig,
    layout: FoldedLayout,
    moe: MoEConfig,
    ranks: int,
    experts: int,
    most: int,
    times: int,
    tally: Tally,
) -> None:
    """Ranks that share an expert gather each other's rows, and add their answers up; short ones are filled up."""
    tokens, dim, etp = tokens_of(run, layout), moe.latent_dim or run.model.dim, layout.size("etp")
    tally.add("all_gather", "etp", (ranks + experts) * _COUNT, times)
    tally.add("all_gather", "etp", most * dim * tokens.word, 2 * times)
    tally.add("all_gather", "etp", most * moe.top_k * (_WEIGHT + _NUMBER), times)
    tally.add("reduce_scatter", "etp", etp * most * dim * tokens.wide, 2 * times)
    tally.add("reduce_scatter", "etp", etp * most * moe.top_k * _WEIGHT, times)


def _rows_once(
    run: RunConfig, layout: FoldedLayout, moe: MoEConfig, holders: tuple[int, ...], end: int, size: int
) -> int:
    """How many tokens of these ranks have a choice on the end's rank, or on its host of ``size`` ranks."""
    number = moe.num_experts // layout.size("ep") * size
    first = layout.index("ep", end) // size * number
    spots = Counter((layout.coordinate(rank, "cp"), layout.coordinate(rank, "tp")) for rank in holders)
    return sum(
        count * _dealt(_held(run, layout, *spot), moe.top_k, moe.num_experts, first, first + number, once=True)
        for spot, count in spots.items()
    )


_Sender = Callable[[RunConfig, FoldedLayout, int, MoEConfig, int, Tally], None]
_SENDERS: dict[str, _Sender] = {
    "all_to_all": _to_experts,
    "all_gather": _to_everyone,
    "deduplicated": _direct,
    "two_level": _two_level,
}
