"""Runs candidates in alternation: one process each, one run per round.

Every candidate runs once per round, and the order rotates by one each round, so that none always follows the same
other one. Warm-up rounds allocate memory and fill caches of GEMM plans. The routing is first fixed, then new in every
round as in training; all candidates get the same one.

With one thread the CPU time of the process counts, which other processes disturb little; with more threads it is the
wall time.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import IO, Any

from benchmarks.process_stats import available_bytes, busy_cores_of_others, cpu_times
from benchmarks.results import (
    CHANGING,
    FIXED,
    MIN_ROUNDS_FOR_VERDICT,
    CandidateResult,
    CandidateSpec,
    Comparison,
    Run,
    rounds_run,
)
from benchmarks.targets import AS_LAUNCHED, SAME
from moefold.bench.clock import Progress, rounds_within
from moefold.units import format_bytes

# Time limits of a candidate's start and of one run.
_SECONDS_TO_START, _SECONDS_TO_RUN = 300.0, 300.0
# Seeds of the runs: the fixed routing's, and the first of those that change.
FIXED_SEED, FIRST_SEED = 0, 1000
# A candidate is killed if less memory is left on the machine, before the kernel kills some process.
_LEAST_MEMORY = 512 * 2**20
# Characters of stderr that a failure reports.
_STDERR_CHARS = 300


@dataclass(frozen=True)
class Setting:
    """What a comparison's candidates have in common, and how often they run."""

    dtype: str = "bfloat16"
    threads: int = 1
    same_allocator: bool = False
    rounds: int = 9
    warm: int = 3
    routings: tuple[str, ...] = (FIXED, CHANGING)
    # Seconds of all routings together.
    budget: float = inf

    @property
    def allocator(self) -> str:
        return SAME if self.same_allocator else AS_LAUNCHED

    @property
    def tolerance(self) -> float:
        """Largest relative error of a candidate that computes the same function in the same format. A router that
        rounds its scores to bfloat16 changes a few assignments, and each changes much of a token's output."""
        return {"bfloat16": 0.1, "float32": 1e-3}[self.dtype]


def threads_text(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


class Worker:
    """One candidate's process, seen from the parent."""

    def __init__(self, kind: str, spec: CandidateSpec) -> None:
        self.spec = spec
        # Closed by `end`: it lives as long as the process.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        threads = str(spec.options["threads"])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.runner", kind, spec.name, json.dumps(spec.options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=Path(__file__).parents[1],
            env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        )
        self._inbox = b""

    def wait_until_ready(self) -> dict[str, Any]:
        return self._reply(_SECONDS_TO_START)

    def ask(self, do: str, seed: int) -> dict[str, Any]:
        """Its reply; ``failed`` in it ends the candidate."""
        left = available_bytes()
        if left is not None and left < _LEAST_MEMORY:
            self._process.kill()
            return {"failed": f"stopped with {format_bytes(left)} of memory left on the machine; name fewer candidates"}
        try:
            _pipe(self._process.stdin).write(json.dumps({"do": do, "seed": seed}).encode() + b"\n")
            _pipe(self._process.stdin).flush()
        except OSError:
            return self._ended()
        return self._reply(_SECONDS_TO_RUN)

    def end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            # The process may have died with a command unread.
            with suppress(OSError):
                _pipe(pipe).close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _reply(self, seconds: float) -> dict[str, Any]:
        out = _pipe(self._process.stdout)
        with selectors.DefaultSelector() as waiting:
            waiting.register(out, selectors.EVENT_READ)
            while b"\n" not in self._inbox:
                if not waiting.select(seconds):
                    return {"failed": f"no reply within {seconds:.0f} s"}
                chunk = os.read(out.fileno(), 1 << 16)
                if not chunk:
                    return self._ended()
                self._inbox += chunk
        line, _, self._inbox = self._inbox.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _ended(self) -> dict[str, Any]:
        code = self._process.wait()
        self._errors.seek(0)
        words = " ".join(self._errors.read().split())[-_STDERR_CHARS:]
        ended = f"its process ended with {code}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
        return {"failed": f"{ended}: {words}" if words else ended}


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def run_comparison(
    kind: str,
    title: str,
    specs: Sequence[CandidateSpec],
    setting: Setting,
    progress: Progress | None = None,
) -> Comparison:
    """All runs. A candidate that cannot start, or fails later, is in the result with its reason."""
    began = cpu_times()
    one_thread = all(spec.options["threads"] == 1 for spec in specs)
    with _workers(kind, specs) as workers:
        results = [_started(worker, number, len(workers), progress) for number, worker in enumerate(workers, 1)]
        for routing in setting.routings:
            results = _alternate(workers, results, routing, setting, progress)
        results = [_with_memory_and_error(worker, result) for worker, result in zip(workers, results)]
    return Comparison(
        title,
        "cpu" if one_thread else "wall",
        rounds_run(results),
        tuple(results),
        setting.tolerance,
        busy_cores_of_others(began),
    )


