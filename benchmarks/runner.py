"""The process of one candidate: builds it, then executes the commands of the parent.

`python -m benchmarks.runner KIND NAME OPTIONS` reads one JSON command per line and replies to each with one line of
JSON. Each candidate has its own process, because its speed depends on what the process did before: cached GEMM plans,
heap fragmentation, allocator settings. The allocator can only be set once, before anything large is allocated, so torch
is imported after it, with the kind's module.

    {"do": "run", "seed": 3}      ->  {"wall": 0.21, "cpu": 0.20, "faults": 12}
    {"do": "memory", "seed": 3}   ->  {"saved": 45088768, "peak": 190840832, "held": 8192}
    {"do": "check", "seed": 3}    ->  {"error": 0.0031}

The first line it writes says that it is ready, or why it failed. To add a candidate, write a class with the three
methods of `Candidate` and put its builder into the table `CANDIDATES` of its kind's module.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO, runtime_checkable

from benchmarks.process_stats import measured_peak, resident_bytes

Options = dict[str, Any]


class Candidate(Protocol):
    """``prepared`` may be anything that ``run`` takes."""

    def prepare(self, seed: int) -> Any:
        """Not timed: makes inputs and drops gradients. Another seed gives another routing."""
        ...

    def run(self, prepared: Any) -> None:
        """Timed: forward and backward, or the whole step."""
        ...

    def saved_bytes(self, prepared: Any) -> int | None:
        """Bytes saved for backward without parameters; None for a baseline without autograd."""
        ...


@runtime_checkable
class Checked(Protocol):
    """A candidate that can compare its output with the exact one."""

    def relative_error(self, prepared: Any) -> float: ...


Builder = Callable[[Options], Candidate]

# Where each kind keeps its table CANDIDATES: dict[str, Builder].
KINDS = {
    "layer": "benchmarks.layer_candidates",
    "attention": "benchmarks.attention_candidates",
    "step": "benchmarks.step_candidates",
}


def candidates_of(kind: str) -> dict[str, Builder]:
    """Imports torch; other libraries are imported by the candidate that needs them."""
    table: dict[str, Builder] = importlib.import_module(KINDS[kind]).CANDIDATES
    return table


def build(kind: str, name: str, options: Options) -> tuple[Candidate, str]:
    """The candidate, and the allocator setting that is in force."""
    allocator = options["allocator"]
    if allocator == "kept" and not importlib.import_module("moefold.comm.spawn").disable_malloc_trim():
        allocator = "default"
    torch = importlib.import_module("torch")
    torch.set_num_threads(options["threads"])
    return candidates_of(kind)[name](options), allocator


def timed_run(candidate: Candidate, seed: int, barrier: Callable[[], object] | None = None) -> dict[str, float]:
    """``barrier`` runs between what is not timed and what is."""
    prepared = candidate.prepare(seed)
    if barrier is not None:
        barrier()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    wall, cpu = time.perf_counter(), time.process_time()
    candidate.run(prepared)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"wall": wall, "cpu": cpu, "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults}


def measured_memory(candidate: Candidate, seed: int, built: int | None) -> dict[str, int | None]:
    """``built``: resident bytes when the candidate was ready; the increase since then is reported as held."""
    saved = candidate.saved_bytes(candidate.prepare(seed))
    prepared = candidate.prepare(seed)
    before, peak = measured_peak(lambda: candidate.run(prepared))
    held = None if before is None or built is None else before - built
    return {"saved": saved, "peak": peak, "held": held}


def measured_error(candidate: Candidate, seed: int) -> dict[str, float | None]:
    if not isinstance(candidate, Checked):
        return {"error": None}
    return {"error": candidate.relative_error(candidate.prepare(seed))}


def serve(candidate: Candidate, commands: TextIO, replies: TextIO) -> None:
    built = resident_bytes()
    for line in commands:
        command = json.loads(line)
        seed = command["seed"]
        try:
            if command["do"] == "run":
                reply: dict[str, Any] = timed_run(candidate, seed)
            elif command["do"] == "memory":
                reply = measured_memory(candidate, seed, built)
            else:
                reply = measured_error(candidate, seed)
        except Exception as error:
            reply = {"failed": one_line(error)}
        _send(replies, reply)


def one_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:300]


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    print(json.dumps(reply), file=replies, flush=True)


def main() -> None:
    kind, name, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    # Libraries may print to stdout; only replies may reach the parent.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        candidate, allocator = build(kind, name, options)
    except Exception as error:
        _send(replies, {"failed": one_line(error)})
        return
    _send(replies, {"ready": name, "allocator": allocator})
    serve(candidate, sys.stdin, replies)


if __name__ == "__main__":
    main()
