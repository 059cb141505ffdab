"""Predictions of published records, one JSON object per line in, one per line out.

Every record gets one line: a prediction under its own id, or the reason why there is none. What a record says about
its own result is not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from moefold.errors import MoefoldError
from moefold.plan.predict import predict
from moefold.plan.prediction import Prediction
from moefold.plan.published.measured_memory import memory_of_record
from moefold.plan.published.points import published_workload

GIB = 2**30


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
