"""`moefold prove`: run a layout on several processes and on one, and compare every result."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.checks.kernels import kernels_in_use
from moefold.cli.run_argument import Subparsers, add_run_argument, launched_ranks, with_progress
from moefold.config.precision import Format
from moefold.errors import MoefoldError

if TYPE_CHECKING:
    from moefold.prove.cases import Case
    from moefold.prove.verdict import Verdict

EXAMPLES = """examples:
  moefold prove deepseek_v3_proxy --world 8 --parallel.tp 2 --parallel.ep 8
  moefold prove --cases 200 --max-world 8 --seed 1
  moefold prove --cases 200 --recipes --max-world 4 --seed 1
  moefold prove --cases 40 --seed 1 --dtype bfloat16
  moefold prove --case 77702387 --max-world 8
  moefold prove --kept tests/ranks/failed_cases.jsonl
  moefold prove --mutants
  torchrun --master-port 29500 --nproc-per-node 8 -m moefold.cli.main prove deepseek_v3_proxy \\
      --device cuda --parallel.ep 8 --dtype bfloat16

A proof runs on CPU processes that it starts itself. With --device, or under torchrun or srun, it runs on the ranks that
were launched, one GPU each over NCCL (--device cpu: over gloo), against a float64 reference on the CPU, with the run's
kernels and the tolerances of --dtype; rank 0 prints.
A run's sizes are reduced to what a laptop can run; its structure, routing and layout stay.
A random case that fails prints the command that repeats it, and the line that adds it to a --kept file.
Exits with 0 when every comparison holds, 1 when one does not, 2 when the command is wrong."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "prove",
        help="prove that a layout computes what one process computes",
        description="Prove that a layout computes what one process computes: loss, every gradient, the gradient norm, "
        "the clipped update, balance losses, bias updates and token counts.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_argument(parser, optional=True)
    parser.add_argument(
        "--world", type=int, metavar="N", help="processes to run on (default 4; under a launcher, those it started)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="prove on the launched ranks (default: on CPU processes started here)"
    )
    parser.add_argument("--cases", type=int, metavar="N", help="N random valid cases instead of a run")
    parser.add_argument(
        "--recipes", action="store_true", help="with --cases: only cases with a precision recipe (docs/precision.md)"
    )
    parser.add_argument("--case", type=int, metavar="NUMBER", help="one random case again, by its number")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="the cases of a file, one line of JSON each")
    parser.add_argument(
        "--max-world", type=int, default=8, metavar="W", help="most processes of a random case (default 8)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of the random cases (default 1)")
    parser.add_argument("--mutants", action="store_true", help="inject known faults and show that each is caught")
    parser.add_argument(
        "--dtype", choices=("float64", "float32", "bfloat16"), default="float64", help="default: float64"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    asked = [given is not None for given in (args.name, args.cases, args.case, args.kept)] + [args.mutants]
    if sum(asked) != 1:
        raise MoefoldError("give one of RUN, --cases N, --case NUMBER, --kept FILE and --mutants; see `prove --help`")
    if args.recipes and (args.cases is None or args.dtype != "float64"):
        raise MoefoldError("--recipes is for --cases N in float64, in which recipes are proved; see `prove --help`")
    if args.device is not None or launched_ranks() > 1:
        if args.name is None:
            raise MoefoldError(
                "on launched ranks, a proof is of a RUN; random cases, kept ones and faults are for CPUs"
            )
        return prove_launched(args.name, args.changes, args.world, args.dtype, args.device, args.json)
    if args.mutants:
        return prove_mutants(args.json)
    if args.cases is not None:
        return prove_cases(args.cases, args.max_world, args.seed, args.dtype, args.json, args.recipes)
    if args.case is not None:
        return prove_case(args.case, args.max_world, args.dtype, args.json)
    if args.kept is not None:
        return prove_kept(args.kept, args.json)
    return prove_run(args.name, args.changes, 4 if args.world is None else args.world, args.dtype, args.json)


def prove_run(name: str, changes: list[str], world: int, dtype: Format, as_json: bool) -> int:
    from moefold.api.proofs import prove
    from moefold.api.runs import load_run
    from moefold.prove.narrow_cases import left_out
    from moefold.prove.proof_report import case_report, verdict_json

    asked = load_run(name, changes)
    verdict = prove(asked, world, dtype=dtype)
    others = left_out(asked, verdict.case.run.precision)
    if as_json:
        print(json.dumps(verdict_json(verdict) | {"left_out": others}))
    else:
        print(case_report(verdict) + _said_left_out(others, dtype))
    return 0 if verdict.holds else 1


def _said_left_out(others: Sequence[str], dtype: Format) -> str:
    if not others:
        return ""
    return f"\nNot proved: {', '.join(others)}: numbers are kept, summed and sent in the formats of --dtype {dtype}"


def prove_launched(
    name: str, changes: list[str], world: int | None, dtype: Format, device: str | None, as_json: bool
) -> int:
    """On the ranks of torchrun or srun, or on this process alone."""
    from moefold.api.proofs import prove_on_launched_ranks
    from moefold.api.runs import load_run
    from moefold.prove.narrow_cases import left_out
    from moefold.prove.proof_report import case_report, verdict_json

    started = launched_ranks()
    if world not in (None, started):
        start = (
            f"start {world} ranks: torchrun --master-port 29500 --nproc-per-node {world} -m moefold.cli.main prove ..."
        )
        raise MoefoldError(f"--world {world}, but {started} rank{'s' * (started > 1)} was started; {start}")
    asked = load_run(name, changes)
    verdict, rank, on = prove_on_launched_ranks(asked, dtype=dtype, device=device)
    if rank == 0:
        others = left_out(asked, verdict.case.run.precision)
        used = kernels_in_use(verdict.case.run, on)
        if as_json:
            about = {"device": on, "dtype": dtype, "left_out": others, **used}
            print(json.dumps(verdict_json(verdict) | about))
        else:
            words = ", ".join(f"{key} {name}" for key, name in used.items())
            print(f"on {on}, {dtype}; kernels: {words}; reference: CPU, float64")
            print(case_report(verdict) + _said_left_out(others, dtype))
    # A launcher ends all ranks when one fails, also rank 0 while it prints.
    return 0 if verdict.holds or rank > 0 else 1


def prove_case(number: int, max_world: int, dtype: Format, as_json: bool) -> int:
    """One random case again, with its table."""
    from moefold.prove.proof_report import case_report, verdict_json
    from moefold.prove.random_cases import draw_case
    from moefold.prove.verdict import prove

    verdict = prove(draw_case(number, max_world, dtype))
    print(json.dumps(verdict_json(verdict)) if as_json else case_report(verdict))
    return 0 if verdict.holds else 1


def prove_cases(count: int, max_world: int, seed: int, dtype: Format, as_json: bool, narrow: bool = False) -> int:
    """``narrow``: only those with a precision recipe."""
    from moefold.prove.proof_report import coverage_report, drawn_case_report
    from moefold.prove.random_cases import draw_cases, draw_narrow_cases

    began = time.monotonic()
    cases = draw_narrow_cases(count, max_world, seed) if narrow else draw_cases(count, max_world, seed, dtype)
    verdicts = _prove_each(cases, count, as_json, lambda verdict: drawn_case_report(verdict, max_world))
    if not as_json:
        print(coverage_report(verdicts) + "\n\n" + _tolerance_note(dtype))
    return _sum_up(verdicts, f"seed {seed}", began, as_json, {"seed": seed, "max_world": max_world, "dtype": dtype})


def prove_kept(path: Path, as_json: bool) -> int:
    from moefold.prove.cases import read_cases
    from moefold.prove.proof_report import case_report

    began = time.monotonic()
    kept = read_cases(path)
    found = {entry.case: entry.found for entry in kept}

    def report(verdict: Verdict) -> str:
        return f"{case_report(verdict)}\n\nThis case once found: {found[verdict.case]}"

    verdicts = _prove_each(found, len(found), as_json, report)
    return _sum_up(verdicts, str(path), began, as_json, {"kept": str(path)})


def _prove_each(cases: Iterable[Case], count: int, as_json: bool, report: Callable[[Verdict], str]) -> list[Verdict]:
    """Failures are printed as they occur."""
    from moefold.prove.verdict import prove

    verdicts = []
    for case in with_progress(cases, count, "proving cases"):
        verdicts.append(prove(case))
        if not verdicts[-1].holds and not as_json:
            print(report(verdicts[-1]) + "\n", flush=True)
    return verdicts


def _sum_up(verdicts: list[Verdict], origin: str, began: float, as_json: bool, about: dict[str, Any]) -> int:
    from moefold.prove.proof_report import cases_summary, verdict_json

    held = all(verdict.holds for verdict in verdicts)
    if as_json:
        print(json.dumps({"holds": held, **about, "cases": [verdict_json(verdict) for verdict in verdicts]}))
    else:
        print(f"{origin}: {cases_summary(verdicts, time.monotonic() - began)}")
    return 0 if held else 1


def prove_mutants(as_json: bool) -> int:
    from moefold.prove.mutants import CASES, MUTANTS, caught
    from moefold.prove.mutants import prove_mutants as results
    from moefold.prove.proof_report import case_report, mutants_report, verdict_json

    everything = list(with_progress(results(), len(CASES) + len(MUTANTS), "injecting faults"))
    clean = [verdict for mutant, verdict in everything if mutant is None]
    faulty = [(mutant, verdict) for mutant, verdict in everything if mutant is not None]
    passed = all(verdict.holds for verdict in clean) and all(caught(verdict) for _, verdict in faulty)
    if as_json:
        rows = [{"fault": mutant.name, "caught": caught(v), "seen_at": v.culprit} for mutant, v in faulty]
        print(json.dumps({"holds": passed, "clean": [verdict_json(v) for v in clean], "faults": rows}))
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
            "(tokens)^(1/4), twice that for squared gradients, 0 for counts; routing is replayed from the reference"
        )
    if dtype == "float32":
        return "float32: as in bfloat16, with 8 * 2^-25 for 2^-9; routing is replayed from the reference"
    return f"{dtype}: the largest difference relative to the largest entry; tolerance 1e-9"
