"""`moefold dryrun`: the real training step of one rank of a large job, on fake tensors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator

from moefold.api.runs import load_run
from moefold.cli.run_argument import Subparsers, add_run_argument, with_progress

EXAMPLES = """examples:
  moefold dryrun debug_small --world 4 --rank 0 --parallel.ep 4
  moefold dryrun deepseek_v3 --world 256 --rank 64 --parallel.pp 4 --parallel.vpp 4 --parallel.schedule interleaved
  moefold dryrun deepseek_v3 --world 256 --rank 0 --imbalance 1.5 --json

Runs in one process; fake tensors allocate no memory.
Exits with 0 when the step ran, 2 when the command is wrong."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "dryrun",
        help="run one rank's training step on fake tensors: peak memory and every collective",
        description="Run the training step of one rank of a job on fake tensors: peak memory by category, activations "
        "per microbatch, and every collective with its bytes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_argument(parser)
    parser.add_argument("--world", type=int, required=True, metavar="N", help="ranks of the job")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to run (default 0)")
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="M",
        help="a step of exactly M microbatches, all executed (default: as many as show the run's whole step)",
    )
    parser.add_argument(
        "--imbalance",
        type=float,
        default=1.0,
        metavar="F",
        help="rows received by this rank's experts, as a multiple of the average (default 1.0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from moefold.dryrun.dry_run import dry_run
    from moefold.dryrun.dryrun_report import dry_run_json, report

    asked = load_run(args.name, args.changes)
    found = dry_run(
        asked, args.world, args.rank, args.microbatches, imbalance=args.imbalance, progress=_progress_bar("actions")
    )
    print(json.dumps(dry_run_json(found)) if args.json else report(found))
    return 0


def _progress_bar(what: str) -> Callable[[int, int], None]:
    """A callback of (done, total) that advances a progress bar."""
    bars: list[Iterator[int]] = []

    def advance(done: int, total: int) -> None:
        if not bars:
            bars.append(iter(with_progress(range(total), total, what)))
            next(bars[0])
        next(bars[0], None)

    return advance
