"""Peak memory of a rank, the memory that it may use, a GPU's or its host's, and what to say when it is not enough."""

from __future__ import annotations

import os
import resource

import torch

from moefold.comm.heartbeat import Pulse
from moefold.units import format_bytes


def memory_used(device: torch.device) -> int:
    """Peak memory of this process so far: the GPU's, or the host's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def capacity_bytes(device: torch.device) -> int:
    """Of a host the whole memory: how many ranks share it is not known here."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def out_of_memory(rank: int, pulse: Pulse, error: BaseException) -> str | None:
    """Where this rank was and how much it held, if host memory is what it lacks; torch raises RuntimeError then."""
    if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    why = " ".join(str(error).split())
    return (
        f"rank {rank} is out of memory in step {pulse.step}, {pulse.phase}, with a peak of "
        f"{format_bytes(peak)} resident" + (f": {why}" if why else "")
    )
