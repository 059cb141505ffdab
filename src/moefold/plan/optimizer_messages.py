"""What an optimizer sends in a step: Muon's matrices to their owners and back, and the largest logits of QK-clip.

Muon orthogonalises whole matrices, of which every rank of a stage holds parts; who sends what is in the dealing that
the trainer uses too (`blueprint/muon_matrices.py`). QK-clip looks at the logits of all heads of all ranks.
"""

from __future__ import annotations

from math import prod

from moefold.blueprint.muon_matrices import DealtMatrix, Spans, deal
from moefold.config.attention import MLAConfig
from moefold.config.precision import BYTES
from moefold.config.run import RunConfig
from moefold.plan.expert_messages import Tally, tokens_of
from moefold.plan.stage_contents import muon_parameters
from moefold.topology.folded_layout import FoldedLayout


def optimizer_messages(run: RunConfig, layout: FoldedLayout, rank: int, tally: Tally) -> None:
    if run.optim.qk_clip is not None:
        blocks = run.model.num_layers + run.model.num_mtp
        tally.add("all_reduce", "world", blocks * run.model.attention.num_heads * _wide(run.precision.compute))
    if run.optim.algorithm == "muon":
        _muon(run, layout, rank, tally)


def gathered_keys(run: RunConfig, layout: FoldedLayout, times: int, tally: Tally) -> None:
    """QK-clip of a context shard's queries needs the keys of all shards."""
    if run.optim.qk_clip is None:
        return
    attention, tokens, tp = run.model.attention, tokens_of(run, layout), layout.size("tp")
    if isinstance(attention, MLAConfig):
        entries = attention.num_heads // tp * (attention.nope_dim + attention.rope_dim)
    else:
        entries = attention.num_kv_heads // tp * attention.head_dim
    tally.add("all_gather", f"context_{layout.size('cp')}", tokens.shared * entries * tokens.word, times)


def _muon(run: RunConfig, layout: FoldedLayout, rank: int, tally: Tally) -> None:
    """Per bucket one all-to-all to the owners and one back, unless nobody sends anything."""
    me = layout.ranks("stage", rank).index(rank)
    each = 8 if run.precision.params == "float64" else BYTES[run.optim.muon.compute]
    for bucket in deal(muon_parameters(run, layout, rank), run.optim.muon.iterations).matrices:
        if all(matrix.stays for matrix in bucket):
            continue
        tally.add("all_to_all", "stage", each * sum(_sent(matrix, me) for matrix in bucket))
        tally.add("all_to_all", "stage", each * sum(_sent_back(matrix, me) for matrix in bucket))


def _sent(matrix: DealtMatrix, me: int) -> int:
    if me == matrix.owner:
        return 0
    return sum(_size(part) for part, holders in matrix.parts if me in holders and me == matrix.source(holders))


def _sent_back(matrix: DealtMatrix, me: int) -> int:
    """To every holder but the owner, replicas included."""
    if me != matrix.owner:
        return 0
    return sum(_size(part) * sum(holder != me for holder in holders) for part, holders in matrix.parts)


def _size(part: Spans) -> int:
    return prod(stop - start for start, stop in part)


def _wide(compute: str) -> int:
    """Of a logit: at least float32."""
    return 8 if compute == "float64" else 4
