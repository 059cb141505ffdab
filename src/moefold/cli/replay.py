"""`moefold replay`: run a recorded step again from a checkpoint, and compare bit for bit."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.cli.run_argument import Subparsers, add_device_option, launched_ranks

if TYPE_CHECKING:
    from moefold.config.run import RunConfig
    from moefold.train.fault_tolerance.replay import Recorded

# The steps as they came out, and the findings that they decide.
Steps = dict[str, list[dict[str, object]]]

EXAMPLES = """examples:
  moefold replay runs/debug_small --step 150
  moefold replay runs/debug_small --step 150 --json
  torchrun --master-port 29500 --nproc-per-node 8 -m moefold.cli.main replay runs/my_run --step 4001

Starts at the newest checkpoint before the step, or at the beginning if there is none, and takes every step up to it,
on as many ranks as the run had. Loss, grad norm, samples, and the hash of parameters and optimizer states where it was
recorded (train.corruption.every), must come out the same to the last bit. Writes nothing into the run.
Exits with 0 when they do, 1 when they do not, 2 when the step cannot be replayed."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "replay",
        help="run a recorded step again from a checkpoint, and compare bit for bit",
        description="Run a recorded step again from a checkpoint, and compare with what was recorded, bit for bit.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="RUN_DIR", type=Path, help="the run's directory, with its metrics.jsonl")
    parser.add_argument("--step", type=int, required=True, metavar="S", help="the step to run again, from 1")
    add_device_option(parser)
    parser.add_argument("--json", action="store_true", help="print the steps and all differences as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from moefold.api.runs import load_run
    from moefold.train.fault_tolerance.replay import differences, read_recorded

    recorded = read_recorded(args.directory, args.step)
    asked = recorded.in_its_layout(load_run(str(args.directory / "config.yaml")))
    count = len(recorded.steps)
    print(
        f"replaying {count} step{'s' if count > 1 else ''} from step {recorded.start} on {recorded.world} rank"
        f"{'s' if recorded.world > 1 else ''}",
        file=sys.stderr,
    )
    rank, result = _replayed(asked, args, recorded)
    if rank != 0:
        return 0
    found = differences(recorded.steps, result["steps"])
    if args.json:
        facts = {"start": recorded.start, "same": not found, "differences": found, **result}
        print(json.dumps(facts, indent=2, allow_nan=False))
    else:
        print(_sentences(args.step, found, result))
    return 1 if found else 0


def _replayed(asked: RunConfig, args: argparse.Namespace, recorded: Recorded) -> tuple[int, Steps]:
    """This process' rank, and what it replayed."""
    import torch

    from moefold.comm.spawn import join_world, spawn_ranks, this_device
    from moefold.errors import MoefoldError
    from moefold.train.fault_tolerance.replay import replay_rank

    if recorded.world == 1 or launched_ranks() > 1:
        rank, world = join_world(600.0, args.device)
        if world != recorded.world:
            raise MoefoldError(f"the step was taken by {recorded.world} ranks, and here are {world}; start as many")
        return rank, replay_rank(asked, args.directory, recorded, rank, this_device(args.device), 600.0)
    if args.device == "cuda":
        raise MoefoldError(
            f"on GPUs, start the ranks by `torchrun --master-port 29500 --nproc-per-node {recorded.world} "
            "-m moefold.cli.main replay ...`"
        )
    device = torch.device("cpu")
    work = lambda rank: replay_rank(asked, args.directory, recorded, rank, device, 600.0)  # noqa: E731
    return 0, spawn_ranks(work, recorded.world, seconds=float("inf"), collective_timeout=600.0)[0]


def _sentences(step: int, differences: list[dict[str, object]], result: Steps) -> str:
    last = result["steps"][-1]
    if not differences:
        lines = [f"step {step}: the same to the last bit: loss {last['loss']}, grad_norm {last['grad_norm']}"]
    else:
        lines = [f"step {step}: not what was recorded"]
        lines += [
            f"  step {each['step']}: {each['field']} was {each['recorded']}, now {each['replayed']}"
            for each in differences
        ]
    for each in result["decided"]:
        culprits = each["culprits"]
        wrong = ", ".join(map(str, culprits)) if isinstance(culprits, (list, tuple)) and culprits else "none"
        lines.append(f"  {each['tensor']} differed between replicas at step {each['step']}: wrong on rank {wrong}")
    return "\n".join(lines)
