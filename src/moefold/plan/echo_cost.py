"""What a clone of a hot expert costs and saves (ECHO), and from how many rows on it is worth making.

A clone's weights go out in the forward and its gradients come back in the backward, in the dtype of compute, and once
more out where experts are recomputed:

    bytes each way      inputs * hidden * dim, gate and up, and down, over etp
    seconds             (2 or 3) * bytes / the link
    saved               rows moved * seconds of a row, forward and backward, on the rank that sets the layer's time

The link is the slower of those that an exchange over the ep group crosses. A rank whose experts are hot sends its
clones one after the other through its own link, so that the busiest sender counts.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from moefold.blueprint.model_shape import MoE
from moefold.config.precision import BYTES
from moefold.config.run import RunConfig
from moefold.plan.timing.constants import CURRENT, Constants
from moefold.plan.timing.throughput import dispatch_seconds, rates_of
from moefold.plan.traffic import DispatchBytes, expert_reach
from moefold.plan.workload import Workload

# A row of an expert: two matmuls with dim x 2 hidden and one with dim x hidden are three of 2 FLOPs per entry; the
# backward has twice as many.
_FLOPS_PER_ENTRY = 2 * 3 * 3


class CloneCost(NamedTuple):
    """Of one clone: bytes each way, seconds of all its messages, and rows that take as long."""

    bytes_each_way: float
    seconds: float
    break_even_rows: float


def expert_bytes(run: RunConfig) -> float:
    """Of one expert's matrices on one rank, in the dtype of compute."""
    moe = run.model.moe
    assert moe is not None
    entries = 3 * moe.expert_hidden_dim * (moe.latent_dim or run.model.dim)
    return entries / run.parallel.etp * BYTES[run.precision.compute]


def break_even_rows(bytes_each_way: float, bytes_per_second: float, row_seconds: float, messages: int = 2) -> float:
    """Rows whose time, forward and backward, is that of sending a clone's weights and gradients."""
    return messages * bytes_each_way / bytes_per_second / row_seconds


def row_seconds(dim: int, hidden: int, flops_per_second: float) -> float:
    """Of one row through one expert, forward and backward."""
    return _FLOPS_PER_ENTRY * dim * hidden / flops_per_second


def clone_seconds(workload: Workload, moe: MoE | None, c: Constants) -> float:
    """One exchange of weights, or of gradients, of one layer and microbatch."""
    if moe is None or workload.parallel.echo is None:
        return 0.0
    most = workload.clones.most_sent
    return _exchange_seconds(workload, most * expert_bytes(workload.run), c) if most else 0.0


def clone_cost(workload: Workload, row_flops_per_second: float, c: Constants) -> CloneCost:
    """Of one clone of this workload's experts, at this rate of matmuls."""
    run = workload.run
    assert run.model.moe is not None
    each_way, messages = expert_bytes(run), 3 if "experts" in workload.recompute else 2
    seconds = messages * _exchange_seconds(workload, each_way, c)
    hidden, dim = run.model.moe.expert_hidden_dim // run.parallel.etp, run.model.moe.latent_dim or run.model.dim
    return CloneCost(each_way, seconds, seconds / row_seconds(dim, hidden, row_flops_per_second))


def least_rows(workload: Workload, c: Constants = CURRENT) -> int:
    """From how many rows on a clone of this workload saves time: what `parallel.echo.min_rows` should be."""
    rates = rates_of(workload, c, workload.run.data.seq_len)
    return max(1, ceil(clone_cost(workload, 1 / rates.grouped, c).break_even_rows))


def clone_bytes(run: RunConfig) -> float:
    """Weights of all clones that a rank may have in one layer, from its forward to its backward."""
    echo = run.parallel.echo
    return 0.0 if echo is None else echo.slots * expert_bytes(run)


def _exchange_seconds(workload: Workload, sent: float, c: Constants) -> float:
    """Between domains if the ep group has several: which ranks have free slots is not known."""
    where = expert_reach(workload)
    crosses = where.domains > 1
    return dispatch_seconds(DispatchBytes(0.0 if crosses else sent, sent if crosses else 0.0), workload, c)
