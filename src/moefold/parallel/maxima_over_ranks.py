"""Maxima over ranks: amaxes, for the scales of tensors whose parts are on several ranks, and largest attention logits.

**Amaxes.** Under tensor parallelism a rank holds rows or columns of a matrix, or its share of the tokens: its matmuls
need the amax of the whole before they narrow, so ranks compare one number per matrix inside of the forward and the
backward pass. Amaxes for the scales of later steps (`precision/amax_history.py`) are compared once per step, over all
ranks and for the whole model in one message: whether ranks differ in tokens, experts, shards or pipeline stages, or
hold a layer twice, does not matter then.

**Logits.** Every query is observed against the keys of its whole document, then one maximum is taken over all ranks.
Under context parallelism a rank has some tokens of each document. For the maximum its queries need the keys of all of
them, which are gathered in document order, whichever way attention itself brings them together (ring, all-to-all or
both). So every way observes the same logits. With expert or pipeline parallelism nothing changes, tensor-parallel ranks
have heads of their own, and data-parallel ranks see other documents: one all-reduce at the end of the step covers all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod

import torch
from torch import Tensor

from moefold.attention.core import AttentionCore
from moefold.attention.max_logits import GatherKeys, LogitMaxima, ObservedCore, SeenKeys, keys_here
from moefold.blueprint.narrow_matmuls import AMAX_SUFFIX, delayed_weights
from moefold.comm.collectives import all_gather_no_grad, all_reduce_max
from moefold.comm.process_groups import Group, Groups
from moefold.config.run import RunConfig
from moefold.nn.batch import Batch
from moefold.parallel.ring_plan import token_runs
from moefold.precision.amax import ReduceAmax
from moefold.precision.amax_history import AmaxHistory

# ---- amaxes ----


def reduce_amax(amax: Tensor, group: Group) -> Tensor:
    """NaN on one rank is NaN on all: a maximum of NaN and a number may be either, and infinity is larger than all."""
    largest = all_reduce_max(torch.where(torch.isnan(amax), torch.inf, amax), group)
    return torch.where(torch.isinf(largest), torch.nan, largest)


def over_axis(groups: Groups, axis: str) -> ReduceAmax | None:
    return None if groups[axis].alone else partial(reduce_amax, group=groups[axis])


@torch.no_grad()
def push_amaxes(histories: Mapping[str, AmaxHistory], run: RunConfig, groups: Groups, device: torch.device) -> None:
    """At the end of a step: its largest amaxes over all ranks are put in front of the histories."""
    names = {weight.name + AMAX_SUFFIX: 2 + prod(weight.shape[:-2]) for weight in delayed_weights(run)}
    parts = [
        histories[name].noted() if name in histories else torch.zeros(size, device=device)
        for name, size in names.items()
    ]
    largest = all_reduce_max(torch.cat(parts), groups["world"])
    for name, amaxes in zip(names, largest.split(list(names.values())), strict=True):
        if name in histories:
            histories[name].push(amaxes)


# ---- logits ----


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
