"""`moefold bench`: measure this machine, and moefold's parts on it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moefold.cli.bench_comparisons import add_attention, add_dispatch, add_layer, add_step
from moefold.errors import MoefoldError

EXAMPLES = """examples:
  moefold bench layer b --out b.html
  moefold bench calibrate --out machine.json
  moefold plan debug_10m --machine machine.json --gpus 4 --no-search --parallel.ep 4

What is measured is what the machine does now: let nothing else run beside it."""

CALIBRATE = """examples:
  moefold bench calibrate --out machine.json
  moefold bench calibrate --world 2 --json

Takes a minute or two. Every measurement is held against one small product that runs just before it, so that a busy
neighbour does little harm; a machine with nothing else to do is better still.
Exits with 0 when the table was made, 2 when the command cannot be understood."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure this machine, and moefold's parts beside the bare engine and other libraries",
        description="Measure this machine, and moefold's parts on it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(metavar="WHAT", title="what to measure", required=True)
    _add_calibrate(kinds)
    for add in (add_layer, add_dispatch, add_attention, add_step):
        add(kinds)


def _add_calibrate(kinds: Any) -> None:
    parser = kinds.add_parser(
        "calibrate",
        help="rates and messages of this machine, as `moefold plan --machine` reads them",
        description="Measure products, attention, memory traffic, the optimizer and messages between processes on this "
        "machine, one thread per rank as in training, and what happens when ranks share its cores.",
        epilog=CALIBRATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument("--world", type=int, default=4, metavar="N", help="most ranks that will run here (default 4)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="turns of each measurement (default 15)")
    parser.add_argument("--json", action="store_true", help="print the table as one JSON object")
    parser.set_defaults(run=calibrate)


def calibrate(args: argparse.Namespace) -> int:
    from moefold.bench.calibrate import calibrate as measure
    from moefold.bench.calibration_report import calibration_report
    from moefold.hardware.machine import machine_json

    if args.out is not None and not args.out.parent.is_dir():
        raise MoefoldError(f"--out {args.out}: {args.out.parent} is no directory")
    found = measure(args.world, args.rounds, _progress())
    if args.out is not None:
        try:
            args.out.write_text(machine_json(found.machine), encoding="utf-8")
        except OSError as error:
            raise MoefoldError(f"{args.out}: cannot be written: {error.strerror}; choose another --out") from error
    print(json.dumps(asdict(found.machine)) if args.json else calibration_report(found))
    if args.out is not None:
        print(f"wrote {args.out}", file=sys.stderr)
    return 0


def _progress() -> Callable[[str, int, int], None]:
    """A line that is rewritten on a terminal; one line per kind of measurement elsewhere."""
    live = sys.stderr.isatty()

    def say(what: str, done: int, total: int) -> None:
        if live:
            end = "\n" if done == total else ""
            print(f"\r{what}: round {done} of {total}    ", end=end, file=sys.stderr, flush=True)
        elif done == total:
            print(f"{what}: {total} rounds", file=sys.stderr, flush=True)

    return say
