"""What tests of several ranks share: forked ranks, and their groups under a layout."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor

from moefold.comm.process_groups import Groups, Ledger
from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ParallelConfig
from moefold.moe.dispatch.base import ExpertInput
from moefold.parallel.parallelize import uses_comm_stream
from moefold.topology.folded_layout import fold


def on_ranks(work: Callable[[Groups], Any], world: int, **degrees: Any) -> list[Any]:
    """Run ``work(groups)`` on every rank of a layout; an assertion that fails on a rank fails here.

    By gloo unless ``cpu_exchange`` says otherwise: an exchange is one operation, as it is on GPUs. ``degrees`` say what
    overlaps too, because two threads must not share a process group.
    """
    parallel = ParallelConfig(**{"cpu_exchange": "gloo", **degrees})
    layout = fold(parallel, world)

    def live(rank: int) -> Any:
        return work(
            Groups(
                layout,
                rank,
                Ledger(),
                timedelta(seconds=120),
                ep_inner=parallel.ep_inner,
                ranks_per_host=parallel.ranks_per_host,
                own_stream=uses_comm_stream(parallel),
                beside_tp="tensor_parallel" in parallel.overlap,
                beside_contexts="ulysses" in parallel.overlap,
                share_memory=parallel.cpu_exchange == "shared_memory",
            )
        )

    return spawn_ranks(live, world, seconds=300)


def multiplied(arrived: ExpertInput, factor_e: Tensor) -> Tensor:
    """What experts that only multiply their rows by a number would answer."""
    expert_SK, weight_SK, kept_SK, _ = arrived.assignments
    if kept_SK is not None:
        expert_SK, weight_SK = expert_SK.where(kept_SK, 0), weight_SK * kept_SK
    return arrived.rows_RL * (factor_e[expert_SK] * weight_SK).sum(1, keepdim=True)


class NotTried(Exception):
    """What this machine lacks for an attack."""
