"""`moefold plan`: will it fit, how fast will it be, which wall binds, and which layout is best. No GPU, no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moefold.cli.run_argument import add_run_argument
from moefold.errors import MoefoldError
from moefold.hardware.gpu import GPUS

EXAMPLES = """examples:
  moefold plan --records published.jsonl --predictions out.jsonl"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict memory, step time and the binding wall of a run, and search the best layout",
        description="Predict peak memory, step time and the binding wall of a run on a cluster, and search layouts.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_argument(parser, optional=True)
    parser.add_argument("--gpu", default="H100", metavar="NAME", help=f"one of {', '.join(GPUS)} (H100)")
    parser.add_argument("--records", type=Path, metavar="FILE", help="predict published records, one JSON per line")
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="where to write them (stdout)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.records is not None:
        from moefold.cli.plan_records import run_records

        return run_records(args.records, args.predictions, args.json)
    raise MoefoldError("plan what? name a RUN, or give --records FILE; see `moefold plan --help`")
