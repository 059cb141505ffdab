"""Largest attention logits over all ranks: every query against the keys of its whole document, then one maximum.

Under context parallelism a rank has some tokens of each document. For the maximum its queries need the keys of all of
them, which are gathered in document order, whichever way attention itself brings them together (ring, all-to-all or
both). So every way observes the same logits. With expert or pipeline parallelism nothing changes, tensor-parallel ranks
have heads of their own, and data-parallel ranks see other documents: one all-reduce at the end of the step covers all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from moefold.attention.core import AttentionCore
from moefold.attention.max_logits import GatherKeys, LogitMaxima, ObservedCore, SeenKeys, keys_here
from moefold.comm.collectives import all_gather_no_grad, all_reduce_max
from moefold.comm.process_groups import Groups
from moefold.nn.batch import Batch
from moefold.parallel.ring_plan import token_runs


def observer(groups: Groups, maxima: LogitMaxima) -> Callable[[AttentionCore, int], AttentionCore]:
    """From a core and the number of its block to the same core with its logits observed."""
    gather: GatherKeys = keys_here if max(groups.contexts) == 1 else partial(gather_keys, groups)
    return lambda core, block: ObservedCore(core, block, maxima, gather)


def gather_keys(groups: Groups, k_SJC: Tensor, batch: Batch) -> SeenKeys:
    if batch.context_size == 1 or batch.context_index is None:
        return keys_here(k_SJC, batch)
    gathered_TJC = all_gather_no_grad(k_SJC, batch.held_sizes, groups.contexts[batch.context_size])
    k_TJC = torch.empty_like(gathered_TJC).index_copy_(0, batch.order_T, gathered_TJC)
    return SeenKeys(k_TJC, token_runs(batch.lengths, (batch.context_index,), batch.context_size))


def over_ranks(observed: Mapping[int, Tensor], groups: Groups, blocks: int, heads: int, nothing: Tensor) -> Tensor:
    """[L, H]: of every block and head of the model, the same on all ranks; -inf where nothing was observed.

    ``nothing`` is of the dtype and on the device of the result.
    """
    max_LH = nothing.new_full((blocks, heads), -torch.inf)
    tp = groups["tp"]
    each = heads // tp.size
    for block, max_h in observed.items():
        max_LH[block, tp.index * each : (tp.index + 1) * each] = max_h
    return all_reduce_max(max_LH, groups["world"])
