"""Collectives of tensor parallelism: tokens are gathered before a sharded matmul, and its outputs summed after it.

The backward of a gather is a sum of gradients, that of a sum a gather. Sums are reduce_scatters in
`precision.tp_reduce`; parts of them that are narrowed go by an all_to_all.
"""

from __future__ import annotations

from moefold.blueprint.narrow_bytes import cast_bytes
from moefold.config.message_casts import TP_REDUCE_CASTS
from moefold.config.precision import BYTES
from moefold.config.run import RunConfig
from moefold.plan.expert_messages import Tally, tokens_of
from moefold.topology.folded_layout import FoldedLayout, shard_sizes


def tp_gather(run: RunConfig, layout: FoldedLayout, dim: int, times: int, tally: Tally, again: bool = False) -> None:
    """``again``: the phase is recomputed, and gathers again."""
    tokens = tokens_of(run, layout)
    tally.add("all_gather", "tp", tokens.mine * dim * tokens.word, times * (1 + again))
    _tp_sum(run, layout, dim, times, tally, backward=True)


def _tp_sum(run: RunConfig, layout: FoldedLayout, dim: int, times: int, tally: Tally, backward: bool) -> None:
    """Of activations, or of gradients; narrow parts go by an all_to_all, each with scales of its own."""
    shared, name = tokens_of(run, layout).shared, run.precision.tp_reduce
    if name != "fp8_all_to_all":
        tally.add("reduce_scatter", "tp", shared * dim * BYTES[run.precision.tp_reduce_format], times)
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
) -> None:
    """``again``: a recomputed phase repeats it; recomputation leaves out only the last operation of a phase."""
    tokens = tokens_of(run, layout)
    _tp_sum(run, layout, dim, times * (1 + again), tally, backward=False)
    if backward:
        tally.add("all_gather", "tp", tokens.mine * dim * tokens.word, times)
