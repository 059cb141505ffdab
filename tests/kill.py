"""Kill ranks of a real run at named points, and record everything the run does.

A kill is planned as (rank, point, occurrence). The rank breaks itself before it starts: it replaces one function by one
that ends the process at that call. Which kill of the plan is due is the number of kills that have happened, counted in
files, so every start of the run knows it without being told.

Every planned kill happens: for each point it is known how many checkpoints a start may commit before it dies there, and
the run is made as long as the whole plan may need. Which points a layout passes, and how often, is counted in the run
that nobody kills.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

import moefold.checkpoint.files
import moefold.comm.collectives
import moefold.comm.p2p
import moefold.pipeline.step
import moefold.train.train_loop
from moefold.comm.shared_memory import SharedMemory
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.config.train import SavingConfig
from moefold.optim.muon import Muon
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.param_shards import local_part
from moefold.train.callback import Callback, Control, RunInfo, StepRecord
from moefold.train.fault_tolerance.signals import INTERRUPTED
from moefold.train.fault_tolerance.supervise import supervise
from moefold.train.train_context import TrainContext, build_train_context, run_directory
from moefold.train.train_loop import train

SAVE_EVERY = 3


@dataclass(frozen=True)
class Kill:
    rank: int
    point: str
    occurrence: int


def _before(owner: Any, name: str, nth: int, die: Callable[[], NoReturn]) -> None:
    """Die at the ``nth`` call of ``owner.name``, before it does anything."""
    _at(owner, name, nth, lambda call, *args, **words: die())


def _at(owner: Any, name: str, nth: int, instead: Callable[..., Any]) -> None:
    original, calls = getattr(owner, name), [0]

    def counted(*args: Any, **words: Any) -> Any:
        calls[0] += 1
        return instead(original, *args, **words) if calls[0] == nth else original(*args, **words)

    setattr(owner, name, counted)


def _mid_write(nth: int, die: Callable[[], NoReturn]) -> None:
    def half(write: Callable[..., None], descriptor: int, part: memoryview) -> None:
        write(descriptor, part[: len(part) // 2])
        die()

    _at(moefold.checkpoint.files, "_write_all", nth, half)


def _mid_optimizer(nth: int, die: Callable[[], NoReturn]) -> None:
    def first_group(step: Callable[..., Any], optimizer: ModelOptimizer, *rest: Any) -> None:
        part = optimizer.parts[0]
        # Ranks of Muon meet in exchanges for all groups.
        if not isinstance(part, Muon):
            part.param_groups = part.param_groups[:1]
            part.step()
        die()

    _at(ModelOptimizer, "step", nth, first_group)


def _mid_removal(kind: int, die: Callable[[], NoReturn]) -> None:
    """Of a checkpoint that need not stay (1), or of whatever goes first, be it what the last kill left (2)."""
    remove = moefold.checkpoint.files.remove_tree

    def one_file(path: Path) -> None:
        if kind == 1 and not path.name.endswith(".deleting"):
            return remove(path)
        # What a kill left may have its files in folders by rank, or none yet.
        for file in sorted(file for file in path.rglob("*") if file.is_file())[:1]:
            os.unlink(file)
        die()

    moefold.checkpoint.files.remove_tree = one_file


def _after(owner: Any, name: str, nth: int, die: Callable[[], NoReturn]) -> None:
    def and_then(call: Callable[..., Any], *args: Any, **words: Any) -> None:
        call(*args, **words)
        die()

    _at(owner, name, nth, and_then)


def _alarm(milliseconds: int, die: Callable[[], NoReturn]) -> None:
    """On a fast machine, at the seventh step at the latest: two checkpoints further at most."""
    _before(moefold.train.train_loop, "read_step", 2 * SAVE_EVERY + 1, die)
    signal.signal(signal.SIGALRM, lambda *_: die())
    signal.setitimer(signal.ITIMER_REAL, milliseconds / 1000)


class Point(NamedTuple):
    """``arm`` breaks the n-th occurrence, of ``choices``; up to ``commits`` checkpoints are committed on the way there.

    Up to three occurrences once per step, 40 exchanges, 20 sums and 9 sends all come before the first save ends.
    ``calls`` is the function that is passed there, if some layouts do not pass it, or less often.
    """

    arm: Callable[[int, Callable[[], NoReturn]], None]
    choices: int
    commits: int
    calls: tuple[Any, str] | None = None


def _call(owner: Any, name: str, choices: int) -> Point:
    return Point(lambda n, die: _before(owner, name, n, die), choices, 0, (owner, name))


POINTS = {
    "reading data": Point(lambda n, die: _before(moefold.train.train_loop, "read_step", n, die), 3, 0),
    "inside an exchange": _call(SharedMemory, "all_to_all", 40),
    "inside a sum": _call(moefold.comm.collectives, "_all_reduce", 20),
    "after backward": Point(lambda n, die: _before(moefold.pipeline.step, "finish_gradients", n, die), 3, 0),
    "mid-optimizer": Point(_mid_optimizer, 3, 0),
    "before the bias moves": _call(moefold.pipeline.step, "move_expert_biases", 3),
    "mid-shard": Point(_mid_write, 12, 0, (moefold.checkpoint.files, "_write_all")),
    "before a file is durable": Point(lambda n, die: _before(moefold.checkpoint.files, "fsync", n, die), 3, 1),
    "between manifest and commit": Point(lambda n, die: _before(moefold.checkpoint.files, "rename", n, die), 2, 1),
    "just after commit": Point(lambda n, die: _after(moefold.checkpoint.files, "rename", n, die), 2, 2),
    "during retention": Point(_mid_removal, 2, 3),
    "any time": Point(_alarm, 3000, 2),
}
# Between the stages of a pipeline.
PIPE_POINTS = {"inside a send": _call(moefold.comm.p2p.P2PChannels, "send", 9)}
ALL_POINTS = POINTS | PIPE_POINTS
# It commits and deletes.
ONLY_RANK_0 = ("between manifest and commit", "just after commit", "during retention")


def steps_for(kills: list[Kill]) -> int:
    """Enough for every kill to happen however far each start gets, and for one more save after the last."""
    return SAVE_EVERY * (sum(ALL_POINTS[kill.point].commits for kill in kills) + 1)


def plan_kills(count: int, world: int, seed: int, *, pipeline: bool = False) -> list[Kill]:
    """Points in turn, so that each comes equally often."""
    dice = random.Random(seed)
    names = [*POINTS, *(PIPE_POINTS if pipeline else ())]
    dice.shuffle(names)
    kills = []
    for number in range(count):
        point = names[number % len(names)]
        rank = 0 if point in ONLY_RANK_0 else dice.randrange(world)
        kills.append(Kill(rank, point, dice.randint(1, ALL_POINTS[point].choices)))
    return kills


def plan_possible_kills(count: int, passed: Sequence[Mapping[str, int]], seed: int) -> list[Kill]:
    """As `plan_kills`, of the points that a layout passes; ``passed`` is by rank how often, as `count_points` says."""
    dice, kills = random.Random(seed), []
    names = [name for name in ALL_POINTS if any(_choices(name, each) for each in passed)]
    dice.shuffle(names)
    for number in range(count):
        point = names[number % len(names)]
        ranks = [rank for rank, each in enumerate(passed) if _choices(point, each)]
        rank = 0 if point in ONLY_RANK_0 else dice.choice(ranks)
        kills.append(Kill(rank, point, dice.randint(1, _choices(point, passed[rank]))))
    return kills


def _choices(point: str, passed: Mapping[str, int]) -> int:
    return min(ALL_POINTS[point].choices, passed.get(point, ALL_POINTS[point].choices))


def count_points() -> dict[str, int]:
    """Counts, from now on, how often this process passes the points that not all layouts pass alike."""
    passed = {name: 0 for name, point in ALL_POINTS.items() if point.calls is not None}
    for name, point in ALL_POINTS.items():
        if point.calls is not None:
            _count(passed, name, *point.calls)
    return passed


def _count(passed: dict[str, int], point: str, owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def counted(*args: Any, **words: Any) -> Any:
        passed[point] += 1
        return original(*args, **words)

    setattr(owner, name, counted)


class Diary(Callback):
    """Everything the run says, appended line by line, with floats to the last bit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _write(self, **said: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(said) + "\n")

    def on_start(self, info: RunInfo) -> None:
        self._write(kind="start", step=info.resumed_from or 0)

    def after_step(self, record: StepRecord, control: Control) -> None:
        kept = asdict(record)
        for changing in ("seconds", "memory_bytes"):
            del kept[changing]
        self._write(kind="step", **kept | {"loss": record.loss.hex(), "grad_norm": record.grad_norm.hex()})

    def on_save(self, step: int, path: Path) -> None:
        self._write(kind="save", step=step)


