"""Rules about messages between ranks: who can send narrow ones, and what can go in chunks beside matmuls."""

from __future__ import annotations

from typing import get_args

from moefold.config.attention import MLAConfig
from moefold.config.parallel import EngineDispatcher, ParallelConfig, PlannedDispatcherName
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


def tp_chunks_have_matmuls_beside_them(run: RunConfig) -> list[Problem]:
    """With parallel.overlap tensor_parallel: tokens are exchanged, in chunks that can be summed one by one, and nothing
    is recomputed, for a chunk that was sent is not sent twice."""
    parallel, attention, retained = run.parallel, run.model.attention, run.memory.retained()
    if "tensor_parallel" not in parallel.overlap:
        default = ParallelConfig().tp_chunks
        if parallel.tp_chunks == default:
            return []
        message = f"is {parallel.tp_chunks}, but tensor parallelism does not run in chunks"
        return [Problem("parallel.tp_chunks", message, f"use {default}, or parallel.overlap [tensor_parallel]")]
    if parallel.tp_chunks < 2:
        message = f"is {parallel.tp_chunks}: with one chunk there is no other to be computed beside its exchange"
        return [Problem("parallel.tp_chunks", message, "use 2 or more")]
    if parallel.tp == 1:
        return [Problem("parallel.overlap", "tensor_parallel: tp=1 exchanges no tokens", "use [], or parallel.tp of 2")]
    shared = run.model.moe is not None and run.model.moe.shared_hidden_dim > 0
    again = [name for name in run.memory.recompute if name != "experts" or shared]
    rules = (
        (
            run.precision.tp_reduce == "fp8_all_to_all",
            "precision.tp_reduce fp8_all_to_all scales the parts of a whole sum",
            "precision.tp_reduce bfloat16 or null",
        ),
        (
            run.precision.recipe is not None,
            f"precision.recipe {run.precision.recipe} narrows rows together that chunks separate",
            "precision.recipe null",
        ),
        (
            run.kernels.graphs != "none",
            f"kernels.graphs {run.kernels.graphs} was never tried with exchanges on another stream",
            "kernels.graphs none",
        ),
        (
            bool(again),
            f"memory.recompute {', '.join(again)} would send chunks once more that the first forward has sent",
            "memory.retain, which computes steps again and sends nothing",
        ),
        (
            isinstance(attention, MLAConfig) and retained["mla_up"] != "keep",
            f"memory.retain.mla_up {retained['mla_up']}: heads are put together from chunks, and that copy is kept",
            "memory.retain.mla_up keep",
        ),
    )
    return [
        Problem("parallel.overlap", f"tensor_parallel: {message}", f"use [], or {fix}")
        for broken, message, fix in rules
        if broken
    ]


RULES = (narrow_rows_have_our_dispatcher, rounded_parts_are_of_float32, tp_chunks_have_matmuls_beside_them)
