"""Metrics of a step: speed (tokens/s, TFLOP/s, MFU, time spent waiting, time to the end), and the load of experts.

TFLOP/s are per rank, in the convention of published runs (see `blueprint/flops.py`). MFU is their fraction of the
device's peak; it is None on a device whose peak is unknown, and `Meter.mfu_note` says so. Averages are over an interval
of steps: all tokens divided by all seconds.

`counts` has one row per MoE layer, one entry per expert: its tokens. Load is a count divided by its row's mean, so 1 is
balanced, 0 is dead, and E / top_k is the worst that top-k routing can do. Entropy is that of the row as a distribution,
divided by log E: 1 is balanced, 0 means that one expert gets everything.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from moefold.blueprint.flops import training_flops_per_token
from moefold.hardware.cluster import peak_flops
from moefold.train.callback import RunInfo, StepRecord

# The time to the end is estimated from this many last steps.
_RECENT_STEPS = 100


@dataclass(frozen=True)
class Speed:
    """Of one step or of several. `data_wait` and `save_wait` are fractions of the time."""

    tokens_per_s: float
    tflops: float
    mfu: float | None
    data_wait: float
    save_wait: float
    step_seconds: float


class Meter:
    """Turns records into speeds, with the run's FLOPs per token and the device's peak."""

    def __init__(self, info: RunInfo, device: str) -> None:
        run = info.run
        self.world = info.world
        self.device = device
        self.compute = run.precision.compute
        self.flops_per_token = training_flops_per_token(run.model, run.data.seq_len)
        self.peak = peak_flops(device, self.compute)
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    @property
    def mfu_note(self) -> str:
        if self.peak is not None:
            return f"mfu: of {self.peak / 1e12:,.0f} TFLOP/s ({self.compute}, dense) on {self.device}"
        if peak_flops(self.device) is not None:
            return f"mfu: none, the peak of {self.device} is known for bfloat16 and this run computes in {self.compute}"
        if self.device == "CPU":
            return "mfu: none on a CPU, whose peak is in no table; `moefold bench calibrate` measures its matmuls"
        return f"mfu: none, the peak of {self.device!r} is not in moefold's table"

    def speed(self, records: Sequence[StepRecord]) -> Speed:
        seconds = sum(total_seconds(record) for record in records)
        tokens = sum(record.tokens for record in records)
        per_second = tokens / seconds if seconds > 0 else 0.0
        flops = per_second * self.flops_per_token / self.world
        return Speed(
            tokens_per_s=per_second,
            tflops=flops / 1e12,
            mfu=None if self.peak is None else flops / self.peak,
            data_wait=_fraction(records, "data", seconds),
            save_wait=_fraction(records, "save", seconds),
            step_seconds=seconds / len(records) if records else 0.0,
        )

    def eta(self, record: StepRecord) -> float:
        """Seconds to the end at the speed of the last steps; the first step is left out once there are others."""
        if len(self._recent) == 1:
            self._recent.clear()
        self._recent.append(total_seconds(record))
        return (record.steps - record.step) * sum(self._recent) / len(self._recent)


def total_seconds(record: StepRecord) -> float:
    """From the step's beginning to its end; validation is not in it."""
    if "total" in record.seconds:
        return record.seconds["total"]
    return sum(record.seconds.values())


def as_data(record: StepRecord, speed: Speed) -> dict[str, object]:
    """A step as a JSON object; NaN and infinities become null, which is all that JSON has for them."""
    plain: dict[str, object] = {"kind": "step", "time": round(time.time(), 3)}
    return plain | finite(asdict(record)) | {"speed": finite(asdict(speed))}


def device_name(device: str = "cuda") -> str:
    """As torch names it; "CPU" where the run or the machine has no accelerator."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else "CPU"


def _fraction(records: Sequence[StepRecord], name: str, seconds: float) -> float:
    spent = sum(record.seconds.get(name, 0.0) for record in records)
    return min(spent / seconds, 1.0) if seconds > 0 else 0.0


def finite(tree: dict) -> dict:
    """The same with None for every number that is not finite."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return finite(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {key: plain(value) for key, value in tree.items()}


# ---- expert load ----

Counts2D = Sequence[Sequence[int]] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class LayerStats:
    """One MoE layer. `cv` is the standard deviation of the load; `dead` lists experts without a token."""

    max_load: float
    min_load: float
    entropy: float
    cv: float
    dead: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class RouterStats:
    """All MoE layers. The busiest expert of the worst layer determines the time of expert-parallel ranks."""

    layers: tuple[LayerStats, ...]

    @property
    def max_load(self) -> float:
        return max((layer.max_load for layer in self.layers), default=0.0)

    @property
    def mean_max_load(self) -> float:
        return sum(layer.max_load for layer in self.layers) / len(self.layers) if self.layers else 0.0

    @property
    def entropy(self) -> float:
        """Of the least balanced layer."""
        return min((layer.entropy for layer in self.layers), default=0.0)

    @property
    def dead(self) -> int:
        return sum(len(layer.dead) for layer in self.layers)


def router_stats(counts: Counts2D) -> RouterStats:
    counts_ME = np.asarray(counts, dtype=np.float64)
    if counts_ME.ndim != 2 or counts_ME.size == 0:
        return RouterStats(())
    load_ME = relative_load(counts_ME)
    share_ME = load_ME / counts_ME.shape[1]
    # 0 * log 0 is 0.
    logs_ME = np.log(share_ME, out=np.zeros_like(share_ME), where=share_ME > 0)
    entropy_M = -(share_ME * logs_ME).sum(1) / max(np.log(counts_ME.shape[1]), 1e-9)
    return RouterStats(
        tuple(
            LayerStats(
                max_load=float(load_E.max()),
                min_load=float(load_E.min()),
                entropy=float(min(max(entropy, 0.0), 1.0)),
                cv=float(load_E.std()),
                # In a layer without any token nothing is known about its experts.
                dead=tuple(np.flatnonzero(counts_E == 0).tolist()) if counts_E.any() else (),
                tokens=int(counts_E.sum()),
            )
            for load_E, entropy, counts_E in zip(load_ME, entropy_M, counts_ME)
        )
    )


def relative_load(counts_ME: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Counts divided by their row's mean; a row of zeros stays zero."""
    mean_M1 = counts_ME.mean(axis=-1, keepdims=True)
    return np.divide(counts_ME, mean_M1, out=np.zeros_like(counts_ME), where=mean_M1 > 0)
