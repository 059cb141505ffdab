"""`moefold train`: run it; run the same command again to go on where it stopped."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from functools import partial
from typing import Any

from moefold.checks.run_all import problems_to_train
from moefold.cli.run_argument import add_run_argument, find_run
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, MoefoldError
from moefold.train.signals import INTERRUPTED, StopRequest, nothing_to_save, say

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


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model, surviving faults, resuming bit for bit",
        description="Train a model. The same command again goes on where the run stopped, bit for bit.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_argument(parser)
    parser.add_argument("--name", dest="called", metavar="NAME", help="call the run NAME, in a directory of its own")
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks to start on this machine (default 1)")
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
    stop: StopRequest = args.stop
    asked = find_run(args.name, args.changes)
    if args.called is not None:
        asked = replace(asked, name=args.called)
    launched = "RANK" in os.environ
    if launched and args.nproc is not None:
        raise MoefoldError(
            "--nproc starts ranks itself, but a launcher has started this one already; leave --nproc out"
        )
    world = int(os.environ["WORLD_SIZE"]) if launched else args.nproc or 1
    if found := problems_to_train(asked, world):
        raise ConfigError(*found)
    _find_services(asked)
    if launched:
        # Its peers may not have heard the signal: ranks agree on stopping once they have met.
        return train_here(asked, args.patience, args.json, stop)
    work = partial(train_here, asked) if world == 1 else partial(train_on_ranks, asked, world)
    return _stopped_early(stop) or work(args.patience, args.json, stop)


def train_here(run: RunConfig, patience: float, as_json: bool, stop: StopRequest) -> int:
    """This process is one rank of a launched world, or all of it."""
    from moefold.comm.spawn import join_world, this_device
    from moefold.train.train_context import build_train_context
    from moefold.train.trainer import train

    rank, world = join_world(patience)
    context, state = build_train_context(run, rank, world, this_device(), patience)
    return train(context, state, _callbacks(as_json), stop)


def train_on_ranks(run: RunConfig, world: int, patience: float, as_json: bool, stop: StopRequest) -> int:
    """Start the ranks on this machine and keep them alive."""
    import torch

    from moefold.train.supervise import supervise
    from moefold.train.train_context import build_train_context, run_directory
    from moefold.train.trainer import train

    def work(rank: int) -> int:
        context, state = build_train_context(run, rank, world, torch.device("cpu"), patience)
        return train(context, state, _callbacks(as_json), stop)

    return _stopped_early(stop) or supervise(work, world, run_directory(run) / "checkpoints", patience, stop=stop)


def _stopped_early(stop: StopRequest) -> int:
    """The exit code if a stop was asked for while nothing had started yet; otherwise 0."""
    if not stop:
        return 0
    say(nothing_to_save())
    return INTERRUPTED


def _find_services(run: RunConfig) -> None:
    """A missing package is found before any rank starts."""
    from moefold.train.callbacks.registry import services

    services(run.train)


def _callbacks(as_json: bool) -> list[Any]:
    from moefold.train.callbacks.registry import default_callbacks

    return default_callbacks(as_json)
