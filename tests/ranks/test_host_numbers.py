"""Integers of the host, summed over ranks on the device that the group's backend takes."""

from __future__ import annotations

from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist

from moefold.comm import collectives
from moefold.comm.collectives import all_reduce_ints, device_of
from moefold.comm.process_groups import Groups, Ledger
from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ParallelConfig
from moefold.topology.folded_layout import fold


def _sums(rank: int) -> list[object]:
    groups = Groups(fold(ParallelConfig(tp=2), 2), rank, Ledger(), timedelta(seconds=120))
    found: list[object] = [all_reduce_ints((rank, 10), groups["tp"]), all_reduce_ints((rank, 7), groups["dp"])]
    found.append(str(device_of(groups["tp"])))
    with patch.object(dist, "get_backend", lambda group: "nccl"), patch.object(torch.cuda, "current_device", lambda: 3):
        found.append(str(collectives.device_of(groups["tp"])))
    return found


def test_sums_travel_on_the_backends_device() -> None:
    first, second = spawn_ranks(_sums, 2)
    assert first == [[1, 20], [0, 7], "cpu", "cuda:3"] and second[:2] == [[1, 20], [1, 7]]
