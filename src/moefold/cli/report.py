"""`moefold report`: one self-contained HTML page about a finished or running run."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from moefold.cli.run_argument import Subparsers

EXAMPLES = """examples:
  moefold report runs/debug_small
  moefold report runs/debug_small --out page.html
  moefold report runs/debug_small --json
  moefold report runs/debug_small --against runs/debug_small_lr --out both.html

Reads only RUN_DIR/metrics.jsonl, so it works on a run that is still training."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "report",
        help="write one HTML page about a run: loss, speed, experts, where the time went",
        description="Write one self-contained HTML page about a run: loss, speed, experts, where the time went.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="RUN_DIR", type=Path, help="the run's directory, with its metrics.jsonl")
    parser.add_argument(
        "--against", metavar="RUN_DIR", type=Path, nargs="+", default=[], help="other runs: one page compares them all"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to write the page (RUN_DIR/report.html)")
    parser.add_argument(
        "--json", action="store_true", help="print the headline numbers as JSON; a page only with --out"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from moefold.train.report.history import read_history
    from moefold.train.report.run_page import page
    from moefold.train.report.summary import summary

    if args.against:
        return _compare(args)
    history = read_history(args.directory, _opened)
    out = args.out or (None if args.json else args.directory / "report.html")
    if out is not None:
        _write(out, page(history))
    facts = summary(history)
    if args.json:
        print(json.dumps(facts, indent=2, allow_nan=False))
        return 0
    print(f"{out}: {facts['run'] or 'a run'}, step {facts['step']:,}, {facts['status']}")
    for note in facts["missing"]:
        print(f"  {note}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from moefold.train.report.compare_page import compare_page
    from moefold.train.report.history import read_history
    from moefold.train.report.summary import summary

    runs = {str(directory): read_history(directory, _opened) for directory in (args.directory, *args.against)}
    out = args.out or (None if args.json else args.directory / "compared.html")
    text = compare_page(runs)
    if out is not None:
        _write(out, text)
    if args.json:
        print(json.dumps({name: summary(history) for name, history in runs.items()}, indent=2, allow_nan=False))
    else:
        print(f"{out}: {', '.join(runs)}")
    return 0


def _opened(path: Path, mode: str) -> AbstractContextManager[IO[bytes]]:
    """With a progress bar on a terminal: the file of a long run takes a while to read."""
    from rich.console import Console
    from rich.progress import open as open_with_bar

    assert mode == "rb"
    hidden = not sys.stderr.isatty()
    return open_with_bar(
        path, "rb", description="reading", console=Console(stderr=True), transient=True, disable=hidden
    )


def _write(path: Path, text: str) -> None:
    from moefold.errors import MoefoldError
    from moefold.private_files import replace_file

    try:
        replace_file(path, text)
    except OSError as error:
        raise MoefoldError(f"{path}: cannot be written: {error.strerror}; choose another file with --out") from error
