"""A step as named numbers, for services that draw one chart per name."""

from __future__ import annotations

import math

from moefold.train.events import StepRecord
from moefold.train.metrics import Speed
from moefold.train.router_stats import router_stats


def scalars(record: StepRecord, speed: Speed) -> dict[str, float]:
    """Only finite numbers; names are grouped by what stands before the slash."""
    found = {
        "train/loss": record.loss,
        "train/norm": record.norm,
        "train/rate": record.rate,
        "train/skipped": float(record.skipped is not None),
        **{f"balance/{name}": value for name, value in record.balance.items()},
        "speed/tokens_per_s": speed.tokens_per_s,
        "speed/tflops_per_rank": speed.tflops,
        **({} if speed.mfu is None else {"speed/mfu": speed.mfu}),
        "speed/step_seconds": speed.step_seconds,
        "speed/data_wait": speed.data_wait,
        "speed/memory_bytes": float(record.memory_bytes),
        "router/dropped": float(record.dropped),
    }
    if record.counts:
        stats = router_stats(record.counts)
        found |= {"router/max_load": stats.max_load, "router/entropy": stats.entropy, "router/dead": float(stats.dead)}
    return {name: value for name, value in found.items() if math.isfinite(value)}
