"""A whole training step of one model: moefold's beside plain torch and beside transformers' Trainer.

Every round has a new batch, the same for all candidates, so the routing changes as in training.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from benchmarks.command_line import (
    add_common_options,
    check_common_options,
    names_of,
    parser_for,
    run_script,
    show,
)
from benchmarks.comparison import Setting, run_comparison, threads_text
from benchmarks.results import CHANGING, CandidateSpec, Comparison
from benchmarks.step_candidates import BASELINES, CANDIDATES, MOEFOLD
from benchmarks.targets import AS_LAUNCHED, TARGETS, Verdict, verdicts
from moefold.bench.clock import Progress
from moefold.bench.step_bench import RECIPE
from moefold.cli.bench import add_changes, changes_of, progress_line
from moefold.errors import UnknownNameError

EXAMPLES = """  python -m benchmarks.step
  python -m benchmarks.step --rounds 15 --out step.html
  python -m benchmarks.step --set data.seq_len=128 --set model.num_layers=2 --candidates hand-written,moefold
"""
BASES: tuple[str, ...] = tuple(BASELINES)


def main(words: Sequence[str]) -> int:
    parser = parser_for(
        "step",
        "One training step of the same model on the same batch: moefold, plain torch written by hand with the same "
        "kernels, and transformers' Trainer.",
        EXAMPLES,
    )
    parser.add_argument("--candidates", metavar="NAMES", help="separated by commas (default: all)")
    add_changes(parser)
    add_common_options(parser)
    args = parser.parse_args(words)
    check_common_options(args)
    setting = Setting(args.dtype, args.threads, False, args.rounds, args.warm, (CHANGING,), args.budget)
    names = selected(names_of(args.candidates))
    comparison, found = compare_steps(setting, names, changes_of(args), progress_line())
    return show(args, [(comparison, BASES, found)])


def selected(names: Sequence[str]) -> list[str]:
    """All candidates where none is named."""
    for name in names:
        if name not in CANDIDATES:
            raise UnknownNameError("candidate", name, CANDIDATES)
    return [name for name in CANDIDATES if not names or name in names]


def compare_steps(
    setting: Setting,
    names: Sequence[str],
    changes: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> tuple[Comparison, list[Verdict]]:
    """``changes``: dotted keys of the run and their values, for other sizes."""
    title = f"training step of {RECIPE}{' with changes' if changes else ''}, {setting.dtype}, "
    title += threads_text(setting.threads)
    comparison = run_comparison(
        "step", title, [_spec(name, setting, changes or {}) for name in names], setting, progress
    )
    has_targets = setting.threads == 1 and not changes
    return comparison, verdicts(comparison, TARGETS["step", RECIPE] if has_targets else (), AS_LAUNCHED)


def _spec(name: str, setting: Setting, changes: Mapping[str, str]) -> CandidateSpec:
    role = "baseline" if name in BASELINES else "moefold" if name in MOEFOLD else "peer"
    options: dict[str, object] = {
        "dtype": setting.dtype,
        "threads": setting.threads,
        "allocator": "default" if role == "peer" else "kept",
        "set": dict(changes),
    }
    return CandidateSpec(name, role, options)


if __name__ == "__main__":
    sys.exit(run_script(main, sys.argv[1:]))
