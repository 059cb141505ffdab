"""`moefold prove`: run a layout on real processes and on one, and compare everything."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from moefold.cli.progress import with_progress
from moefold.cli.run_argument import add_run_argument, find_run
from moefold.config.precision import Format
from moefold.errors import ConfigError, MoefoldError

EXAMPLES = """examples:
  moefold prove deepseek_v3_proxy --world 8 --parallel.tp 2 --parallel.ep 8
  moefold prove --cases 200 --max-world 8 --seed 1
  moefold prove --cases 40 --seed 1 --dtype bfloat16
  moefold prove --mutants

A run's sizes are reduced to what a laptop can prove; its structure, routing and layout stay.
Exits with 0 when everything holds, 1 when something does not, 2 when the command cannot be understood."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "prove",
        help="prove that a layout computes what one process computes",
        description="Prove that a layout computes what one process computes: loss, every gradient, the norm, "
        "the clipped update, balance losses, bias updates and token counts.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_argument(parser, optional=True)
    parser.add_argument("--world", type=int, default=4, metavar="N", help="processes to run on (default 4)")
    parser.add_argument("--cases", type=int, metavar="N", help="draw N random legal cases instead of a run")
    parser.add_argument("--max-world", type=int, default=8, metavar="W", help="most processes of a drawn case")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="which random cases")
    parser.add_argument("--mutants", action="store_true", help="seed known faults and show that each is caught")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), default="float64")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    asked = [args.name is not None, args.cases is not None, args.mutants]
    if sum(asked) != 1:
        raise MoefoldError("prove what? give one of RUN, --cases N or --mutants; see `moefold prove --help`")
    if args.mutants:
        return prove_mutants(args.json)
    if args.cases is not None:
        return prove_cases(args.cases, args.max_world, args.seed, args.dtype, args.json)
    return prove_run(args.name, args.changes, args.world, args.dtype, args.json)


def prove_run(name: str, changes: list[str], world: int, dtype: Format, as_json: bool) -> int:
    from moefold.checks.run_all import problems
    from moefold.prove.cases import reduce_run
    from moefold.prove.report import as_data, case_report
    from moefold.prove.verdict import prove

    full = find_run(name, changes)
    found = problems(full, world)
    # Batch and width rules are about the full run; the reduced one brings its own sizes.
    layout = [problem for problem in found if problem.path.startswith(("parallel", "world"))]
    if layout:
        raise ConfigError(*layout)
    case = reduce_run(full, world, dtype)
    if found := problems(case.run, world):
        raise ConfigError(*found)
    verdict = prove(case)
    print(json.dumps(as_data(verdict)) if as_json else case_report(verdict))
    return 0 if verdict.holds else 1


def prove_cases(count: int, max_world: int, seed: int, dtype: Format, as_json: bool) -> int:
    from moefold.prove.draw import draw_cases
    from moefold.prove.report import as_data, case_report, cases_summary, coverage_report
    from moefold.prove.verdict import prove

    began = time.monotonic()
    verdicts = []
    for case in with_progress(draw_cases(count, max_world, seed, dtype), count, "proving cases"):
        verdicts.append(prove(case))
        if not verdicts[-1].holds and not as_json:
            print(case_report(verdicts[-1]) + "\n", flush=True)
    held = all(verdict.holds for verdict in verdicts)
    if as_json:
        print(json.dumps({"holds": held, "cases": [as_data(verdict) for verdict in verdicts]}))
    else:
        print(coverage_report(verdicts))
        print("\n" + _tolerance_note(dtype) + "\n" + cases_summary(verdicts, time.monotonic() - began))
    return 0 if held else 1


def prove_mutants(as_json: bool) -> int:
    from moefold.prove.mutants import CASES, MUTANTS, caught
    from moefold.prove.mutants import prove_mutants as results
    from moefold.prove.report import as_data, case_report, mutants_report

    everything = list(with_progress(results(), len(CASES) + len(MUTANTS), "seeding faults"))
    clean = [verdict for mutant, verdict in everything if mutant is None]
    faulty = [(mutant, verdict) for mutant, verdict in everything if mutant is not None]
    passed = all(verdict.holds for verdict in clean) and all(caught(verdict) for _, verdict in faulty)
    if as_json:
        rows = [{"fault": mutant.name, "caught": caught(v), "seen_at": v.culprit} for mutant, v in faulty]
        print(json.dumps({"holds": passed, "clean": [as_data(v) for v in clean], "faults": rows}))
        return 0 if passed else 1
    for verdict in clean:
        if not verdict.holds:
            print("A case without a fault does not hold:\n" + case_report(verdict) + "\n")
    print(f"{sum(v.holds for v in clean)} of {len(clean)} cases hold without a fault\n\n{mutants_report(faulty)}")
    return 0 if passed else 1


def _tolerance_note(dtype: str) -> str:
    if dtype == "bfloat16":
        return (
            "bfloat16: errors are relative in norm; allowed are 6 * 2^-9/sqrt(3) * sqrt(36 roundings per layer + 12) * "
            "(tokens)^(1/4), twice that for squared gradients, 0 for counts; choices are replayed from the reference"
        )
    return f"{dtype}: the largest difference relative to the largest entry; 1e-9 is allowed"
