"""The fault matrix: what can go wrong, what must hold then, which test shows it, and what was measured.

Rows are data. A figure is read from the file that the row's command wrote (docs/measured), so the table says no more
than what was run; a row without a figure has its tests alone.

    python -m tests.fault_matrix --write      # the table of docs/reliability.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
PAGE, MEASURED = DOCS / "reliability.md", DOCS / "measured"
BEGIN, END = "<!-- fault matrix: python -m tests.fault_matrix --write -->", "<!-- end of the fault matrix -->"


class Row(NamedTuple):
    """``tests`` are files below tests/, or modules that `python -m tests.NAME` runs; ``figure`` reads ``file``."""

    number: str
    fault: str
    holds: str
    tests: tuple[str, ...]
    file: str = ""
    figure: Callable[[Any], str] | None = None


def _pieces(name: str, *counts: str) -> Callable[[Any], str]:
    """The sum over pieces of the number of cases, and of each count of what must not happen."""

    def figure(found: Any) -> str:
        total = [sum(piece[count] for piece in found["pieces"]) for count in (name, *counts)]
        bad = ", ".join(f"{number} {count.replace('_', ' ')}" for count, number in zip(counts, total[1:], strict=True))
        return f"{total[0]:,} {name}: {bad}"

    return figure


def _hangs(found: Any) -> str:
    draws = found["draws"]
    names = ("hangs", "noticed_in_bound", "noticed_in_1.5_bounds", "culprit_named")
    count, bound, later, named = (sum(draw[name] for draw in draws) for name in names)
    next_step = statistics.median(each["next_step"] for draw in draws for each in draw["each"])
    kinds = len({each["kind"] for draw in draws for each in draw["each"]})
    return (
        f"{count} hangs of {kinds} kinds: {bound} noticed in bound, {later} within 1.5 of it, {named} named and "
        f"restarted; next step after {next_step:.1f} s (median)"
    )


def _flips(found: Any) -> str:
    flips, must, seen = (
        sum(layout[name] for layout in found["layouts"]) for name in ("flips", "must_be_found", "found")
    )
    return f"{flips} flips: {seen} found of {must} that have a replica or fall into a framed step"


def _resumes(found: Any) -> str:
    return f"{found['runs']} runs, {found['kills']} kills, {found['samples']:,} samples: {found['bad']} bad"


def _soak(found: Any) -> str:
    share = found["effective_training_time"]
    return (
        f"{found['minutes']:g} min, {found['faults']} faults: {share:.1%} effective training time, "
        f"{found['steps_that_differ']} of {found['steps_compared']:,} losses differ"
    )


def _slow(found: Any) -> str:
    rows = [f"{row['factor']:g} times: {row['named_in_bound']} of {row['draws']} named" for row in found["rows"]]
    return f"{', '.join(rows)}; {found['false_alarms']} false alarms in {found['clean_windows']} clean windows"


def _hosts(found: Any) -> str:
    longest = found["next_step_s"]["max"]
    return f"{found['recovered']} of {found['faults']} recovered, next step after {longest:.1f} s at most"


def _lost(found: Any) -> str:
    rows = found["rows"]
    differ = {row["dtype"]: max(each["difference"] for each in rows if each["dtype"] == row["dtype"]) for row in rows}
    said = ", ".join(f"{difference:.1g} in {dtype}" for dtype, difference in differ.items())
    longest = max(row["seconds"] for row in rows)
    return f"{len(rows)} cases: next step after {longest:.1f} s at most; losses differ by {said}"


def _peers(found: Any) -> str:
    place = found["lost_place"]
    return (
        f"{found['hosts_lost']} hosts lost: {found['from_memory']} restored from the other's memory, "
        f"{found['steps_redone_max']} steps redone at most; both lost {found['both_lost']} times: "
        f"{found['from_disk']} from disk; {found['bitwise']} of {len(found['each'])} bit for bit; "
        f"a place lost for good: step {place['interrupted_step']} done by {place['world']} ranks, "
        f"losses differ by {place['difference']:.0e}"
    )


def _saves(found: Any) -> str:
    kinds, ended, differ = len(found["kinds"]), found["runs_ended"], found["runs_that_differ"]
    return f"{found['failed_saves']} failed saves of {kinds} kinds: {ended} runs ended, {differ} differ"


def _growth(found: Any) -> str:
    memory = max(of["growth"] for name, of in found["grown"].items() if name.endswith("rss"))
    more = max(of["late"] - of["early"] for name, of in found["grown"].items() if not name.endswith("rss"))
    return f"{found['restarts']} restarts: memory grows by {memory:.2%} at most, descriptors and threads by {more:g}"


def _fuzz(*parsers: str) -> Callable[[Any], str]:
    def figure(found: Any) -> str:
        chosen = [found["parsers"][name] for name in parsers] if parsers else list(found["parsers"].values())
        cases, failed = (sum(each[name] for each in chosen) for name in ("cases", "failed"))
        return f"{cases:,} damaged inputs for {len(chosen)} parsers: {failed} failed"

    return figure


def _exploits(found: Any) -> str:
    return f"{found['exploits']} exploits, {found['tried']} tried: {found['succeeded']} succeeded"


MATRIX = (
    Row(
        "F1",
        "a rank is killed at any point of a step or a save",
        "every number on every rank, and every loss, to the last bit",
        ("ranks/test_kill.py", "ranks/test_checkpoint_background.py"),
    ),
    Row(
        "F1n",
        "the same over drawn layouts on 2 to 8 ranks, context parallelism among them",
        "as F1, random state of every rank",
        ("kill_draws",),
        "kills.json",
        _pieces("kills", "failures"),
    ),
    Row(
        "F2",
        "the launcher or torchrun's agent is killed",
        "ranks gone within 1 s, the same command resumes",
        ("ranks/test_signals.py",),
    ),
    Row(
        "F3",
        "SIGTERM, SIGINT, once or again, to a rank, the launcher or the group; crashes, exceptions",
        "saved, exit code 75, never started again; a crash is named and restarted",
        ("ranks/test_signals.py", "signal_draws"),
        "signals.json",
        _pieces("draws", "unsaved", "restarts_after_a_stop", "tracebacks", "failures"),
    ),
    Row(
        "F4",
        "a rank hangs: stopped, GIL held, endless loop, blocked read, left-out or different collective, dead NIC",
        "noticed in bound, the rank and its phase named, stacks of all ranks kept, restarted",
        ("ranks/test_hangs.py", "train/test_watchdog.py", "hang_draws"),
        "hangs.json",
        _hangs,
    ),
    Row(
        "F5",
        "a rank is slow",
        "named within three windows, none else",
        ("ranks/test_stragglers.py", "straggler_draws"),
        "stragglers.json",
        _slow,
    ),
    Row(
        "F6",
        "the link of two hosts is cut, one way, slow or lossy; a host is killed or vanishes, and comes back or not",
        "both sides stop, never two writers, they go on when it is mended, or one goes on alone",
        ("ranks/test_host_faults.py", "train/test_host_starts.py", "host_faults"),
        "host_faults.json",
        _hosts,
    ),
    Row(
        "F7",
        "1, 2 or half of 8 ranks are lost for good",
        "goes on with the next legal layout within 10 s, the same losses up to rounding",
        ("ranks/test_elastic.py", "loss_of_ranks"),
        "loss_of_ranks.json",
        _lost,
    ),
    Row(
        "F8",
        "two launchers on one run; a writer of an earlier start wakes up",
        "the second is refused and told who holds it; the old one cannot commit",
        ("checkpoint/test_run_lock.py",),
    ),
    Row(
        "F9",
        "checkpoints torn, flipped, truncated, swapped, renamed, linked",
        "refused with file and reason before a tensor changes; all ranks choose the same older one",
        ("checkpoint/test_damage.py",),
    ),
    Row(
        "F10",
        "a save or a metric meets a full disk, a quota, an error, no memory, no right",
        "tried again, then skipped and told; training goes on, older checkpoints stay",
        ("ranks/test_failed_saves.py", "train/test_real_full_disk.py", "save_faults"),
        "save_faults.json",
        _saves,
    ),
    Row(
        "F11",
        "a rank has no memory left, or is ended for lack of it",
        "rank, step, phase and peak are named; a rank that was ended is started again; no start leaves memory behind",
        ("ranks/test_failed_saves.py", "ranks/test_kill.py", "restart_growth"),
        "restart_growth.json",
        _growth,
    ),
    Row(
        "F12",
        "NaN or Inf in a loss, a gradient, one expert, one rank",
        "skipped on all ranks, no state changes, tensor and rank named",
        ("ranks/test_train.py",),
    ),
    Row(
        "F13",
        "a bit flips in a weight, a moment or a gradient",
        "found at the next comparison, tensor and rank named, rolled back",
        ("ranks/test_corruption.py", "body/test_state_hash.py"),
        "bit_flips.json",
        _flips,
    ),
    Row(
        "F14",
        "token files damaged, truncated, missing, replaced; tokens outside the vocabulary; another list of files",
        "file, document or block and tokens named; stopped, or left out of the loss with a record; resume refused",
        ("data/test_data_faults.py", "data/test_verification.py", "data/test_data_resume.py"),
    ),
    Row(
        "F15",
        "kills within an epoch and at its border, then 2, 4 and 1 ranks, or 4, 2 and 1",
        "the samples of a calm run: none twice, none left out",
        ("data/test_data_resume.py", "data_resume_draws"),
        "data_resume.json",
        _resumes,
    ),
    Row(
        "F16",
        "a run resumes on another layout or number of ranks",
        "every global tensor to the last bit",
        ("ranks/test_checkpoint_layouts.py",),
    ),
    Row(
        "F17",
        "a kill or a failure in the background of a save; saves that overlap",
        "no checkpoint without verified data, the failure is known on all ranks",
        ("ranks/test_checkpoint_background.py", "checkpoint/test_writer_thread.py"),
    ),
    Row(
        "F18",
        "a host is lost with its memory; both are; a rank or a place is lost between checkpoints",
        "resumes from the other host's memory, bit for bit; from the disk; at the interrupted step",
        ("ranks/test_memory_copies.py", "peer_copies"),
        "peer_copies.json",
        _peers,
    ),
    Row(
        "F19",
        "the wall clock jumps by an hour",
        "no alarm",
        ("ranks/test_hangs.py",),
    ),
    Row(
        "F20",
        "the same fault after every start",
        "ends after three starts without a new checkpoint, with the last cause",
        ("ranks/test_hangs.py",),
    ),
    Row(
        "F21",
        "random faults for hours",
        "effective training time of 95 %, losses to the last bit",
        ("soak",),
        "soak.json",
        _soak,
    ),
    Row(
        "B1",
        "damaged configurations",
        "an error that names the key",
        ("brain/test_config_load.py", "fuzz"),
        "fuzz.json",
        _fuzz("run files", "overrides"),
    ),
    Row(
        "B2",
        "malformed Hugging Face directories",
        "refused with file and tensor, nothing loaded, little memory",
        ("checkpoint/test_hf_hostile.py", "checkpoint/test_hf_refusals.py"),
    ),
    Row(
        "B3",
        "damaged inputs of every parser",
        "a value, or one error that names the file",
        ("fuzz",),
        "fuzz.json",
        _fuzz(),
    ),
    Row(
        "B4",
        "poisoned files for every loader",
        "nothing of them runs",
        ("checkpoint/test_hf_poison.py",),
    ),
    Row(
        "B6",
        "strangers at ports, bombs, scripts in names, links, foreign caches, secrets in files",
        "nothing is gained",
        ("security/test_exploits.py", "security.exploit_table"),
        "exploits.json",
        _exploits,
    ),
)


def table() -> str:
    lines = ["| | fault | must hold | shown by | measured |", "|---|---|---|---|---|"]
    lines += [f"| {row.number} | {row.fault} | {row.holds} | {_shown(row)} | {_measured(row)} |" for row in MATRIX]
    return "\n".join(lines)


def _shown(row: Row) -> str:
    return ", ".join(f"`tests/{name}`" if "/" in name else f"`python -m tests.{name}`" for name in row.tests)


def _measured(row: Row) -> str:
    if row.figure is None:
        return "by its tests"
    path = MEASURED / row.file
    return row.figure(json.loads(path.read_text())) if path.exists() else "not yet"


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="The fault matrix as a table.")
    parser.add_argument("--write", action="store_true", help="into docs/reliability.md")
    args = parser.parse_args()
    if args.write:
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
