"""One contestant in a process of its own: builds what it was named after, then runs it whenever it is told to.

`python -m moefold.bench.runner KIND NAME OPTIONS` reads one JSON command per line and answers each with one line of
JSON. A process of its own, because what a process did before is part of its speed: which GEMM plans are cached, how the
heap is cut up, how the allocator is set. The allocator can be set only once and before anything large is allocated, so
torch is imported after it, with the kind's own module.

    {"do": "run", "seed": 3}      ->  {"wall": 0.21, "cpu": 0.20, "faults": 12}
    {"do": "memory", "seed": 3}   ->  {"saved": 45088768, "peak": 190840832, "held": 8192}
    {"do": "check", "seed": 3}    ->  {"error": 0.0031}

The first line it writes says that it is ready, or why it never will be. To add a contestant, write a class with the
three methods of `Contestant` and put its builder into the table `CONTESTANTS` of its kind's module.
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

from moefold.bench.process_memory import measured_peak, resident_bytes

Options = dict[str, Any]


class Contestant(Protocol):
    """What every contestant can do. ``prepared`` is its own affair."""

    def prepare(self, seed: int) -> Any:
        """Not timed: inputs, and gradients dropped. Another seed means another routing."""
        ...

    def run(self, prepared: Any) -> None:
        """Timed: forward and backward, or the whole step."""
        ...

    def saved_bytes(self, prepared: Any) -> int | None:
        """Kept for backward, parameters not counted; None where it makes no sense."""
        ...


@runtime_checkable
class Checked(Protocol):
    """A contestant that can say how far its answer is from the exact one."""

    def relative_error(self, prepared: Any) -> float: ...


Builder = Callable[[Options], Contestant]

# Where each kind keeps its table CONTESTANTS: dict[str, Builder].
KINDS = {
    "layer": "moefold.bench.layers",
    "attention": "moefold.bench.attentions",
    "step": "moefold.bench.steps.table",
}


def contestants_of(kind: str) -> dict[str, Builder]:
    """Imports torch; what a single contestant needs beside it, its builder imports."""
    table: dict[str, Builder] = importlib.import_module(KINDS[kind]).CONTESTANTS
    return table


def build(kind: str, name: str, options: Options) -> tuple[Contestant, str]:
    """The contestant, and the allocator that it really has."""
    allocator = options["allocator"]
    if allocator == "kept" and not importlib.import_module("moefold.ops.malloc").disable_malloc_trim():
        allocator = "default"
    torch = importlib.import_module("torch")
    torch.set_num_threads(options["threads"])
    return contestants_of(kind)[name](options), allocator


def timed_run(contestant: Contestant, seed: int, meet: Callable[[], object] = lambda: None) -> dict[str, float]:
    """``meet`` is where ranks wait for each other, after what is not timed."""
    prepared = contestant.prepare(seed)
    meet()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    wall, cpu = time.perf_counter(), time.process_time()
    contestant.run(prepared)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"wall": wall, "cpu": cpu, "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults}


def measured_memory(contestant: Contestant, seed: int, built: int | None) -> dict[str, int | None]:
    """``built``: resident bytes when the contestant was ready; what it held on to since then is its own."""
    saved = contestant.saved_bytes(contestant.prepare(seed))
    prepared = contestant.prepare(seed)
    before, peak = measured_peak(lambda: contestant.run(prepared))
    held = None if before is None or built is None else before - built
    return {"saved": saved, "peak": peak, "held": held}


def measured_error(contestant: Contestant, seed: int) -> dict[str, float | None]:
    if not isinstance(contestant, Checked):
        return {"error": None}
    return {"error": contestant.relative_error(contestant.prepare(seed))}


def serve(contestant: Contestant, commands: TextIO, answers: TextIO) -> None:
    built = resident_bytes()
    for line in commands:
        command = json.loads(line)
        seed = command["seed"]
        try:
            if command["do"] == "run":
                answer: dict[str, Any] = timed_run(contestant, seed)
            elif command["do"] == "memory":
                answer = measured_memory(contestant, seed, built)
            else:
                answer = measured_error(contestant, seed)
        except Exception as error:
            answer = {"failed": in_one_line(error)}
        say(answers, answer)


def in_one_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:300]


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    kind, name, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    # Libraries may print; the protocol needs stdout for itself.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        contestant, allocator = build(kind, name, options)
    except Exception as error:
        say(answers, {"failed": in_one_line(error)})
        return
    say(answers, {"ready": name, "allocator": allocator})
    serve(contestant, sys.stdin, answers)


if __name__ == "__main__":
    main()
