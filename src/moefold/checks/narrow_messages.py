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


RULES = (narrow_rows_have_our_dispatcher,)
