"""`moefold train`: train a run; the same command again resumes it."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from moefold.api.runs import load_run
from moefold.cli.run_argument import Subparsers, add_device_option, add_run_argument, launched_ranks
from moefold.config.run import RunConfig
from moefold.train.fault_tolerance.signals import INTERRUPTED

EXAMPLES = """examples:
  moefold train debug_small
  moefold train debug_small --nproc 4 --parallel.ep 4 --train.steps 300
  torchrun --master-port 29500 --nproc-per-node 8 -m moefold.cli.main train my_run.yaml

The run lives in train.directory/NAME; the same command resumes from its newest checkpoint.
Ctrl-C and SIGTERM, to any rank, the launcher or the whole process group, finish the step under way, save, then stop.
A second one, 1 to 10 s after the first, stops at once without saving. Ranks started by --nproc that have not stopped
--patience seconds later are ended. Once asked to stop, ranks are never started again.
A place that fails three starts in a row while the others do not is lost: a spare takes over, or the run goes on with
fewer ranks in the best legal layout, on the same batches (train.elastic.min_world: at least half of them by default).
A run that has checkpoints may also be started with another number of ranks than its layout folds over.
A run whose predicted memory is more than the GPU, or for CPU ranks the host, has is refused with the nearest setting
that fits; --force starts it.
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
    parser.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="K",
        help="places beside those of --nproc that take over where one is lost for good (default 0)",
    )
    add_device_option(parser)
    parser.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds a rank waits for its peers, and the launcher for ranks that were asked to stop (default 600)",
    )
    parser.add_argument("--force", action="store_true", help="start even if the predicted memory is more than there is")
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
    trainer = Trainer(
        asked, reporters=reporters, nproc=args.nproc, spares=args.spares, patience=args.patience, device=args.device
    )
    if not args.force:
        _check_memory(trainer.layout.run, trainer.layout.world, args.device)
    return INTERRUPTED if trainer.fit(args.stop) == "interrupted" else 0


def _check_memory(run: RunConfig, world: int, device: str | None) -> None:
    """The predicted peak against what this process' device has, before anything is built."""
    from moefold.ops.host_probe import available_host_bytes
    from moefold.plan.preflight import Device, refuse_if_too_large

    if (size := _gpu_bytes(device)) is not None:
        refuse_if_too_large(run, world, Device(size))
    elif (free := available_host_bytes()) is not None:
        refuse_if_too_large(run, world, Device(free, host_ranks=_ranks_here(world)))


def _gpu_bytes(device: str | None) -> float | None:
    """None if the run is on CPUs, or nothing is known about its GPU yet."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None
    local = os.environ.get("LOCAL_RANK", "0")
    number = int(local) if local.isdecimal() and int(local) < torch.cuda.device_count() else 0
    return float(torch.cuda.get_device_properties(number).total_memory)


def _ranks_here(world: int) -> int:
    """Ranks of this host, as torchrun says; else all of them are taken to be here, unless a launcher started them."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal():
        return int(local)
    return 1 if launched_ranks() > 1 else world
