"""Why memory is used as it is, in words: how data parallelism shards, which savings are on, and what each costs."""

from __future__ import annotations

from collections.abc import Sequence

from moefold.plan.memory.peak import predict_memory
from moefold.plan.memory.saving_steps import is_trained, saving, savings_of
from moefold.plan.prediction import Prediction
from moefold.plan.search.cheapest_savings import SwitchedOn
from moefold.plan.timing.layer_time import shards_by_layer
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import Workload, changed
from moefold.units import format_bytes

_NAMES = {"flat": "flat sharding", "fsdp": "FSDP2"}
_OTHER = {"flat": "fsdp", "fsdp": "flat"}


def sharding_words(chosen: Prediction) -> str:
    """The chosen one of our own framework's two shardings against the other; empty where there is no other."""
    workload = chosen.workload
    here = workload.parallel.sharding
    if not workload.is_own or here not in _OTHER or workload.cluster.num_gpus == 1:
        return ""
    there = _OTHER[here]
    if not is_trained(frozenset({f"parallel.sharding={there}"})):
        return ""
    # Remainders are of flat main weights.
    kept = savings_of(workload.run) - {"precision.master=remainder"}
    other = saving(changed(workload, parallel={"sharding": there}), kept)
    more = predict_memory(other).total - chosen.memory.total
    slower = predict_time(other).step_seconds / chosen.time.step_seconds - 1
    size = f"{format_bytes(abs(more))} {'more' if more > 0 else 'less'}"
    time = f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}" if abs(slower) >= 5e-4 else "as fast"
    chosen_words = f"Data parallelism is {_NAMES[here]}: {sent_words(workload)}."
    return f"{chosen_words} {_NAMES[there]} would hold {size} and be {time}: {sent_words(other)}."


def sent_words(workload: Workload) -> str:
    """What sharding sends and holds."""
    grads, weights = workload.gradient_bytes, workload.gather_bytes
    if shards_by_layer(workload):
        each = f"{2 * weights + grads:g} bytes per parameter and microbatch, {workload.microbatches} of them"
        return f"weights are gathered layer by layer ({each})"
    held = "one copy of the weights" if workload.is_flat else "gathered weights beside their shards"
    return f"{grads + weights:g} bytes per parameter and step, and {held} for the whole step"


def savings_words(chosen: Prediction, saved: Sequence[SwitchedOn]) -> str:
    """What was switched on, what each frees on the fullest rank and costs; each is taken back alone."""
    step = chosen.time.step_seconds
    words = [
        f"{', '.join(sorted(one.entries))} ({one.words}) frees {format_bytes(max(0.0, one.bytes))} for "
        f"{max(0.0, one.seconds) / step:.1%} of the step"
        for one in saved
        if one.bytes > 0
    ]
    # Beside others some free nothing more: they are on because less travels.
    quicker = [
        f"{', '.join(sorted(one.entries))} ({one.words}) makes the step {max(0.0, -one.seconds) / step:.2%} shorter"
        for one in saved
        if one.bytes <= 0
    ]
    if not words:
        return f"Switched on: {'; '.join(quicker)}."
    words += quicker
    return f"Switched on so that it fits: {'; '.join(words)}."


def would_fit_words(chosen: Prediction, fitting: Workload | None) -> str:
    """For a layout that does not fit: the cheapest savings with which it would."""
    needs = f"{format_bytes(chosen.memory.total)} of {format_bytes(chosen.memory.capacity)}"
    if fitting is None:
        return f"It needs {needs}, and all savings together do not suffice: search another layout, or use more GPUs."
    entries = ", ".join(sorted(savings_of(fitting.run) - savings_of(chosen.workload.run)))
    slower = predict_time(fitting).step_seconds / chosen.time.step_seconds - 1
    held = format_bytes(predict_memory(fitting).total)
    return f"It needs {needs}. It would fit with {entries}: {held}, and the step takes {slower:.1%} longer."
