"""A run in a few numbers, and a list of what is not known about it; `moefold report --json` prints it."""

from __future__ import annotations

from dataclasses import asdict
from itertools import count, islice
from typing import Any

import numpy as np

from moefold.train.metrics import router_stats
from moefold.train.profile.profile_table import profile_data
from moefold.train.report.history import Column, History, number

# Speed is measured over the last half of the run: the first steps warm up.
_LAST_PART = 0.5


def summary(history: History) -> dict[str, Any]:
    """Plain data; None where nothing is known."""
    steps = history.steps
    return {
        "run": history.start.get("run"),
        "status": status(history),
        "step": int(steps[-1]) if len(steps) else 0,
        "steps": _whole(history.start.get("steps")),
        "world": _whole(history.start.get("world")),
        "device": history.start.get("device"),
        "parameters": _whole(history.start.get("parameters")),
        "active_parameters": _whole(history.start.get("active_parameters")),
        "flops_per_token": _known(number(history.start.get("flops_per_token"))),
        "first_loss": _first(history.column("loss")),
        "last_loss": _last(history.column("loss")),
        "last_validation": history.validation[-1][1] if history.validation else None,
        "best_validation": min((loss for _, loss in history.validation), default=None),
        "tokens": int(np.nansum(history.column("tokens"))),
        "tokens_per_s": _median(history.column("tokens_per_s")),
        "tflops_per_rank": _median(history.column("tflops")),
        "mfu": _median(history.column("mfu")),
        "step_seconds": _median(history.column("total")),
        "time": time_parts(history),
        "memory_bytes": _whole(_max(history.column("memory"))),
        "skipped": history.num_skipped,
        "skipped_steps": [{"step": step, "reason": reason} for step, reason in history.skipped],
        "dropped": int(np.nansum(history.column("dropped"))),
        "starts": len(history.starts),
        "faults": dict(history.num_faults),
        "checkpoints": history.saves[-5:],
        "router": _router(history),
        "profile": profile_data(history.profile) if history.profile else None,
        "missing": missing(history),
    }


def status(history: History) -> str:
    if not len(history.steps):
        return "no steps yet" if history.stopped is None else f"{history.stopped}, without a step"
    if history.stopped is None and history.saves and history.saves[-1] == _whole(history.start.get("steps")):
        # Killed after the last checkpoint; a start then finds nothing to do, and adds no line.
        return "finished"
    return history.stopped or "running, or killed"


def time_parts(history: History) -> dict[str, float]:
    """Seconds of all recorded steps by what they were spent on."""
    parts = {
        "compute": history.column("step_seconds"),
        "waiting for data": history.column("data"),
        "saving": history.column("save"),
    }
    sums = {name: float(np.nansum(column)) for name, column in parts.items()}
    return sums | {"other": max(float(np.nansum(history.column("total"))) - sum(sums.values()), 0.0)}


def layer_numbers(history: History) -> list[int]:
    """The layer of each row of counts: MoE layers follow the dense layers, and may be every n-th after them."""
    rows = history.last_bin.counts.shape[0] if history.last_bin else 0
    config = history.start.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    dense = model.get("num_dense_layers") if isinstance(model, dict) else 0
    step = model.get("moe_every") if isinstance(model, dict) else 1
    first = dense if isinstance(dense, int) and 0 <= dense < 10_000 else 0
    every = step if isinstance(step, int) and 0 < step < 10_000 else 1
    return list(islice((layer for layer in count(first) if (layer + 1) % every == 0), rows))


def missing(history: History) -> list[str]:
    """What this page does not show, and why."""
    found = []
    if not history.start:
        found.append("There is no start line: the configuration, the device and the number of steps are not known.")
    if not len(history.steps):
        return [*found, "No step has been recorded yet."]
    if not history.has("mfu"):
        why = str(history.start.get("mfu_note") or "the peak of the device is not known")
        found.append(f"No MFU: {why.removeprefix('mfu: ').removeprefix('none, ').removeprefix('none ')}.")
    if not history.validation:
        found.append("No validation loss: none was measured (`train.validate_every`, `data.validation`).")
    if not history.bins:
        found.append(
            "No expert load: no tokens per expert were recorded (a dense model, or the first interval is not over)."
        )
    if history.num_skipped:
        found.append("Losses and norms of skipped steps that were not finite are gaps in the curves.")
    holes = int(history.steps[-1] - history.steps[0] + 1 - len(history.steps))
    if holes:
        found.append(f"{holes:,} steps between the first and the last have no line.")
    if history.unreadable:
        found.append(f"{history.unreadable:,} lines could not be read and were left out.")
    if history.num_skipped > len(history.skipped):
        found.append(
            f"Reasons are listed for the first {len(history.skipped)} of {history.num_skipped:,} skipped steps."
        )
    return found


def _router(history: History) -> dict[str, Any] | None:
    if history.last_bin is None:
        return None
    stats = router_stats(history.last_bin.counts)
    layers = [{"layer": n, **asdict(layer)} for n, layer in zip(layer_numbers(history), stats.layers)]
    return {
        "first_step": history.last_bin.first,
        "last_step": history.last_bin.last,
        "max_load": stats.max_load,
        "entropy": stats.entropy,
        "dead": stats.dead,
        "layers": layers,
    }


def _median(column: Column) -> float | None:
    """The median of the last half."""
    late = column[int(len(column) * _LAST_PART) :]
    late = late[np.isfinite(late)]
    return float(np.median(late)) if len(late) else None


def _first(column: Column) -> float | None:
    known = column[np.isfinite(column)]
    return float(known[0]) if len(known) else None


def _last(column: Column) -> float | None:
    known = column[np.isfinite(column)]
    return float(known[-1]) if len(known) else None


def _max(column: Column) -> float | None:
    known = column[np.isfinite(column)]
    return float(known.max()) if len(known) else None


def _known(value: float) -> float | None:
    return value if value == value else None


def _whole(value: object) -> int | None:
    found = number(value)
    return int(found) if found == found else None
