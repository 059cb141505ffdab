"""How many rows the buffers of `all_to_all_bounded` have, from the configuration alone.

t tokens of a rank at most, K experts per token, W ranks of an ep group, each with e experts that etp ranks share. With
even routing a rank sends t K / W rows to each peer, and a rank computes t K etp rows: those of its peers, and those
that ranks of the same experts gather from theirs.

    pair    pair_bound * t K / W, at most t * min(K, e): the experts of a token differ
    rank    row_bound * t K etp, at most what all pairs can bring

A pair is a smaller sample than a rank, so it strays further from its mean: its bound must be the larger one. It costs
bytes of messages, which are never saved; the bound of the rank is what the experts compute and save.

With ``parallel.exchange_chunks`` all of this is of one chunk, and t its tokens at most.

Every pair has one row more, the last, which stays empty: assignments that were dropped, and rows past the last
expert's, read zeros there.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from moefold.config.run import RunConfig


class RowBounds(NamedTuple):
    """Rows of each pair's part of a message, its empty one included, and rows that the experts of a rank compute."""

    pair: int
    rank: int


def bounds_rows(run: RunConfig) -> bool:
    """Whether the run's dispatcher has buffers of these sizes."""
    return run.model.moe is not None and run.parallel.dispatcher == "all_to_all_bounded"


def row_bounds(run: RunConfig, tokens: int) -> RowBounds:
    """Of one exchange. ``tokens``: the most of a microbatch that a rank holds."""
    moe, parallel = run.model.moe, run.parallel
    assert moe is not None
    tokens = ceil(tokens / parallel.exchange_chunks)
    local = moe.num_experts // parallel.ep
    # Experts that choose tokens may all choose the same one.
    most = local if moe.router.kind == "expert_choice" else min(moe.top_k, local)
    rows = tokens * moe.top_k
    pair = max(1, min(ceil(parallel.pair_bound * rows / parallel.ep), tokens * most))
    rank = max(1, min(ceil(parallel.row_bound * rows * parallel.etp), pair * parallel.ep * parallel.etp))
    return RowBounds(pair + 1, rank)
