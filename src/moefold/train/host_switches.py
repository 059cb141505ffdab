"""What a rank's process does beside the step, each by a switch of ``train.host``: when Python collects garbage, and on
which cores the rank runs.

**Garbage.** Python looks for reference cycles whenever it has allocated enough objects, at another moment on every
rank. The ranks of a collective then wait for whichever rank is collecting, so a step of many ranks nearly always waits
for one of them. With ``gc: manual`` what was made at the start is frozen, automatic collection is off, and all ranks
collect after the same steps, ``gc_every`` of them apart. Reference counting goes on freeing everything else at once.

**Cores.** `comm/core_binding.py`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from moefold.comm.core_binding import (
    bind_process,
    cores_by_gpu,
    node_of_gpu,
    read_nodes,
    share_of_cores,
)
from moefold.config.train import HostConfig


@contextmanager
def garbage_collection(host: HostConfig) -> Iterator[Callable[[int], None]]:
    """While it lasts, garbage is collected as ``host`` says; yields what is to be called after every step."""
    if host.gc == "automatic":
        yield lambda step: None
        return
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()

    def after_step(step: int) -> None:
        if step % host.gc_every == 0:
            gc.collect()

    try:
        yield after_step
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def bind_rank(host: HostConfig, local_rank: int, local_world: int, device: torch.device) -> tuple[int, ...] | None:
    """Bind this process, the ``local_rank``-th of a host's ranks; returns its cores, None where it stays unbound."""
    if host.bind == "none":
        return None
    nodes = read_nodes(os.sched_getaffinity(0))
    if host.bind == "gpu" and device.type == "cuda":
        cores = cores_by_gpu(nodes, [_node_of(gpu) for gpu in range(local_world)], local_rank)
    else:
        cores = share_of_cores(list(nodes.values()), local_rank, local_world)
    bind_process(cores)
    return cores


def _node_of(gpu: int) -> int | None:
    properties = torch.cuda.get_device_properties(gpu)
    domain, bus, device = (getattr(properties, f"pci_{name}_id", 0) for name in ("domain", "bus", "device"))
    return node_of_gpu(f"{domain:04x}:{bus:02x}:{device:02x}.0")
