"""Collectives of tensor parallelism: tokens are gathered before a sharded matmul, and its outputs summed after it.

The backward of a gather is a sum of gradients, that of a sum a gather. Sums are reduce_scatters in
`precision.tp_reduce`; parts of them that are narrowed go by an all_to_all. With `parallel.overlap: [tensor_parallel]`
those around a layer's matmuls go in chunks, a collective each; those of the embedding and of the loss do not.
"""

from __future__ import annotations

from moefold.blueprint.narrow_bytes import cast_bytes
from moefold.config.message_casts import TP_REDUCE_CASTS
from moefold.config.precision import BYTES
from moefold.config.run import RunConfig
from moefold.plan.expert_messages import Tally, tokens_of
from moefold.topology.folded_layout import FoldedLayout, shard_sizes


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
