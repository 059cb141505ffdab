"""`moefold profile`: take a few steps of a run, and say where their time goes on every rank."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.cli.run_argument import Subparsers, add_device_option, add_run_argument

if TYPE_CHECKING:
    from moefold.config.run import RunConfig
    from moefold.train.callback import Callback

EXAMPLES = """examples:
  moefold profile debug_small --steps 3
  moefold profile debug_small --nproc 4 --parallel.ep 4 --machine machine.json
  moefold profile debug_small --nproc 2 --ranges torch --json
  torchrun --master-port 29500 --nproc-per-node 8 -m moefold.cli.main profile my_run.yaml --gpu H100

Takes one step to warm up and --steps more, from initial values, and prints how every rank spends them: compute, exposed
transfers and waiting per axis, bubble, host, garbage collection, data. Writes OUT/NAME/profile.jsonl, which
`moefold report OUT/NAME` draws, and OUT/NAME/profile/*.trace.json, for ui.perfetto.dev or chrome://tracing: all ranks
on one clock. The checkpoint of the last step is removed. --machine (from `moefold bench calibrate`) or --gpu adds the
wall that the planner predicts. Exits with 0, or 2 when the run cannot be profiled."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "profile",
        help="take a few steps and say where their time goes on every rank",
        description="Take a few steps of a run, and say where their time goes on every rank.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_argument(parser)
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps to profile (default 3)")
    parser.add_argument("--nproc", type=int, metavar="N", help="CPU ranks to start on this machine (default 1)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("profiles"),
        metavar="DIR",
        help="where to write profile and trace (default profiles)",
    )
    parser.add_argument(
        "--ranges",
        choices=("none", "nvtx", "torch"),
        default="none",
        help="nvtx: name the spans for nsys; torch: also run torch's profiler, a trace per rank and step",
    )
    parser.add_argument("--machine", type=Path, metavar="FILE", help="a measured machine, to predict its wall")
    parser.add_argument("--gpu", metavar="NAME", help="a GPU, to predict its wall")
    parser.add_argument(
        "--nic", type=float, metavar="GB/S", help="bandwidth of the network that joins the ranks, for the prediction"
    )
    add_device_option(parser)
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from moefold.api.runs import load_run
    from moefold.errors import ConfigError, Problem
    from moefold.train.callbacks.jsonl import JsonLines
    from moefold.train.profile.profile_table import profile_data, profile_lines
    from moefold.train.profile.step_account import read_profile
    from moefold.train.trainer import Trainer

    if args.steps < 1:
        raise ConfigError(Problem("--steps", f"{args.steps} is no number of steps", "use 1 or more"))
    asked = load_run(load_run(args.name, args.changes), changes_of(args))
    directory = args.out / asked.name
    if (directory / "checkpoints").exists():
        fix = "choose another --out, or remove it"
        raise ConfigError(Problem("--out", f"{directory} has checkpoints, and a run there would resume", fix))
    (directory / "profile.jsonl").unlink(missing_ok=True)
    trainer = Trainer(asked, reporters=[JsonLines(), _progress(args.steps)], nproc=args.nproc, device=args.device)
    if trainer.fit() != "finished":
        return 130
    if not _leads():
        return 0
    shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    accounts = [each for each in read_profile(directory) if each.step > 1]
    wall = _predicted_wall(asked, args, len(accounts[-1].wall))
    if args.json:
        data = profile_data(accounts, wall) | {"run": asked.name, "directory": str(directory)}
        print(json.dumps(data, indent=2, allow_nan=False))
        return 0
    ranks = len(accounts[-1].wall)
    print(f"{asked.name}: {ranks} rank{'s' * (ranks > 1)}, {args.steps} steps")
    for line in profile_lines(accounts, wall):
        print(line)
    print(f"written to {directory}: profile.jsonl and profile/*.trace.json")
    return 0


def changes_of(args: argparse.Namespace) -> dict[str, object]:
    """One step warms up. A schedule of the learning rate may be longer than so few steps."""
    return {
        "train.steps": args.steps + 1,
        "train.directory": str(args.out),
        "train.profile.every": 1,
        "train.profile.trace": True,
        "train.profile.ranges": args.ranges,
        "train.saving.every": 0,
        "data.validation": None,
        "optim.lr_schedule.warmup": 0,
    }


def _progress(steps: int) -> Callback:
    from moefold.train.callback import Callback, Control, StepRecord

    class Progress(Callback):
        def after_step(self, record: StepRecord, control: Control) -> None:
            what = "warmed up" if record.step == 1 else f"step {record.step - 1} of {steps}"
            print(f"{what}: {record.seconds['total']:.2f} s", file=sys.stderr, flush=True)

    return Progress()


def _leads() -> bool:
    import os

    from moefold.comm.launchers import place_of

    place = place_of(os.environ)
    return place is None or place.rank == 0


def _predicted_wall(run: RunConfig, args: argparse.Namespace, ranks: int) -> str | None:
    from moefold.api.plans import plan

    if args.machine is None and args.gpu is None:
        return None
    gpu = args.gpu or "H100"
    return plan(run, gpu=gpu, gpus=ranks, machine=args.machine, nic_gb_s=args.nic, search=False).wall
