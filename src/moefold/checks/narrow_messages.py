"""Rules about narrow messages between ranks: who can send them."""

from __future__ import annotations

from typing import get_args

from moefold.config.parallel import EngineDispatcher, PlannedDispatcherName
from moefold.config.run import RunConfig
from moefold.errors import Problem

# Of other libraries: they send rows in formats of their own.
_OTHERS = (*get_args(EngineDispatcher), *get_args(PlannedDispatcherName))


def narrow_rows_have_our_dispatcher(run: RunConfig) -> Problem | None:
    name, dispatcher = run.precision.dispatch, run.parallel.dispatcher
    if name is None or (run.model.moe is not None and dispatcher not in _OTHERS):
        return None
    why = "the model has no experts" if run.model.moe is None else f"{dispatcher} sends rows as they are"
    fix = "use null" if run.model.moe is None else "use null, or parallel.dispatcher all_to_all"
    return Problem("precision.dispatch", f"rows in {name}, but {why}", fix)


def rounded_parts_are_of_float32(run: RunConfig) -> Problem | None:
    precision = run.precision
    if precision.reduce != "bfloat16_all_to_all" or precision.params != "float64":
        return None
    return Problem(
        "precision.reduce",
        "bfloat16 parts of float64 gradients, summed in float32",
        "use null, or precision.params: float32",
    )


RULES = (narrow_rows_have_our_dispatcher, rounded_parts_are_of_float32)
