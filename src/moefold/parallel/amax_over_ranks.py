"""The largest magnitudes of tensors whose parts are on several ranks, for scales per tensor.

Under tensor parallelism a rank holds rows or columns of a matrix, or its share of the tokens: its matmuls need the amax
of the whole before they narrow, so ranks compare one number per matrix inside of the forward and the backward pass.

Amaxes for the scales of later steps (`precision/amax_history.py`) are compared once per step, over all ranks and for
the whole model in one message: whether ranks differ in tokens, experts, shards or pipeline stages, or hold a layer
twice, does not matter then.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod

import torch
from torch import Tensor

from moefold.blueprint.narrow_matmuls import AMAX_SUFFIX, delayed_weights
from moefold.comm.collectives import all_reduce_max
from moefold.comm.process_groups import Group, Groups
from moefold.config.run import RunConfig
from moefold.precision.amax import ReduceAmax
from moefold.precision.amax_history import AmaxHistory


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
