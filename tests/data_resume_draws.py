"""Kill real runs while they read their data, go on with other numbers of ranks, and compare the samples they saw (F15).

    python -m tests.data_resume_draws --count 20 --seed 7 --json data_resume.json

A draw is a data set, a packing, an interval of checkpoints, the ranks of three stages (2, 4, 1 or 4, 2, 1), and
two to five steps in which a rank is killed, one of them the first of an epoch. Every sample that a rank reads is
noted with its number and id, and so is every step that was trained. Of each step its last training counts. The samples
of these must be those of a run in one process that nobody disturbs: each number once, with the same id, and every item
of every finished epoch once.

A start is known by its incarnation, which the run's directory has before a sample is read. Counting kills is not
enough: a launcher that starts the ranks again for another reason, such as a hang on a busy machine, would give two
starts one name, and what each of them read once would look like samples read twice. `--unplanned` makes such a
restart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import moefold
from moefold.checkpoint.run_lock import read_incarnation
from moefold.data.samples import DocumentSamples, Sample, Samples
from moefold.data.token_writers import MegatronWriter

BATCH, SEQ_LEN = 4, 16


@dataclass(frozen=True)
class Draw:
    """``items`` of each source; ``worlds`` train up to ``until``; a rank is killed in each step of ``kills``."""

    items: tuple[int, ...]
    packing: str
    save_every: int
    worlds: tuple[int, ...]
    until: tuple[int, ...]
    kills: tuple[int, ...]
    seed: int


def draw(rng: random.Random) -> Draw:
    items = tuple(rng.randint(13, 26) for _ in range(rng.choice((1, 1, 2))))
    steps = -(-5 * sum(items) // (2 * BATCH))
    # A process that has trained alone holds the run until it ends, so it comes last.
    worlds = rng.choice(((2, 4, 1), (4, 2, 1)))
    border, possible = sum(items) // BATCH + 1, set()
    # In stages of several ranks: a single process has no rank to lose. Four of them besides the border.
    while border not in possible or len(possible) < 5:
        until = (*sorted(rng.sample(range(2, steps), 2)), steps)
        firsts = (1, *(end + 1 for end in until))
        possible = {
            step for world, *ends in zip(worlds, firsts, until) if world > 1 for step in range(ends[0], ends[1] + 1)
        }
    kills = tuple(sorted([border, *rng.sample(sorted(possible - {border}), rng.randint(1, 4))]))
    packing = rng.choice(("concat", "concat_masked", "bin_packed"))
    return Draw(items, packing, rng.randint(2, 4), worlds, until, kills, rng.randrange(1000))


class Notes:
    """A file to which all ranks append lines; ``start`` tells apart the times that the ranks were started.

    Read once per process, since the next start takes another number; at once as a pair, since the thread that reads
    ahead asks as well.
    """

    def __init__(self, directory: Path, run_dir: Path) -> None:
        self.directory, self.run_dir = directory, run_dir
        self._known = (0, 0)

    @property
    def start(self) -> int:
        known = self._known
        if known[0] != os.getpid():
            incarnation = read_incarnation(self.run_dir)
            assert incarnation is not None, "samples are read after the run was started"
            self._known = known = (os.getpid(), incarnation.number)
        return known[1]

    def add(self, **facts: object) -> None:
        line = json.dumps({"start": self.start, **facts}) + "\n"
        descriptor = os.open(self.directory / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "notes").read_text().splitlines()]


class Disturb(moefold.Callback):
    """Kills the last rank before the update of the next step of the plan, and ends a stage.

    Not earlier: gradients are summed then, so all ranks have read samples and noted which start they belong to.
    """

    def __init__(self, notes: Notes, plan: Draw, until: int, unplanned: bool = False) -> None:
        self.notes, self.plan, self.until, self.step = notes, plan, until, 0
        # Once, before the step after the last planned kill; earlier, a place that fails often would be given up.
        self.unplanned = unplanned

    def before_step(self, step: int, control: moefold.Control) -> None:
        self.step = step
        mark, killed = (self.notes.directory / name for name in ("unplanned", f"killed_{max(self.plan.kills)}"))
        last = control.world > 1 and control.rank == control.world - 1
        if self.unplanned and last and step > max(self.plan.kills) and killed.exists() and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def after_backward(self, gradients: Any, control: moefold.Control) -> None:
        due = [kill for kill in self.plan.kills if not (self.notes.directory / f"killed_{kill}").exists()]
        if control.world > 1 and control.rank == control.world - 1 and self.step in due:
            (self.notes.directory / f"killed_{self.step}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, record: moefold.StepRecord, control: moefold.Control) -> None:
        self.notes.add(trained=record.step)
        if record.step >= self.until:
            control.request_stop("the stage ends here")


def noting(kind: type[Samples] | type[DocumentSamples], notes: Notes) -> Any:
    """``kind.sample`` that notes what it reads; returns what undoes it."""
    original = kind.sample

    def sample(self: Any, index: int) -> Sample:
        found: Sample = original(self, index)
        notes.add(index=index, id=found.id)
        return found

    kind.sample = sample  # type: ignore[method-assign,assignment]
    return lambda: setattr(kind, "sample", original)


def seen(notes: Notes) -> dict[int, dict[int, list[str]]]:
    """Step -> sample number -> ids, as often as they were read, of each step's last training."""
    lines = notes.read()
    start_of = {line["trained"]: line["start"] for line in lines if "trained" in line}
    read: dict[tuple[int, int], list[str]] = defaultdict(list)
    for line in lines:
        if "index" in line:
            read[line["start"], line["index"]].append(line["id"])
    found: dict[int, dict[int, list[str]]] = {}
    for step, start in start_of.items():
        found[step] = {index: read[start, index] for index in range((step - 1) * BATCH, step * BATCH)}
    return found


