"""Which rank this process is, as the launcher that started it says.

torchrun sets RANK and its companions. srun and mpirun have variables of their own, and no address to meet at. All are
read here, from data: one `Launcher` per program, the first that has set its variables counts. A process that finds
itself alone where the environment speaks of others is refused, because 256 tasks that each train alone, in one run
directory, is the worst thing a missing variable can do.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from moefold.errors import ConfigError, Problem

DEFAULT_PORT = 29500
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Launcher:
    """The names of a launcher's variables."""

    name: str
    rank: str
    world: str
    local_rank: str
    # How many ranks this host has; SLURM writes it as `4(x2)`, for two hosts with four each.
    local_world: str
    # Where rank 0 is: an address, or a list of hosts in SLURM's notation whose first has rank 0.
    address: str | None = None
    hosts: str | None = None


LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", address="MASTER_ADDR"),
    # A step's variables: in a batch script, outside of srun, SLURM_PROCID is 0 and says nothing.
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        hosts="SLURM_STEP_NODELIST",
    ),
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
)
# Variables that count the tasks of a job; more than one means that this process should not be alone.
_TASK_COUNTS = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")


@dataclass(frozen=True)
class Place:
    """This process among the ranks of its job."""

    launcher: str
    rank: int
    world: int
    # Among the ranks of its host, which chooses its GPU; None if nothing says so.
    local_rank: int | None
    # For torch's environment rendezvous; None where torchrun has set it.
    address: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Hosts:
    """`moefold train --nnodes`: this host among those of a job, each of which starts ``ranks`` ranks.

    Host i has ``addresses[i]``. One host serves the store there, and nowhere else: host 0, and if it is lost for
    ``patience`` seconds, the next that has an address. After as many seconds the run goes on without hosts that stay
    away; with 0 it never does.
    """

    count: int
    index: int
    ranks: int
    addresses: tuple[str, ...]
    port: int = DEFAULT_PORT
    patience: float = 45.0

    @property
    def world(self) -> int:
        return self.count * self.ranks


def place_of(environment: Mapping[str, str]) -> Place | None:
    """None if no launcher started this process; a `ConfigError` if one did and did not say enough."""
    for launcher in LAUNCHERS:
        if launcher.rank in environment and launcher.world in environment:
            return _read(launcher, environment)
    others = [(name, environment[name]) for name in _TASK_COUNTS if environment.get(name, "1") not in ("", "1")]
    if others:
        name, count = others[0]
        ways = "start it with srun or torchrun, or unset the variable if one process is what you want"
        raise ConfigError(Problem(f"${name}", f"the job has {count} tasks, but nothing says which this one is", ways))
    return None


def is_first_of_host(environment: Mapping[str, str], rank: int, world: int) -> bool:
    """Whether this rank does what one per host does; where no launcher of these ranks says so, rank 0 does it."""
    for launcher in LAUNCHERS:
        # Ranks that were forked inside a job inherit the variables of its one process.
        if environment.get(launcher.rank) == str(rank) and environment.get(launcher.world) == str(world):
            return environment.get(launcher.local_rank, str(rank)) == "0"
    return rank == 0


def place_on_host(environment: Mapping[str, str], rank: int, world: int, hosts: Hosts | None) -> tuple[int, int]:
    """Which of its host's ranks a rank is, and how many the host has; one host where nothing says otherwise."""
    if hosts is not None:
        return rank % hosts.ranks, hosts.ranks
    for launcher in LAUNCHERS:
        if environment.get(launcher.rank) == str(rank) and environment.get(launcher.world) == str(world):
            index = environment.get(launcher.local_rank, "")
            size = re.match(r"\d+", environment.get(launcher.local_world, ""))
            if index.isdecimal() and size is not None and int(index) < int(size[0]):
                return int(index), int(size[0])
    return rank, world


def _read(launcher: Launcher, environment: Mapping[str, str]) -> Place:
    numbers: dict[str, int] = {}
    problems: list[Problem] = []
    for key in (launcher.rank, launcher.world, launcher.local_rank):
        value = environment.get(key)
        if value is not None and value.isdecimal():
            numbers[key] = int(value)
        elif value is not None:
            problems.append(Problem(f"${key}", f"{value!r} is not a number", f"{launcher.name} sets it"))
    if problems:
        raise ConfigError(*problems)
    rank, world, local_rank = numbers[launcher.rank], numbers[launcher.world], numbers.get(launcher.local_rank)
    if rank >= world:
        raise ConfigError(Problem(f"${launcher.rank}", f"there is no rank {rank} among {world}", "start all of them"))
    if launcher.address is not None:
        return Place(launcher.name, rank, world, local_rank)
    return Place(launcher.name, rank, world, local_rank, _address(launcher, environment, world), _port(environment))


def _address(launcher: Launcher, environment: Mapping[str, str], world: int) -> str:
    """MASTER_ADDR if the user has set it; else the first host of the job."""
    if address := environment.get("MASTER_ADDR"):
        return address
    listed = environment.get(launcher.hosts or "", "")
    if listed:
        return first_host(listed)
    if world == 1 or environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(world):
        return "localhost"
    ways = "export MASTER_ADDR with the name of the host of rank 0"
    raise ConfigError(Problem("$MASTER_ADDR", f"{launcher.name} does not say where {world} ranks meet", ways))


def _port(environment: Mapping[str, str]) -> int:
    """MASTER_PORT, or one that follows from the job's number: jobs that share a host must not meet each other."""
    if environment.get("MASTER_PORT", "").isdecimal():
        return int(environment["MASTER_PORT"])
    job = environment.get("SLURM_JOB_ID", "")
    return DEFAULT_PORT + (int(job) % 1000 if job.isdecimal() else 0)


def first_host(hosts: str) -> str:
    """The first of SLURM's list: `node[003-006,9],gpu1` -> `node003`."""
    name = re.match(r"[^\[,]*", hosts)
    assert name is not None
    rest = hosts[name.end() :]
    if not rest.startswith("["):
        return name[0]
    inside, _, after = rest[1:].partition("]")
    # A suffix after the bracket belongs to the name; a comma begins the next host.
    return name[0] + re.split(r"[-,]", inside)[0] + after.partition(",")[0]


def die_with_agent() -> None:
    """If torchrun's agent started this process: end when the agent ends, which nothing else would notice.

    An agent that is killed leaves its ranks running, and they hold the lock of the run that a new agent resumes.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())


def die_with_parent(parent: int) -> None:
    """The kernel ends this process when ``parent`` ends, or now if it has ended already."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
