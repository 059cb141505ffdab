"""What the planner says about one workload: memory line by line, the step's time by cause, and which wall binds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moefold.plan.workload import Workload
from moefold.schedule.simulate import Timeline

Wall = Literal["memory", "communication", "compute", "host"]


@dataclass(frozen=True)
class MemoryLine:
    """One cause of memory on the fullest rank, in bytes. `group` is weights, gradients, optimizer, activations,
    buffers, or overhead."""

    group: str
    name: str
    bytes: float
    # How it was computed, in words and numbers.
    why: str = ""


@dataclass(frozen=True)
class MemoryPrediction:
    """The fullest pipeline rank, cause by cause."""

    lines: tuple[MemoryLine, ...]
    capacity: float
    pipeline_rank: int = 0
    # Total of every pipeline rank, in bytes.
    by_rank: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        return sum(line.bytes for line in self.lines)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    def of(self, group: str) -> float:
        return sum(line.bytes for line in self.lines if line.group == group)


@dataclass(frozen=True)
class TimeLine:
    """Seconds of a step on the slowest rank for one cause. `wall`: compute, memory (traffic), communication, host,
    bubble, or optimizer."""

    wall: str
    name: str
    seconds: float
    # Part of it that hides behind other work and is not in the step's time.
    hidden: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class TimePrediction:
    step_seconds: float
    # 80 % of measured runs of this kind lie between these.
    low: float
    high: float
    lines: tuple[TimeLine, ...]
    # One step of the pipeline, forward and backward of every microbatch; None without a pipeline.
    timeline: Timeline | None = None

    def of(self, wall: str) -> float:
        """Exposed seconds of one wall."""
        return sum(line.seconds - line.hidden for line in self.lines if line.wall == wall)


@dataclass(frozen=True)
class Prediction:
    workload: Workload
    memory: MemoryPrediction
    time: TimePrediction
    wall: Wall
    tokens_per_second_per_gpu: float
    # In the published convention: what the model needs, not what is recomputed.
    tflops_per_gpu: float
    # Of the units that take the operands of matmuls: their bits, and 1e12 FLOP/s.
    units: tuple[int, float]
    notes: tuple[str, ...] = field(default=())

    @property
    def mfu(self) -> float:
        """0 where the peak is not known."""
        return self.tflops_per_gpu / self.units[1] if self.units[1] else 0.0

    @property
    def mfu_words(self) -> str:
        """With the peak by name, as a run in FP8 may be compared with either."""
        bits, peak = self.units
        return f"MFU {self.mfu:.1%} of {peak:,.0f} in {'bfloat16' if bits == 16 else f'{bits} bits'}"
