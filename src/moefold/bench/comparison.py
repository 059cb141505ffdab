"""Lets contestants take turns: one process each, one run per turn, round after round.

Everybody runs once per round, and the order moves on by one each round, so that nobody always follows the same
neighbour. Rounds before the first that counts fetch memory and make GEMM plans. Routing is first the same in every run,
then a new one in every round, which is what training has; all contestants are given the same one.

Single-threaded contestants are timed by the CPU time of their process, which a busy neighbour changes little; with
more threads it is the time on the wall.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, Any

from moefold.bench.machine_load import cores_of_others, now
from moefold.bench.process_memory import available_bytes
from moefold.bench.results import CHANGING, FIXED, Contest, Entrant, Run, Standing
from moefold.units import format_bytes

# Told what is being done, and how many of how many.
Say = Callable[[str, int, int], None]
ROUNDS, WARM = 9, 3
# Nobody takes this long to start, or for one run.
_SECONDS_TO_START, _SECONDS_TO_RUN = 300.0, 300.0
# Seeds of the runs: the fixed routing's, and the first of those that change.
FIXED_SEED, FIRST_SEED = 0, 1000
# Whoever would run with less left on the machine is stopped, before the kernel picks somebody.
_LEAST_MEMORY = 512 * 2**20
# Of its last words, as many are kept.
_LAST_WORDS = 300


class Worker:
    """The parent's end of one contestant's process."""

    def __init__(self, kind: str, entrant: Entrant) -> None:
        self.entrant = entrant
        # Closed by `end`: it lives as long as the process.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        threads = str(entrant.options["threads"])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moefold.bench.runner", kind, entrant.name, json.dumps(entrant.options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        )
        self._inbox = b""

    def wait_until_ready(self) -> dict[str, Any]:
        return self._answer(_SECONDS_TO_START)

    def ask(self, do: str, seed: int) -> dict[str, Any]:
        """Its answer; ``failed`` in it says that there will be no other."""
        left = available_bytes()
        if left is not None and left < _LEAST_MEMORY:
            self._process.kill()
            return {"failed": f"stopped, for {format_bytes(left)} of memory were left; take fewer contestants"}
        try:
            _pipe(self._process.stdin).write(json.dumps({"do": do, "seed": seed}).encode() + b"\n")
            _pipe(self._process.stdin).flush()
        except OSError:
            return self._ended()
        return self._answer(_SECONDS_TO_RUN)

    def end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            # It may have died with a command unread.
            with suppress(OSError):
                _pipe(pipe).close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        out = _pipe(self._process.stdout)
        with selectors.DefaultSelector() as waiting:
            waiting.register(out, selectors.EVENT_READ)
            while b"\n" not in self._inbox:
                if not waiting.select(seconds):
                    return {"failed": f"no answer within {seconds:.0f} s"}
                piece = os.read(out.fileno(), 1 << 16)
                if not piece:
                    return self._ended()
                self._inbox += piece
        line, _, self._inbox = self._inbox.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> dict[str, Any]:
        code = self._process.wait()
        self._errors.seek(0)
        words = " ".join(self._errors.read().split())[-_LAST_WORDS:]
        ended = f"its process ended with {code}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
        return {"failed": f"{ended}: {words}" if words else ended}


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def hold_contest(
    kind: str,
    title: str,
    entrants: Sequence[Entrant],
    *,
    rounds: int = ROUNDS,
    warm: int = WARM,
    routings: Sequence[str] = (FIXED, CHANGING),
    tolerance: float = float("inf"),
    say: Say = lambda what, done, total: None,
) -> Contest:
    """Everybody's runs. Who cannot start, or fails on the way, is in the result with its reason."""
    began = now()
    one_thread = all(entrant.options["threads"] == 1 for entrant in entrants)
    with _workers(kind, entrants) as workers:
        standings = [_started(worker, number, len(workers), say) for number, worker in enumerate(workers, 1)]
        for routing in routings:
            standings = _take_turns(workers, standings, routing, rounds, warm, say)
        standings = [_weighed(worker, standing) for worker, standing in zip(workers, standings)]
        say("memory and errors", len(workers), len(workers))
    return Contest(title, "cpu" if one_thread else "wall", rounds, tuple(standings), tolerance, cores_of_others(began))


@contextmanager
def _workers(kind: str, entrants: Sequence[Entrant]) -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    try:
        for entrant in entrants:
            workers.append(Worker(kind, entrant))
        yield workers
    finally:
        for worker in workers:
            worker.end()


def _started(worker: Worker, number: int, total: int, say: Say) -> Standing:
    answer = worker.wait_until_ready()
    say("contestants ready", number, total)
    return Standing(worker.entrant, allocator=answer.get("allocator", ""), failure=answer.get("failed", ""))


def _take_turns(
    workers: Sequence[Worker], standings: list[Standing], routing: str, rounds: int, warm: int, say: Say
) -> list[Standing]:
    runs: list[list[Run]] = [[] for _ in workers]
    failures = [standing.failure for standing in standings]
    for number in range(warm + rounds):
        seed = FIRST_SEED + number if routing == CHANGING else FIXED_SEED
        for place in range(len(workers)):
            which = (place + number) % len(workers)
            if failures[which]:
                continue
            answer = workers[which].ask("run", seed)
            failures[which] = answer.get("failed", "")
            if number >= warm and not failures[which]:
                runs[which].append(Run(**answer))
        say(rounds_of(routing), max(0, number + 1 - warm), rounds)
    return [
        replace(standing, failure=failure, runs=standing.runs | {routing: tuple(taken)})
        for standing, failure, taken in zip(standings, failures, runs)
    ]


def rounds_of(routing: str) -> str:
    return f"{routing} routing, rounds" if routing else "rounds"


def _weighed(worker: Worker, standing: Standing) -> Standing:
    """With its memory and its error, which are measured apart from its time; its times count without them."""
    for do in ("memory", "check"):
        if standing.failure:
            return standing
        answer = worker.ask(do, FIXED_SEED)
        failed = answer.pop("failed", "")
        remark = f"{standing.remark} {do} not measured: {failed}".strip() if failed else standing.remark
        standing = replace(standing, remark=remark, **answer)
    return standing