class TimedDiary(Diary):
    """Every line with the time at which it was written."""

    def _write(self, **said: Any) -> None:
        super()._write(at=time.monotonic(), **said)


def digest(context: TrainContext) -> str:
    """Of every number that this rank holds or saves: parameters, optimizer states, buffers, random state."""
    found = hashlib.sha256()
    parameters = [piece.parameter for piece in context.local_model.pieces()]
    tensors = [local_part(parameter) for parameter in parameters]
    stored = [state for p in parameters for state in context.optimizer.stored_state(p).values()]
    tensors += [state if isinstance(state, Tensor) else torch.tensor(state) for state in stored]
    tensors += [*context.local_model.model.buffers(), torch.get_rng_state()]
    for tensor in tensors:
        found.update(local_part(tensor.detach()).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def small_run(base: RunConfig, directory: Path, parallel: ParallelConfig, background: bool, steps: int) -> RunConfig:
    saving = SavingConfig(every=SAVE_EVERY, keep=2, background=background)
    data = replace(base.data, seq_len=16, global_batch=8, micro_batch=1, validation=None)
    settings = replace(base.train, steps=steps, directory=str(directory), saving=saving)
    return replace(base, parallel=parallel, data=data, train=settings)


def run_with_kills(run: RunConfig, world: int, kills: list[Kill]) -> tuple[list[dict[str, Any]], list[str], int]:
    """Returns the diary, every rank's digest at the end, and how many kills happened."""
    directory = run_directory(run)
    directory.mkdir(parents=True)
    happened = directory / "kills"
    happened.mkdir()

    def work(rank: int) -> int:
        number, passed = len(list(happened.iterdir())), {} if kills else count_points()
        if number < len(kills) and kills[number].rank == rank:

            def die() -> NoReturn:
                (happened / f"{number}").write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
                raise AssertionError("unreachable")

            ALL_POINTS[kills[number].point].arm(kills[number].occurrence, die)
        context, state = build_train_context(run, rank, world, torch.device("cpu"), 30.0)
        code = train(context, state, [TimedDiary(directory / "diary.jsonl")])
        signal.setitimer(signal.ITIMER_REAL, 0)
        (directory / f"digest_{rank}").write_text(digest(context))
        (directory / f"passed_{rank}.json").write_text(json.dumps(passed))
        return code

    code = supervise(work, world, directory / "checkpoints", 30.0, max_fruitless=len(kills) + 3)
    if code == INTERRUPTED:
        raise KeyboardInterrupt("asked to stop")
    assert code == 0
    diary = [json.loads(line) for line in (directory / "diary.jsonl").read_text().splitlines()]
    digests = [(directory / f"digest_{rank}").read_text() for rank in range(world)]
    return diary, digests, len(list(happened.iterdir()))


def assert_same_steps(peaceful: list[dict[str, Any]], killed: list[dict[str, Any]], steps: int) -> None:
    """Every step, and every repetition of one, has the loss, norm, counts and samples it had in peace."""
    expected = {entry["step"]: entry for entry in peaceful if entry["kind"] == "step"}
    assert sorted(expected) == list(range(1, steps + 1))
    done = [entry for entry in killed if entry["kind"] == "step"]
    assert {entry["step"] for entry in done} == set(expected)
    for entry in done:
        assert entry | {"at": 0} == expected[entry["step"]] | {"at": 0}


def assert_nothing_committed_was_lost(diary: list[dict[str, Any]]) -> None:
    newest = 0
    for entry in diary:
        if entry["kind"] == "start":
            assert entry["step"] >= newest, diary
        if entry["kind"] == "save":
            newest = max(newest, entry["step"])
