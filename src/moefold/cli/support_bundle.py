"""`moefold support-bundle`: what a developer needs to understand a failure, in one file and without secrets."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.tables import text_table
from moefold.units import format_bytes

if TYPE_CHECKING:
    from moefold.cli.run_argument import Subparsers

EXAMPLES = """examples:
  moefold support-bundle
  moefold support-bundle runs/debug_small --out debug_small.zip
  moefold support-bundle runs/debug_small --list

Contains versions, the host and its links, settings of NCCL and torch, the run's configuration, its last 200 metrics,
names and sizes of its checkpoints, reports of hangs with every rank's stacks and last collectives, and dumps of torch's
flight recorder on this host as JSON. Contains no weights, no tokens, no logs and no other variables; keys, logins in
addresses and the values of variables that sound like secrets are redacted. Look into it before you send it.
Exits with 0 when the file was written, 2 when the command cannot be understood."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "support-bundle",
        help="collect versions, topology, configuration and last metrics in one file, without secrets",
        description="Collect what a developer needs to understand a failure in one zip file, without secrets.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="the run's directory, such as runs/NAME")
    parser.add_argument(
        "--out", type=Path, default=Path("moefold-support.zip"), metavar="FILE", help="default: moefold-support.zip"
    )
    parser.add_argument("--list", action="store_true", help="show what it would contain, and write nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from moefold.train.support_bundle import collect, write_bundle

    bundle = collect(args.directory)
    if not args.list:
        write_bundle(bundle, args.out)
    sizes = {name: len(text.encode()) for name, text in sorted(bundle.files.items())}
    if args.json:
        out = None if args.list else str(args.out)
        print(json.dumps({"out": out, "files": sizes, "left_out": bundle.left_out}))
        return 0
    print(text_table(("file", "size"), [(name, format_bytes(size)) for name, size in sizes.items()]))
    for line in bundle.left_out:
        print(f"left out: {line}")
    print("nothing written" if args.list else f"wrote {args.out}; look into it before you send it")
    return 0