def config(plan: Draw, root: Path, name: str) -> moefold.RunConfig:
    mixture = [{"path": str(root / f"source_{number}"), "weight": 1.0} for number in range(len(plan.items))]
    return moefold.load_run(
        "debug_tiny",
        {
            "name": name,
            "seed": plan.seed,
            "data.seq_len": SEQ_LEN,
            "data.global_batch": BATCH,
            "data.packing": plan.packing,
            "data.mixture": mixture,
            "data.validation": None,
            "train.steps": plan.until[-1],
            "train.directory": str(root),
            "train.saving.every": plan.save_every,
            "train.corruption.every": 0,
        },
    )


def write_sources(plan: Draw, root: Path) -> None:
    """As many windows, or documents that are one piece each, as the plan says."""
    rng = np.random.default_rng(plan.seed)
    for number, items in enumerate(plan.items):
        with MegatronWriter(str(root / f"source_{number}"), "uint16") as writer:
            if plan.packing == "bin_packed":
                for _ in range(items):
                    writer.add(rng.integers(1, 256, rng.integers(2, SEQ_LEN + 2)))
            else:
                writer.add(rng.integers(1, 256, items * SEQ_LEN + 1))


def run_draw(plan: Draw, root: Path, unplanned: bool = False) -> list[str]:
    """What is wrong with the disturbed run; nothing if it saw what the other one saw."""
    write_sources(plan, root)
    both = []
    for name in ("calm", "disturbed"):
        notes = Notes(root / f"notes_{name}", root / name)
        notes.directory.mkdir()
        undo = [noting(kind, notes) for kind in (Samples, DocumentSamples)]
        try:
            run = config(plan, root, name)
            stages = [(1, plan.until[-1])] if name == "calm" else list(zip(plan.worlds, plan.until))
            for world, until in stages:
                quiet = Disturb(notes, plan, until, unplanned)
                moefold.Trainer(run, callbacks=[quiet], reporters=[], nproc=world if world > 1 else None).fit()
        finally:
            for each in undo:
                each()
        both.append((notes, seen(notes)))
    (_, calm), (notes, disturbed) = both
    problems = compare(calm, disturbed, plan)
    killed = {int(path.name.partition("_")[2]) for path in notes.directory.glob("killed_*")}
    return problems + [f"step {step}: no rank was killed" for step in plan.kills if step not in killed]


def compare(calm: dict[int, dict[int, list[str]]], other: dict[int, dict[int, list[str]]], plan: Draw) -> list[str]:
    problems = []
    for step in range(1, plan.until[-1] + 1):
        for index in range((step - 1) * BATCH, step * BATCH):
            wanted, found = calm[step][index], other.get(step, {}).get(index, [])
            if len(wanted) != 1 or found != wanted:
                problems.append(f"step {step}, sample {index}: {found}, and {wanted} in the run that was not disturbed")
    ids = [id for step in other.values() for each in step.values() for id in each]
    epochs: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for source, epoch, item in (map(int, id.split(":")) for id in ids):
        epochs[source, epoch][item] += 1
    for (source, epoch), items in epochs.items():
        finished = (source, epoch + 1) in epochs
        if max(items.values()) > 1 or (finished and len(items) != plan.items[source]):
            problems.append(f"source {source}, epoch {epoch}: {len(items)} of {plan.items[source]} items, {items}")
    return problems


def run_all(
    count: int,
    seed: int,
    tell: bool = False,
    unplanned: bool = False,
    after_each: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, Any]:
    """``after_each`` gets what was found so far, so that a run that is ended early has figures of what it did."""
    rng, results, began = random.Random(seed), [], time.monotonic()
    for number in range(count):
        plan, root = draw(rng), Path(tempfile.mkdtemp(prefix="data-resume-"))
        try:
            problems = run_draw(plan, root, unplanned)
            starts = read_incarnation(root / "disturbed")
        finally:
            shutil.rmtree(root)
        # One per stage and one per kill, unless the launcher had another reason.
        more = (0 if starts is None else starts.number) - len(plan.worlds) - len(plan.kills)
        results.append({**asdict(plan), "other_restarts": more, "problems": problems})
        if tell or problems:
            print(f"{number + 1} of {count}: {plan}: {problems or 'same samples'}", flush=True)
        if after_each is not None:
            after_each(figures(seed, results, began))
    return figures(seed, results, began)


def figures(seed: int, results: list[dict[str, Any]], began: float) -> dict[str, Any]:
    return {
        "seed": seed,
        "runs": len(results),
        "kills": sum(len(each["kills"]) for each in results),
        "other_restarts": sum(each["other_restarts"] for each in results),
        "samples": sum(each["until"][-1] * BATCH for each in results),
        "bad": sum(bool(each["problems"]) for each in results),
        "seconds": round(time.monotonic() - began, 1),
        "each": results,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="runs (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument("--unplanned", action="store_true", help="one more kill in each run, which no plan has")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    args = parser.parse_args()

    def write(found: dict[str, Any]) -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n")

    found = run_all(args.count, args.seed, tell=True, unplanned=args.unplanned, after_each=write)
    print(f"{found['runs']} runs, {found['kills']} kills, {found['samples']} samples: {found['bad']} bad")
    return 1 if found["bad"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
