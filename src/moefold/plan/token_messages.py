"""Collectives of a microbatch's tokens in each part of the model: over tp, cp, ep and etp ranks.

Of the T tokens of a microbatch a rank's context shard has S, of which t are on this rank. An all_gather takes t tokens
and its backward reduces S; a reduce_scatter takes S, in float32, and its backward gathers t.
"""

from __future__ import annotations

from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.moe import MoEConfig
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, Problem
from moefold.plan.collective_tally import Tally, tokens_of
from moefold.plan.expert_messages import expert_messages
from moefold.topology.folded_layout import FoldedLayout

# Keys and values of a group of heads are not cut into smaller messages than this; as in `parallel/ring_attention.py`.
_SMALLEST_MESSAGE = 1 << 16


def embedding_messages(run: RunConfig, layout: FoldedLayout, times: int, tally: Tally) -> None:
    """Each rank looks up its shard of the vocabulary; the sum over ranks is the embedding."""
    _reduce(run, layout, run.model.dim, times, tally)


def loss_messages(run: RunConfig, layout: FoldedLayout, times: int, tally: Tally) -> None:
    """Tokens are gathered, each rank has its shard of the vocabulary, two numbers per token are reduced."""
    tokens = tokens_of(run, layout)
    _gather(run, layout, run.model.dim, times, tally)
    tally.add("all_gather", "tp", tokens.shared * tokens.wide, times)
    tally.add("all_reduce", "tp", tokens.shared * tokens.wide, times)


def block_messages(run: RunConfig, layout: FoldedLayout, rank: int, is_moe: bool, times: int, tally: Tally) -> None:
    """One layer, forward and backward."""
    again = "attention" in run.memory.recompute
    _attention(run, layout, times, again, tally)
    if layout.size("cp") > 1:
        _context(run, layout, rank, times, again, tally)
    moe = run.model.moe
    if not is_moe or moe is None:
        _gather(run, layout, run.model.dim, times, tally, "feed_forward" in run.memory.recompute)
        _reduce(run, layout, run.model.dim, times, tally)
        return
    if moe.shared_hidden_dim:
        recomputed = "experts" in run.memory.recompute
        _gather(run, layout, run.model.dim, times, tally, recomputed)
        _reduce(run, layout, run.model.dim, times, tally, recomputed)
    _balance(run, layout, moe, times, tally)
    expert_messages(run, layout, rank, moe, times, tally)


def _gather(run: RunConfig, layout: FoldedLayout, dim: int, times: int, tally: Tally, again: bool = False) -> None:
    """``again``: the phase is recomputed, and gathers again."""
    tokens = tokens_of(run, layout)
    tally.add("all_gather", "tp", tokens.mine * dim * tokens.word, times * (1 + again))
    tally.add("reduce_scatter", "tp", tokens.shared * dim * tokens.wide, times)


def _reduce(run: RunConfig, layout: FoldedLayout, dim: int, times: int, tally: Tally, again: bool = False) -> None:
    """``again``: a recomputed phase repeats it; recomputation leaves out only the last operation of a phase."""
    tokens = tokens_of(run, layout)
    tally.add("reduce_scatter", "tp", tokens.shared * dim * tokens.wide, times * (1 + again))
    tally.add("all_gather", "tp", tokens.mine * dim * tokens.word, times)


def _attention(run: RunConfig, layout: FoldedLayout, times: int, again: bool, tally: Tally) -> None:
    attention, dim = run.model.attention, run.model.dim
    if isinstance(attention, MLAConfig):
        _gather(run, layout, attention.q_latent or dim, times, tally, again)
        _gather(run, layout, attention.kv_latent + attention.rope_dim, times, tally, again)
    else:
        _gather(run, layout, dim, times, tally, again)
        if attention.qk_norm == "full":
            # Squares of the other ranks' heads, of queries and of keys, forward and backward.
            tokens = tokens_of(run, layout)
            tally.add("all_reduce", "tp", tokens.shared * tokens.wide, times * 2 * (2 + again))
    _reduce(run, layout, dim, times, tally)


# ---- context ----


def _context(run: RunConfig, layout: FoldedLayout, rank: int, times: int, again: bool, tally: Tally) -> None:
    """The ring: tokens are sharded in zigzag, so a rank sends both chunks to ranks before it, one to those after."""
    attention, tokens, cp = run.model.attention, tokens_of(run, layout), layout.size("cp")
    if run.parallel.context.full != "ring" or (isinstance(attention, GQAConfig) and attention.window is not None):
        what = "only a ring over whole documents is counted"
        raise ConfigError(Problem("parallel.context", f"{what}, not all-to-all over heads or windows", "use ring"))
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
    """Counts for the balance losses, summed over the ranks that share the tokens or over all."""
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
