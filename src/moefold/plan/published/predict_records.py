"""Predictions of published records, one JSON object per line in, one per line out.

Every record gets one line: a prediction under its own id, or the reason why there is none. What a record says about
its own result is not read, only which figure its source measures, so that a prediction is compared with the same thing:
the peak that the allocator gave out (**allocated**), what it had taken from the device (**reserved**), or what the
device showed; of the last rank, of rank 0, or of the fullest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from moefold.errors import MoefoldError
from moefold.plan.memory.peak import memory_at, predict_memory
from moefold.plan.predict import predict
from moefold.plan.prediction import MemoryPrediction, Prediction
from moefold.plan.published.points import published_workload
from moefold.plan.published.records import Record
from moefold.plan.workload import Workload

GIB = 2**30
# What a table of requirements adds up, without what a passing moment needs.
_LASTING = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Unread:
    """A record that could not be predicted, and why."""

    id: str
    reason: str


def predict_lines(lines: Iterable[str]) -> Iterator[dict[str, Any] | Unread]:
    """One answer per line that is not blank, in the same order."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _answer(line, f"line {number}")


def prediction_line(id: str, prediction: Prediction) -> dict[str, Any]:
    """What the scorers of published collections read."""
    time, memory = prediction.time, prediction.memory
    return {
        "id": id,
        "step_time_s": time.step_seconds,
        "memory_gib": memory.total / GIB,
        "fits": memory.fits,
        "interval": [time.low, time.high],
    }


def _answer(line: str, place: str) -> dict[str, Any] | Unread:
    try:
        record = json.loads(line)
    except ValueError as error:
        return Unread(place, f"not JSON: {error}")
    if not isinstance(record, dict):
        return Unread(place, f"a record is an object, not a {type(record).__name__}")
    name = str(record.get("id", place))
    try:
        measured, fits = memory_of_record(record)
        made: dict[str, Any] = {"id": name}
        if record.get("gbs"):
            # Memory depends on how many microbatches are alive, time on how many there are.
            made = prediction_line(name, predict(published_workload(record)))
        return {**made, "memory_gib": measured / GIB, "fits": fits}
    except MoefoldError as error:
        return Unread(name, str(error))
    # A record may lack any field or hold any value; sources print what they like.
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return Unread(name, _reason(record, error))


def _reason(record: dict[str, Any], error: Exception) -> str:
    hardware = record.get("hardware") or record
    needed = {name: record.get(name) for name in ("model", "parallel", "precision", "seq_len", "gbs")}
    needed |= {name: hardware.get(name) if isinstance(hardware, dict) else None for name in ("gpu", "num_gpus")}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        return f"does not say {' and '.join(missing)}"
    return f"the field {error} is missing" if isinstance(error, KeyError) else f"a field has a wrong value: {error}"


# ---- the figure that a source measures ----


def memory_of_record(record: Record) -> tuple[float, bool]:
    """Bytes as the record's source measures them, and whether the run fits."""
    workload = published_workload(record)
    return measured_bytes(record, workload), predict_memory(workload).fits


def measured_bytes(record: Record, workload: Workload) -> float:
    """The prediction of what the record's source measured."""
    memory = record.get("memory") or {}
    what = str(memory.get("what") or "")
    if "total_gb" in memory:
        return _typical(workload)
    rank = _rank_of(what, workload)
    prediction = predict_memory(workload) if rank is None else memory_at(workload, rank)
    if "peak_allocated_gib" in memory or "peak_allocated_gb" in memory:
        return allocated(prediction)
    return reserved(prediction)


def _typical(workload: Workload) -> float:
    """A requirement "per GPU": the lasting lines of a rank in the middle (the lower median)."""
    ranks = [memory_at(workload, rank) for rank in range(workload.parallel.pp)]
    totals = sorted(sum(prediction.of(group) for group in _LASTING) for prediction in ranks)
    return totals[(len(totals) - 1) // 2]


def allocated(prediction: MemoryPrediction) -> float:
    """What the allocator gives out at most."""
    return prediction.total - prediction.of("overhead")


def reserved(prediction: MemoryPrediction) -> float:
    """What the allocator takes from the device."""
    return prediction.total - sum(line.bytes for line in prediction.lines if line.name == "runtime")


def _rank_of(what: str, workload: Workload) -> int | None:
    """None is the fullest. Megatron's log is the last rank's."""
    if "LAST rank" in what or what == "peak memory as reported":
        return workload.parallel.pp - 1
    return 0 if "rank-0" in what else None
