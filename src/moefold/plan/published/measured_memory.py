"""Which figure a published record measured, so that a prediction is compared with the same thing.

Sources print different figures: the peak that the allocator gave out (**allocated**), what it had taken from the device
(**reserved**), or what the device showed; of the last rank, of rank 0, or of the fullest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moefold.plan.memory.peak import memory_at, predict_memory
from moefold.plan.prediction import MemoryPrediction
from moefold.plan.published.record_details import completed, with_details
from moefold.plan.published.records import workload_of_record
from moefold.plan.workload import Workload

Record = Mapping[str, Any]


# What a table of requirements adds up, without what a passing moment needs.
_LASTING = ("weights", "gradients", "optimizer", "activations")


def memory_of_record(record: Record) -> tuple[float, bool]:
    """Bytes as the record's source measures them, and whether the run fits."""
    workload = with_details(record, workload_of_record(completed(record)))
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
    ranks = [memory_at(workload, rank) for rank in range(workload.degrees.pp)]
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
        return workload.degrees.pp - 1
    return 0 if "rank-0" in what else None
