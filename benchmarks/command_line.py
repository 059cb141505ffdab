"""Options and output that all scripts of this folder share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.comparison_chart import Judged, chart_page
from benchmarks.comparison_report import comparison_json, comparison_text
from moefold.cli.bench import add_timing_options, timing_problems
from moefold.errors import ConfigError, MoefoldError, Problem

NOTE = """
Candidates alternate, one run each per round; ratios are taken round by round. A library that is not installed is listed
with its reason; docs/bench.md says how to install them. Exits with 0 when no target was missed, 1 when one was, 2 when
the command cannot be understood."""


def parser_for(script: str, description: str, examples: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{script}",
        description=description,
        epilog=f"examples:\n{examples}{NOTE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_common_options(parser: argparse.ArgumentParser, threads: bool = True) -> None:
    add_timing_options(parser, threads, budget=300.0)
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write a chart")


def add_routing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--routing", choices=("fixed", "changing", "both"), default="both", help="default: both")


def routings_of(args: argparse.Namespace) -> tuple[str, ...]:
    return ("fixed", "changing") if args.routing == "both" else (args.routing,)


def names_of(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()] if text else []


def check_common_options(args: argparse.Namespace) -> None:
    problems = timing_problems(args)
    if args.out is not None and not args.out.parent.is_dir():
        problems.append(Problem("--out", f"{args.out.parent} is no directory"))
    if problems:
        raise ConfigError(*problems)


def show(args: argparse.Namespace, judged: Sequence[Judged]) -> int:
    """Prints all comparisons and writes the chart; the exit code says whether a target was missed."""
    if args.json:
        print(json.dumps({"comparisons": [comparison_json(*each) for each in judged]}))
    else:
        print("\n\n\n".join(comparison_text(*each) for each in judged))
    if args.out is not None:
        try:
            args.out.write_text(chart_page(judged), encoding="utf-8")
        except OSError as error:
            raise MoefoldError(f"{args.out}: cannot be written: {error.strerror}; choose another --out") from error
        print(f"wrote {args.out}", file=sys.stderr)
    return 1 if any(verdict.reached is False for _, _, verdicts in judged for verdict in verdicts) else 0


def run_script(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """``main`` with errors of the command line as text and exit code 2."""
    try:
        return main(words)
    except MoefoldError as error:
        print(error, file=sys.stderr)
        return 2
