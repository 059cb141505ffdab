"""Which cores a rank runs on: its share of the host's cores, or those next to its GPU (``train.host.bind``).

Unbound, the scheduler moves ranks between cores and, on a host with several memory nodes, away from the memory they
have filled. Bound, the ranks of a host get runs of neighbouring cores, a memory node's ranks its own cores; a GPU's
rank gets a share of the cores of the node that the GPU is attached to. What the kernel says is read from /sys; only
cores that the process may use (a container's, a scheduler's) are given away.

The kernel places memory on the node of the core that first writes it, so binding before a model is built binds its
memory too.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from moefold.errors import BackendError

_SYS = Path("/sys")


def share_of_cores(nodes: Sequence[Sequence[int]], local_rank: int, local_world: int) -> tuple[int, ...]:
    """The cores of one of ``local_world`` ranks: a run of the cores of all memory nodes, node after node.

    With more ranks than cores, neighbours share a core.
    """
    cores = [core for node in nodes for core in node]
    first, last = local_rank * len(cores) // local_world, (local_rank + 1) * len(cores) // local_world
    return tuple(cores[first : max(last, first + 1)])


def cores_by_gpu(
    nodes: Mapping[int, Sequence[int]], node_of_gpus: Sequence[int | None], local_rank: int
) -> tuple[int, ...]:
    """The cores of the rank of GPU ``local_rank``: its share of its node's, where other GPUs have ranks too.

    A GPU of which the node is not known (-1 in /sys: a host with one node) has a share of all cores.
    """
    node = node_of_gpus[local_rank]
    if node is None or node not in nodes:
        return share_of_cores(list(nodes.values()), local_rank, len(node_of_gpus))
    neighbours = [gpu for gpu, other in enumerate(node_of_gpus) if other == node]
    return share_of_cores([nodes[node]], neighbours.index(local_rank), len(neighbours))


def read_nodes(allowed: Collection[int], sys: Path = _SYS) -> dict[int, tuple[int, ...]]:
    """Cores of every memory node that the process may use; one node where the kernel tells of none."""
    found: dict[int, tuple[int, ...]] = {}
    for folder in (sys / "devices" / "system" / "node").glob("node[0-9]*"):
        cores = tuple(core for core in parse_cores(_text(folder / "cpulist")) if core in allowed)
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return dict(sorted(found.items())) or {0: tuple(sorted(allowed))}


def parse_cores(text: str) -> list[int]:
    """The kernel's notation: ``0-3,8,10-11``."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.extend(range(int(first), int(last or first) + 1))
    return found


def node_of_gpu(pci_address: str, sys: Path = _SYS) -> int | None:
    """The memory node that a GPU is attached to; None where the kernel does not know."""
    text = _text(sys / "bus" / "pci" / "devices" / pci_address.lower() / "numa_node").strip()
    node = int(text) if text.removeprefix("-").isdecimal() else -1
    return node if node >= 0 else None


def bind_process(cores: Sequence[int]) -> None:
    """All threads of this process, those of its process groups too; threads that they start inherit it."""
    if not hasattr(os, "sched_setaffinity"):
        raise BackendError("train.host.bind: this system cannot bind a process to cores; use none")
    for thread in os.listdir("/proc/self/task"):
        # A thread may end meanwhile.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
