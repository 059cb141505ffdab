"""A profiled step as data: each rank's seconds by component, and `profile.jsonl`, which has a line per profiled step.

What the components mean and how they are found is in `train/profile/account.py`. This file needs no torch, so that
`moefold report` reads profiles quickly.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

from moefold.errors import MoefoldError

FILE_NAME = "profile.jsonl"
AXES = ("tp", "cp", "ep", "etp", "dp", "edp", "pp", "world")
# In the order of tables and bars.
COMPONENTS = (
    "compute",
    *(f"{kind}.{axis}" for axis in AXES for kind in ("comm", "wait")),
    *("bubble", "host", "gc", "data", "save", "validation", "other"),
)
TOGETHER = ("compute", "communication", "imbalance", "bubble", "host", "gc", "data", "save", "validation", "other")
# A profile has a line of some kilobytes per step.
_MAX_BYTES = 256 << 20


@dataclass
class Link:
    """Large messages among the same ranks: from the last rank's start to the end, added over the ranks."""

    axis: str
    ranks: tuple[int, ...]
    operation: str
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def mb_s(self) -> float:
        """What a rank passes in per second."""
        return self.bytes / self.seconds / 1e6 if self.seconds > 0 else float("inf")


@dataclass(frozen=True)
class StepAccount:
    """One step. ``components`` has a mapping per rank; ``late``: how long others waited for each rank."""

    step: int
    wall: list[float]
    components: list[dict[str, float]]
    late: list[float]
    links: list[Link] = field(default_factory=list)
    # Each rank's pipeline stage, peak memory, and the memory that it has.
    stages: list[int] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    capacity_bytes: int = 0
    # Seconds that the profile of the step before took, on rank 0; they are in no step's wall time.
    overhead: float = 0.0

    def residue(self) -> float:
        """The largest difference between a rank's components and its wall time, as a fraction."""
        return max(abs(sum(parts.values()) / wall - 1) for parts, wall in zip(self.components, self.wall, strict=True))

    def other(self) -> float:
        """The largest fraction of a rank's wall time that no component explains."""
        return max(parts.get("other", 0.0) / wall for parts, wall in zip(self.components, self.wall, strict=True))

    def to_json(self) -> str:
        return json.dumps(_rounded(asdict(self)), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> StepAccount:
        data = json.loads(text)
        links = [Link(**(link | {"ranks": tuple(link["ranks"])})) for link in data.pop("links", [])]
        return cls(**data, links=links)


def _rounded(value: object) -> object:
    """To 10 ns."""
    if isinstance(value, float):
        return round(value, 8)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def read_profile(directory: Path) -> list[StepAccount]:
    """The profiled steps of a run, in order; of a step that was repeated, the last. Empty if there is no profile."""
    path = directory / FILE_NAME
    if not path.exists():
        return []
    if path.stat().st_size > _MAX_BYTES:
        raise MoefoldError(f"{path}: {path.stat().st_size:,} bytes, and profiles have at most {_MAX_BYTES:,}")
    found: dict[int, StepAccount] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            each = StepAccount.from_json(line)
            if _is_sound(each):
                found[each.step] = each
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return [found[step] for step in sorted(found)]


def _is_sound(each: StepAccount) -> bool:
    """Whether it can be added and drawn: a file may hold anything."""
    world = len(each.wall)
    numbers = [*each.wall, *each.late, *(seconds for parts in each.components for seconds in parts.values())]
    numbers += [value for link in each.links for value in (link.calls, link.bytes, link.seconds)]
    ranks = [rank for link in each.links for rank in link.ranks]
    texts = [text for link in each.links for text in (link.axis, link.operation)]
    return (
        0 < world == len(each.components) == len(each.late)
        and len(each.stages) in (0, world)
        and len(each.memory_bytes) in (0, world)
        and all(isinstance(value, int | float) and 0 <= value < 1e18 for value in numbers)
        and min(each.wall) > 0
        and all(parts and parts.keys() <= set(COMPONENTS) for parts in each.components)
        and all(isinstance(value, int) for value in (each.step, each.capacity_bytes, *each.stages, *each.memory_bytes))
        and all(isinstance(rank, int) and 0 <= rank < world for rank in ranks)
        and all(link.ranks for link in each.links)
        and all(isinstance(text, str) and len(text) < 40 for text in texts)
    )


def typical(accounts: Sequence[StepAccount]) -> list[dict[str, float]]:
    """Of every rank, its mean seconds per step by component, over the steps that had as many ranks as the last one."""
    same = _of_one_world(accounts)
    found = []
    for rank in range(len(same[-1].wall)):
        total: dict[str, float] = defaultdict(float)
        for each in same:
            for name, seconds in each.components[rank].items():
                total[name] += seconds / len(same)
        found.append({name: total[name] for name in COMPONENTS if name in total})
    return found


def together(components: Mapping[str, float]) -> dict[str, float]:
    """The same with the communication of all axes added, and the waiting for slower ranks."""
    total = dict.fromkeys(TOGETHER, 0.0)
    for name, seconds in components.items():
        total[{"comm": "communication", "wait": "imbalance"}.get(name.split(".")[0], name)] += seconds
    return total


def mean_of_ranks(ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    every = list(ranks)
    names = [name for name in (*COMPONENTS, *TOGETHER) if any(name in each for each in every)]
    return {name: sum(each.get(name, 0.0) for each in every) / len(every) for name in dict.fromkeys(names)}


def wall_seconds(accounts: Sequence[StepAccount]) -> float:
    """The mean of the steps, each as long as on its slowest rank: components are means too, and are shares of it."""
    return mean(max(each.wall) for each in _of_one_world(accounts))


def _of_one_world(accounts: Sequence[StepAccount]) -> list[StepAccount]:
    """Steps that had as many ranks as the last one."""
    return [each for each in accounts if len(each.wall) == len(accounts[-1].wall)]