@contextmanager
def _workers(kind: str, specs: Sequence[CandidateSpec]) -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    try:
        for spec in specs:
            workers.append(Worker(kind, spec))
        yield workers
    finally:
        for worker in workers:
            worker.end()


def _started(worker: Worker, number: int, total: int, progress: Progress | None) -> CandidateResult:
    reply = worker.wait_until_ready()
    if progress is not None:
        progress("candidates ready", number, total)
    return CandidateResult(worker.spec, allocator=reply.get("allocator", ""), failure=reply.get("failed", ""))


def _alternate(
    workers: Sequence[Worker], results: list[CandidateResult], routing: str, setting: Setting, progress: Progress | None
) -> list[CandidateResult]:
    runs: list[list[Run]] = [[] for _ in workers]
    failures = [result.failure for result in results]
    budget = setting.budget / len(setting.routings)
    for number, round_ in enumerate(rounds_within(budget, setting.rounds, setting.warm)):
        seed = FIRST_SEED + number if routing == CHANGING else FIXED_SEED
        taken = [0.0] * len(workers)
        for position in range(len(workers)):
            which = (position + number) % len(workers)
            if failures[which]:
                continue
            if progress is not None and not number:
                progress(f"first run of {results[which].name}, rounds", 0, setting.rounds)
            reply = workers[which].ask("run", seed)
            failures[which] = reply.get("failed", "")
            taken[which] = reply.get("wall", 0.0)
            if round_.counts and not failures[which]:
                runs[which].append(Run(**reply))
        if not number:
            peers = [result.spec.role == "peer" for result in results]
            for which in too_slow(taken, peers, budget):
                failures[which] = f"left out: its first run took {taken[which]:.1f} s, {_why_left_out(budget)}"
        round_.show(progress, rounds_of(routing))
    return [
        replace(result, failure=failure, runs=result.runs | {routing: tuple(taken)})
        for result, failure, taken in zip(results, failures, runs)
    ]


def too_slow(taken: Sequence[float], may_leave: Sequence[bool], budget: float) -> list[int]:
    """Whom to leave out, slowest first, so that as many rounds as a verdict needs fit the budget. By the times of a
    first round: those of a later one are shorter."""
    left = list(range(len(taken)))
    out: list[int] = []
    while MIN_ROUNDS_FOR_VERDICT * sum(taken[each] for each in left) > budget:
        slowest = max((each for each in left if may_leave[each] and taken[each]), key=taken.__getitem__, default=None)
        if slowest is None:
            break
        left.remove(slowest)
        out.append(slowest)
    return out


def _why_left_out(budget: float) -> str:
    return f"and {MIN_ROUNDS_FOR_VERDICT} rounds with it do not fit into {budget:.0f} s (--budget)"


def rounds_of(routing: str) -> str:
    return f"{routing} routing, rounds" if routing else "rounds"


def _with_memory_and_error(worker: Worker, result: CandidateResult) -> CandidateResult:
    """Adds memory and error, which are measured after the times. Times count even if these fail."""
    for do in ("memory", "check"):
        if result.failure:
            return result
        reply = worker.ask(do, FIXED_SEED)
        failed = reply.pop("failed", "")
        remark = f"{result.remark} {do} not measured: {failed}".strip() if failed else result.remark
        result = replace(result, remark=remark, **reply)
    return result
