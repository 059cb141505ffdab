"""`moefold train`: train a run; the same command again resumes it."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from moefold.api.runs import load_run
from moefold.cli.run_argument import Subparsers, add_device_option, add_run_argument, launched_ranks
from moefold.comm.launchers import Hosts
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, Problem
from moefold.train.fault_tolerance.signals import INTERRUPTED

EXAMPLES = """examples:
  moefold train debug_small
  moefold train debug_small --nproc 4 --parallel.ep 4 --train.steps 300
  moefold train my_run.yaml --nproc 4 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1
  torchrun --master-port 29500 --nproc-per-node 8 -m moefold.cli.main train my_run.yaml

The run lives in train.directory/NAME; the same command resumes from its newest checkpoint.
Ctrl-C and SIGTERM, to any rank, the launcher or the whole process group, finish the step under way, save, then stop.
A second one, 1 to 10 s after the first, stops at once without saving. Ranks started by --nproc that have not stopped
--patience seconds later are ended. Once asked to stop, ranks are never started again.
A place that fails three starts in a row while the others do not is lost: a spare takes over, or the run goes on with
fewer ranks in the best legal layout, on the same batches (train.elastic.min_world: at least half of them by default).
With --nnodes, a run goes on without hosts that stay away for --host-patience seconds, by the same rules; a host that
comes back takes part from the next start on. All hosts need the same train.directory.
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
    parser.add_argument("--nnodes", type=int, metavar="N", help="hosts that train together, each started by hand")
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help="which of them this is (default 0)")
    parser.add_argument(
        "--master-addr",
        metavar="A,...",
        help="address of host 0, which listens there and nowhere else; more, of hosts 1, 2, ...: each does if those "
        "before it are lost",
    )
    parser.add_argument("--master-port", type=int, default=29500, metavar="P", help="their port (default 29500)")
    parser.add_argument(
        "--host-patience",
        type=float,
        default=45.0,
        metavar="S",
        help="seconds until the run goes on without hosts that stay away; 0: never (default 45)",
    )
    add_device_option(parser)
    parser.add_argument(
        "--trace-routing",
        type=int,
        nargs="?",
        const=16,
        metavar="N",
        help="record the experts of every token until N steps are recorded (default 16): train.routing_trace.steps",
    )
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
    if args.trace_routing is not None:
        asked = load_run(asked, {"train.routing_trace.steps": args.trace_routing})
    from moefold.train.callbacks.registry import default_callbacks
    from moefold.train.trainer import Trainer

    reporters = default_callbacks(args.json)
    hosts = _hosts(args)
    trainer = Trainer(
        asked,
        reporters=reporters,
        nproc=None if hosts is not None else args.nproc,
        spares=args.spares,
        patience=args.patience,
        device=args.device,
        hosts=hosts,
    )
    if not args.force:
        _check_memory(trainer.layout.run, trainer.layout.world, args.device)
    return INTERRUPTED if trainer.fit(args.stop) == "interrupted" else 0


def _hosts(args: argparse.Namespace) -> Hosts | None:
    """None without --nnodes."""
    if args.nnodes is None:
        return None
    problems = []
    if args.nnodes < 2:
        problems.append(Problem("--nnodes", f"{args.nnodes} is not several hosts", "leave it out for one host"))
    if not 0 <= args.node_rank < args.nnodes:
        problems.append(Problem("--node-rank", f"{args.node_rank} is no host of {args.nnodes}", "count from 0"))
    if args.master_addr is None:
        problems.append(Problem("--master-addr", "is missing", "give the address of host 0 on the hosts' network"))
    addresses = tuple((args.master_addr or "").split(","))
    if args.master_addr is not None and (not all(addresses) or len(addresses) > args.nnodes):
        what = f"{args.master_addr!r} does not have one address for each of the first of {args.nnodes} hosts"
        problems.append(Problem("--master-addr", what, "give addresses of hosts 0, 1, ..., with commas between them"))
    if not args.host_patience >= 0:
        problems.append(Problem("--host-patience", f"{args.host_patience:g} is no time", "0 is never, 45 the default"))
    if not 0 < args.master_port < 1 << 16:
        problems.append(Problem("--master-port", f"{args.master_port} is no port", "29500 is the default"))
    if args.device == "cuda":
        problems.append(Problem("--nnodes", "starts ranks on CPUs", "on GPUs use torchrun"))
    if problems:
        raise ConfigError(*problems)
    return Hosts(args.nnodes, args.node_rank, args.nproc or 1, addresses, args.master_port, args.host_patience)


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
