"""Garbage collection at steps, and cores by rank: what is computed from data, and what it does to a process."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from moefold.comm.core_binding import (
    bind_process,
    cores_by_gpu,
    node_of_gpu,
    parse_cores,
    read_nodes,
    share_of_cores,
)
from moefold.comm.launchers import Hosts, place_on_host
from moefold.comm.spawn import spawn_ranks
from moefold.config.train import HostConfig
from moefold.train.host_switches import bind_rank, garbage_collection

TWO_NODES = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}


class Cycle:
    def __init__(self) -> None:
        self.self = self


def dead_cycle() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def test_garbage_is_collected_after_the_same_steps() -> None:
    assert gc.isenabled()
    with garbage_collection(HostConfig(gc="manual", gc_every=3)) as after_step:
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        cycle = dead_cycle()
        alive = []
        for step in (1, 2, 3):
            after_step(step)
            alive.append(cycle() is not None)
        assert alive == [True, True, False]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_automatic_collection_is_left_alone() -> None:
    with garbage_collection(HostConfig()) as after_step:
        assert gc.isenabled() and gc.get_freeze_count() == 0
        after_step(50)


def test_collection_is_enabled_again_after_an_error() -> None:
    with pytest.raises(ValueError), garbage_collection(HostConfig(gc="manual")):
        raise ValueError
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.parametrize("local_world", [1, 2, 3, 4, 8, 16])
def test_cores_are_shared_out_once(local_world: int) -> None:
    shares = [share_of_cores(list(TWO_NODES.values()), rank, local_world) for rank in range(local_world)]
    assert sorted({core for share in shares for core in share}) == list(range(8))
    if local_world <= 8:
        assert sum(map(len, shares)) == 8
    if local_world in (2, 4, 8):
        # No rank has cores of two memory nodes.
        assert all(set(share) <= set(TWO_NODES[0]) or set(share) <= set(TWO_NODES[1]) for share in shares)


def test_a_rank_gets_cores_next_to_its_gpu() -> None:
    """Four GPUs: 0 and 3 at node 1, 1 and 2 at node 0."""
    nodes_of = [1, 0, 0, 1]
    assert [cores_by_gpu(TWO_NODES, nodes_of, rank) for rank in range(4)] == [(4, 5), (0, 1), (2, 3), (6, 7)]
    # Unknown nodes: shares of all cores.
    assert [cores_by_gpu(TWO_NODES, [None, None], rank) for rank in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_nodes_are_read_from_the_kernel(tmp_path: Path) -> None:
    for node, cores in ((0, "0-1,4\n"), (1, "2-3,5\n"), (2, "\n")):
        folder = tmp_path / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    gpu = tmp_path / "bus" / "pci" / "devices" / "0000:3b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    assert read_nodes({0, 1, 2, 4, 5}, tmp_path) == {0: (0, 1, 4), 1: (2, 5)}
    assert read_nodes({7, 6}, tmp_path / "absent") == {0: (6, 7)}
    assert node_of_gpu("0000:3B:00.0", tmp_path) == 1 and node_of_gpu("0000:00:00.0", tmp_path) is None
    (gpu / "numa_node").write_text("-1\n")
    assert node_of_gpu("0000:3b:00.0", tmp_path) is None
    assert parse_cores("0-3,8,10-11") == [0, 1, 2, 3, 8, 10, 11]


def test_who_is_which_of_a_hosts_ranks() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    srun = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    }
    assert place_on_host(torchrun, 5, 8, None) == place_on_host(srun, 5, 8, None) == (1, 4)
    assert place_on_host({}, 3, 4, Hosts(2, 1, 2, ("a", "b"))) == (1, 2)
    # Ranks that were forked inside a job inherit variables that are not theirs.
    assert place_on_host(torchrun, 0, 2, None) == (0, 2) and place_on_host({}, 1, 4, None) == (1, 4)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_ranks_run_on_their_own_cores() -> None:
    """Every thread of a rank, its process group's too."""

    def work(rank: int) -> list[int]:
        own = bind_rank(HostConfig(bind="cores"), rank, 2, torch.device("cpu"))
        assert own is not None
        allowed = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
        assert len(allowed) > 1 and all(cores == sorted(own) for cores in allowed)
        return list(own)

    cores = spawn_ranks(work, 2, seconds=60)
    assert sorted(cores[0] + cores[1]) == sorted(os.sched_getaffinity(0))


def test_unbound_is_unbound() -> None:
    before = os.sched_getaffinity(0)
    assert bind_rank(HostConfig(), 0, 2, torch.device("cpu")) is None and os.sched_getaffinity(0) == before
    bind_process(sorted(before))
    assert os.sched_getaffinity(0) == before
