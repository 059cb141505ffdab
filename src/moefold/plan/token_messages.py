"""What a microbatch's tokens send as they pass a part of the model: between tp, cp, ep and etp ranks.

N tokens of a microbatch, T in this rank's context share, t of those on this rank. A gather hands in t tokens and its
backward sums T; a sum hands in T, carried in float32, and its backward gathers t.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from moefold.batching.zigzag import places
from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.moe import MoEConfig
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, Problem
from moefold.topology.layout import FoldedLayout
from moefold.topology.shares import share_sizes

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
# Keys and values of a group of heads are not cut into smaller messages than this; as in `parallel/context_ring.py`.
_SMALLEST_MESSAGE = 1 << 16

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
        if count and self.layout.size(axis) > 1:
            self.calls[name, group] += count
            self.sizes[name, group] += size * count


class Tokens(NamedTuple):
    """Of a microbatch on this rank: my own, those of my context share, and bytes of an entry as it is and in a sum."""

    mine: int
    shared: int
    word: int
    wide: int


def tokens_of(run: RunConfig, layout: FoldedLayout) -> Tokens:
    tokens = run.data.micro_batch * run.data.seq_len
    shared = tokens // layout.size("cp")
    word = _BYTES[run.precision.compute]
    return Tokens(shared // layout.size("tp"), shared, word, max(4, word))


def embedding_messages(run: RunConfig, layout: FoldedLayout, times: int, tally: Tally) -> None:
    """Each rank looks up its part of the vocabulary; the sum is complete."""
    _reduce(run, layout, run.model.width, times, tally)


def loss_messages(run: RunConfig, layout: FoldedLayout, times: int, tally: Tally) -> None:
    """Tokens are gathered, each rank takes its part of the vocabulary, two numbers per token are merged."""
    tokens = tokens_of(run, layout)
    _gather(run, layout, run.model.width, times, tally)
    tally.add("all_gather", "tp", tokens.shared * tokens.wide, times)
    tally.add("all_reduce", "tp", tokens.shared * tokens.wide, times)


def block_messages(run: RunConfig, layout: FoldedLayout, rank: int, is_mixture: bool, times: int, tally: Tally) -> None:
    """One layer, forward and backward."""
    again = "attention" in run.memory.recompute
    _attention(run, layout, times, again, tally)
    if layout.size("cp") > 1:
        _context(run, layout, rank, times, again, tally)
    moe = run.model.moe
    if not is_mixture or moe is None:
        _gather(run, layout, run.model.width, times, tally, "feed_forward" in run.memory.recompute)
        _reduce(run, layout, run.model.width, times, tally)
        return
    if moe.shared_width:
        computed_again = "experts" in run.memory.recompute
        _gather(run, layout, run.model.width, times, tally, computed_again)
        _reduce(run, layout, run.model.width, times, tally, computed_again)
    _balance(run, layout, moe, times, tally)
    if layout.size("expert_block") > 1:
        if run.parallel.dispatcher == "all_to_all":
            _to_experts(run, layout, rank, moe, times, tally)
        else:
            _to_everyone(run, layout, moe, times, tally)


def _gather(run: RunConfig, layout: FoldedLayout, width: int, times: int, tally: Tally, again: bool = False) -> None:
    """``again``: the phase is computed again, and gathers again."""
    tokens = tokens_of(run, layout)
    tally.add("all_gather", "tp", tokens.mine * width * tokens.word, times * (1 + again))
    tally.add("reduce_scatter", "tp", tokens.shared * width * tokens.wide, times)


def _reduce(run: RunConfig, layout: FoldedLayout, width: int, times: int, tally: Tally, again: bool = False) -> None:
    """``again``: it is not the last thing of a phase that is computed again, which alone is left out then."""
    tokens = tokens_of(run, layout)
    tally.add("reduce_scatter", "tp", tokens.shared * width * tokens.wide, times * (1 + again))
    tally.add("all_gather", "tp", tokens.mine * width * tokens.word, times)


def _attention(run: RunConfig, layout: FoldedLayout, times: int, again: bool, tally: Tally) -> None:
    attention, width = run.model.attention, run.model.width
    if isinstance(attention, MLAConfig):
        _gather(run, layout, attention.q_latent or width, times, tally, again)
        _gather(run, layout, attention.kv_latent + attention.rope_dim, times, tally, again)
    else:
        _gather(run, layout, width, times, tally, again)
        if attention.qk_norm == "full":
            # Squares of the other ranks' heads, of queries and of keys, forward and backward.
            tokens = tokens_of(run, layout)
            tally.add("all_reduce", "tp", tokens.shared * tokens.wide, times * 2 * (2 + again))
    _reduce(run, layout, width, times, tally)


# ---- context ----


def _context(run: RunConfig, layout: FoldedLayout, rank: int, times: int, again: bool, tally: Tally) -> None:
    """The ring: tokens are dealt in zigzag, so a rank sends both chunks to ranks before it, one to those after."""
    attention, tokens, cp = run.model.attention, tokens_of(run, layout), layout.size("cp")
    if run.parallel.context.full != "ring" or (isinstance(attention, GQAConfig) and attention.window is not None):
        what = "only a ring over whole documents is counted"
        raise ConfigError(Problem("parallel.context", f"{what}, not exchanges of heads or windows", "use ring"))
    heads, entries = _keys(attention, layout.size("tp"))
    kept = tokens.shared * heads * entries * tokens.word
    slices = min(heads, max(1, kept // _SMALLEST_MESSAGE))
    place = layout.coordinate(rank, "cp")
    sent = arriving = 0
    for other in range(cp):
        if other != place:
            sent += tokens.shared // 2 * (2 if other < place else 1)
            arriving += tokens.shared // 2 * (2 if place < other else 1)
    group, calls = f"context_{cp}", slices * (cp - 1)
    rounds = 2 + again
    tally.calls["send", group] += times * calls * (rounds + 1)
    tally.sizes["send", group] += times * heads * entries * (rounds * sent * tokens.word + arriving * tokens.wide)


def _keys(attention: GQAConfig | MLAConfig, tp: int) -> tuple[int, int]:
    """Key heads of this rank, and entries of a key and a value together."""
    if isinstance(attention, MLAConfig):
        return attention.num_heads // tp, attention.nope_dim + attention.rope_dim + attention.value_dim
    return attention.num_kv_heads // tp, 2 * attention.head_dim


# ---- experts ----


def _balance(run: RunConfig, layout: FoldedLayout, moe: MoEConfig, times: int, tally: Tally) -> None:
    """Counts that a balance loss is made of, of the ranks that share the tokens or of all."""
    balance, context = moe.balance, f"context_{layout.size('cp')}"
    for coefficient, sets in (
        (balance.microbatch, 1),
        (balance.sequence, run.data.micro_batch),
        (balance.device, 1),
    ):
        if coefficient:
            for group in ("tp", context):
                tally.add("all_reduce", group, sets * moe.num_experts * 8, times)
    if balance.global_batch:
        tally.add("all_reduce", "stage", moe.num_experts * 8, times)


def _to_experts(run: RunConfig, layout: FoldedLayout, rank: int, moe: MoEConfig, times: int, tally: Tally) -> None:
    """Rows and weights there, answers back; twice, for their gradients go the other way."""
    tokens, width = tokens_of(run, layout), moe.latent_width or run.model.width
    leaving, arriving = tokens.mine * moe.top_k, arriving_rows(run, layout, rank)
    counts = moe.num_experts * 8
    if moe.capacity is None:
        tally.add("all_to_all", "ep", counts, times)
        tally.add("all_gather", "etp", counts, times)
    for rows in (leaving, arriving):
        tally.add("all_to_all", "ep", rows * width * tokens.word, 2 * times)
        tally.add("all_to_all", "ep", rows * 4, times)
    # Ranks that share an expert gather each other's rows, and add their answers up; short ones are filled up.
    most = max(arriving_rows(run, layout, peer) for peer in layout.ranks("etp", rank))
    etp = layout.size("etp")
    tally.add("all_gather", "etp", most * width * tokens.word, 2 * times)
    tally.add("all_gather", "etp", most * 4, times)
    tally.add("reduce_scatter", "etp", etp * most * width * tokens.wide, 2 * times)
    tally.add("reduce_scatter", "etp", etp * most * 4, times)


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


def _dealt(tokens: list[int], top_k: int, experts: int, first: int, stop: int) -> int:
    """How many choices of these tokens fall on experts from ``first`` to before ``stop``."""
    residues = Counter(token * top_k % experts for token in tokens)
    inside = {start: sum(first <= (start + k) % experts < stop for k in range(top_k)) for start in residues}
    return sum(count * inside[start] for start, count in residues.items())


def _to_everyone(run: RunConfig, layout: FoldedLayout, moe: MoEConfig, times: int, tally: Tally) -> None:
    """All tokens of the block are gathered with their choices; answers are summed."""
    tokens, width = tokens_of(run, layout), moe.latent_width or run.model.width
    everyone = tokens.mine * layout.size("expert_block")
    group = "expert_block"
    tally.add("all_gather", group, tokens.mine * width * tokens.word, 2 * times)
    tally.add("all_gather", group, tokens.mine * moe.top_k * 4, times)
    tally.add("all_gather", group, tokens.mine * moe.top_k * 8, times)
    tally.add("reduce_scatter", group, everyone * width * tokens.wide, 2 * times)
    tally.add("reduce_scatter", group, everyone * moe.top_k * 4, times)
