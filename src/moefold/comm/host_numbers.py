"""Sums over ranks of a few integers that the host knows: counts, flags, a number of rank 0.

NCCL takes tensors of GPUs only, gloo those of CPUs. So the integers travel on the device that the group's backend
takes, and come back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.process_groups import Group


def all_reduce_ints(values: Sequence[int], group: Group) -> list[int]:
    """Each number summed over the ranks of the group; the host waits for the result."""
    if group.alone:
        return list(values)
    return [int(x) for x in all_reduce_no_grad(torch.tensor(values, device=device_of(group)), group).tolist()]


def device_of(group: Group) -> torch.device:
    """Where tensors for this group's collectives must be."""
    if dist.get_backend(group.handle) == dist.Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
