"""Measure the links between the ranks of a job, in bounded time: `moefold doctor --gpus` under torchrun or srun.

Four trials, each on every rank at once: a message between neighbours on one host, an all-reduce inside each host, an
all-reduce over hosts among ranks of equal place (each through its own adapter), an all-to-all of all ranks. Their bus
bandwidth, as in nccl-tests, is what a link carries, whatever the number of ranks. On GPUs messages travel by NCCL, on
CPUs by gloo, which measures the machinery and not a fabric.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.bench.clock import wait_for

# Bytes of a message: large enough for the full rate of a link.
MESSAGE = {"cuda": 256 << 20, "cpu": 4 << 20}
# A rank below this fraction of the median of its trial is reported.
SLOW = 0.7
# The fact that may differ between hosts.
WARNINGS = "warnings"
_NAME_BYTES, _FACT_BYTES = 64, 256
_MAX_ROUNDS = 50


@dataclass(frozen=True)
class RankRow:
    """One rank: where it is, and its bus bandwidth in 1e9 bytes per second by trial; None where it took no part."""

    rank: int
    host: str
    device: str
    rates: dict[str, float | None]
    # What the caller wants to know of every rank: versions, warnings.
    facts: dict[str, str]


@dataclass(frozen=True)
class LinkReport:
    backend: str
    message_bytes: int
    seconds: float
    rows: tuple[RankRow, ...]
    # "rank 3 on host: all-reduce inside the host: 12.0 GB/s, the median is 300.0"
    slow: tuple[str, ...]
    # Versions that are not the same on all ranks.
    differing: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class _Trial:
    name: str
    group: dist.ProcessGroup | None
    # Bytes over the link per byte of the message.
    factor: float
    run: Callable[[], object]


TRIALS = ("neighbour", "all-reduce in host", "all-reduce over hosts", "all-to-all of all")


def measure_links(
    device: torch.device,
    seconds: float = 30.0,
    message: int | None = None,
    facts: Mapping[str, str] | None = None,
) -> LinkReport:
    """Called by every rank of an initialised world; every rank returns the whole report. ``facts`` have the same names
    on every rank."""
    began = time.monotonic()
    rank, world = dist.get_rank(), dist.get_world_size()
    size = message or MESSAGE[device.type]
    hosts = gather_names(socket.gethostname(), device)
    names = gather_names(_device_name(device), device)
    told = {name: gather_names(text, device, _FACT_BYTES) for name, text in (facts or {}).items()}
    trials = make_trials(hosts, rank, device, size)
    rates = [
        _rate(trial, size, device, seconds / len(TRIALS)) if trial is not None else -1.0
        for trial in (trials.get(name) for name in TRIALS)
    ]
    table = _gather(torch.tensor(rates, dtype=torch.float64, device=device)).tolist()
    rows = tuple(
        RankRow(
            rank=r,
            host=hosts[r],
            device=names[r],
            rates={name: x if x >= 0 else None for name, x in zip(TRIALS, table[r], strict=True)},
            facts={name: texts[r] for name, texts in told.items()},
        )
        for r in range(world)
    )
    differing = tuple(name for name, texts in told.items() if name != WARNINGS and len(set(texts)) > 1)
    return LinkReport(dist.get_backend(), size, time.monotonic() - began, rows, tuple(slow_ranks(rows)), differing)


def make_trials(hosts: Sequence[str], rank: int, device: torch.device, size: int) -> dict[str, _Trial]:
    """The trials that this rank takes part in. Every rank makes all groups, in one order, as torch wants it."""
    world = len(hosts)
    by_host: dict[str, list[int]] = {}
    for number, host in enumerate(hosts):
        by_host.setdefault(host, []).append(number)
    pairs = [ranks[i : i + 2] for ranks in by_host.values() for i in range(0, len(ranks) - 1, 2)]
    places = max(map(len, by_host.values()))
    across = [[ranks[place] for ranks in by_host.values() if place < len(ranks)] for place in range(places)]
    pair, inside, over = (_own_group(lists, rank) for lists in (pairs, list(by_host.values()), across))
    whole = torch.ones(size // 4, device=device)
    found: dict[str, _Trial] = {}
    if pair is not None:
        found[TRIALS[0]] = _Trial(TRIALS[0], pair[0], 1.0, _exchange(whole, pair[1], rank, pair[0]))
    for name, group in ((TRIALS[1], inside), (TRIALS[2], over)):
        if group is not None:
            n = len(group[1])
            found[name] = _Trial(name, group[0], 2 * (n - 1) / n, _all_reduce(whole, group[0]))
    if world > 1:
        part = whole[: whole.numel() // world * world]
        found[TRIALS[3]] = _Trial(TRIALS[3], None, (world - 1) / world, _all_to_all(part))
    return found


def _own_group(lists: Sequence[Sequence[int]], rank: int) -> tuple[dist.ProcessGroup, list[int]] | None:
    own = None
    for ranks in lists:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks))
            own = (group, list(ranks)) if rank in ranks else own
    return own


def _exchange(message: Tensor, pair: Sequence[int], rank: int, group: dist.ProcessGroup) -> Callable[[], None]:
    peer = pair[1] if rank == pair[0] else pair[0]
    arriving = torch.empty_like(message)

    def run() -> None:
        calls = [dist.P2POp(dist.isend, message, peer, group), dist.P2POp(dist.irecv, arriving, peer, group)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    return run


def _all_reduce(message: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    # Zeros: sums of many rounds stay finite.
    zeros = torch.zeros_like(message)
    return lambda: dist.all_reduce(zeros, group=group)


def _all_to_all(message: Tensor) -> Callable[[], object]:
    arriving = torch.empty_like(message)
    return lambda: dist.all_to_all_single(arriving, message)


def _rate(trial: _Trial, size: int, device: torch.device, seconds: float) -> float:
    """Bus bandwidth in 1e9 bytes per second. The ranks of a group agree on the number of rounds: a round more on one
    rank would wait forever."""
    _timed(trial, device, 1)  # connects the ranks
    once = torch.tensor(_timed(trial, device, 1), dtype=torch.float64, device=device)
    dist.all_reduce(once, dist.ReduceOp.MAX, group=trial.group)
    rounds = max(1, min(_MAX_ROUNDS, int(0.5 * seconds / max(float(once), 1e-6))))
    return trial.factor * size * rounds / _timed(trial, device, rounds) / 1e9


def _timed(trial: _Trial, device: torch.device, rounds: int) -> float:
    wait_for(device.type)
    began = time.perf_counter()
    for _ in range(rounds):
        trial.run()
    wait_for(device.type)
    return max(time.perf_counter() - began, 1e-9)


def slow_ranks(rows: Sequence[RankRow]) -> list[str]:
    found = []
    for name in TRIALS:
        rates = {row.rank: rate for row in rows if (rate := row.rates[name]) is not None}
        middle = median(rates.values()) if rates else 0.0
        found += [
            f"rank {row.rank} on {row.host}: {name}: {rates[row.rank]:.3g} GB/s, the median is {middle:.3g}"
            for row in rows
            if row.rank in rates and rates[row.rank] < SLOW * middle
        ]
    return found


# ---- text of all ranks, as bytes: nothing is pickled ----


def gather_names(text: str, device: torch.device, size: int = _NAME_BYTES) -> list[str]:
    """Each rank's text, cut to so many bytes of UTF-8."""
    data = text.encode()[:size].ljust(size, b"\0")
    gathered = _gather(torch.tensor(list(data), dtype=torch.uint8, device=device))
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in gathered.tolist()]


def _gather(row: Tensor) -> Tensor:
    """[world, ...]: the rows of all ranks."""
    gathered = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, row)
    return torch.stack(gathered)


def _device_name(device: torch.device) -> str:
    return f"{device}: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"
