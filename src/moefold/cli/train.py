"""`moefold train`: train a run; the same command again resumes it."""

from __future__ import annotations

import argparse
from dataclasses import replace

from moefold.api.runs import load_run
from moefold.cli.run_argument import Subparsers, add_device_option, add_run_argument
from moefold.train.signals import INTERRUPTED

EXAMPLES = """examples:
  moefold train debug_small
  moefold train debug_small --nproc 4 --parallel.ep 4 --train.steps 300
  torchrun --nproc-per-node 8 -m moefold.cli.main train my_run.yaml

The run lives in train.directory/NAME; the same command resumes from its newest checkpoint.
Ctrl-C and SIGTERM, to any rank, the launcher or the whole process group, finish the step under way, save, then stop.
Sending them again changes nothing. Ranks started by --nproc that have not stopped --patience seconds later are ended;
SIGKILL, or Ctrl-\\ in a terminal, ends everything at once without saving.
Exits with 0 when the run is finished, 75 when it was interrupted (saved, unless no step had been done yet), 2 when the
command cannot be understood or the run failed."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model, surviving faults, resuming bit for bit",
        description="Train a model. The same command again resumes where the run stopped, bit for bit.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_argument(parser)
    parser.add_argument("--name", dest="called", metavar="NAME", help="call the run NAME, in a directory of its own")
    parser.add_argument("--nproc", type=int, metavar="N", help="CPU ranks to start on this machine (default 1)")
    add_device_option(parser)
    parser.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds a rank waits for its peers, and the launcher for ranks that were asked to stop (default 600)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the last step's record as one JSON object at the end"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    asked = load_run(args.name, args.changes)
    if args.called is not None:
        asked = replace(asked, name=args.called)
    from moefold.train.callbacks.registry import default_callbacks
    from moefold.train.trainer import Trainer

    reporters = default_callbacks(args.json)
    trainer = Trainer(asked, reporters=reporters, nproc=args.nproc, patience=args.patience, device=args.device)
    return INTERRUPTED if trainer.fit(args.stop) == "interrupted" else 0
