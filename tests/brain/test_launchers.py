"""Ranks are read from torchrun, srun and mpirun; a process that should have peers is not left alone."""

from __future__ import annotations

import pytest

from moefold.comm.launchers import Place, first_host, place_of
from moefold.errors import ConfigError

SRUN = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123456",
}


def test_torchrun_says_it_itself() -> None:
    found = place_of({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", **SRUN})
    assert found == Place("torchrun", 3, 8, 3)


def test_srun_tasks_meet_on_the_first_host_at_a_port_of_the_job() -> None:
    assert place_of(SRUN) == Place("srun", 9, 16, 1, "gpu07", 29500 + 456)
    assert place_of(SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "777"}) == Place("srun", 9, 16, 1, "head", 777)


def test_mpirun_on_one_host_needs_no_address() -> None:
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert place_of(mpi | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}) == Place("mpirun", 1, 4, 1, "localhost", 29500)
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        place_of(mpi | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


def test_without_a_launcher_the_world_is_this_process() -> None:
    assert place_of({}) is None
    assert place_of({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "PMI_SIZE", "WORLD_SIZE"])
def test_a_lonely_rank_of_a_larger_job_is_refused(name: str) -> None:
    # As in a batch script: SLURM_PROCID is set there, outside of any step.
    with pytest.raises(ConfigError, match=rf"\${name}.*256 tasks"):
        place_of({name: "256", "SLURM_PROCID": "0"})


def test_nonsense_is_named() -> None:
    with pytest.raises(ConfigError, match=r"RANK.*'x' is not a number"):
        place_of({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    with pytest.raises(ConfigError, match="no rank 2 among 2"):
        place_of({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("n[3-5]", "n3"), ("n[003-006,9],g1", "n003"), ("r[1,2]-ib,x", "r1-ib"), ("n[7]", "n7")],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
