"""`moefold dryrun`: the real training step of one rank of a large job, on fake tensors."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from moefold.api.runs import load_run
from moefold.cli.run_argument import Subparsers, add_run_argument, with_progress
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, Problem

EXAMPLES = """examples:
  moefold dryrun debug_small --world 4 --rank 0 --parallel.ep 4
  moefold dryrun deepseek_v3 --world 256 --rank 64 --parallel.pp 4 --parallel.vpp 4 --parallel.schedule interleaved
  moefold dryrun deepseek_v3 --world 256 --rank stages --parallel.pp 4 --parallel.vpp 4 --parallel.schedule interleaved
  moefold dryrun deepseek_v3 --world 256 --rank 0 --imbalance 1.5 --json
  moefold dryrun qwen3_30b_a3b_proxy --world 4 --device cuda --rank all --parallel.ep 4 --precision.compute bfloat16

Runs in one process; fake tensors allocate no memory. With --device cuda they are on fake GPUs: the run's GPU kernels,
streams and NCCL calls are those of training, and what is wrong with them is listed. Nothing is computed, and no GPU is
needed; a C++ compiler is.
Exits with 0 when the step ran without a finding, 1 with findings, 2 when the command is wrong."""


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
    parser.add_argument(
        "--rank",
        default="0",
        metavar="R",
        help="the rank to run (default 0); stages: one of every pipeline rank, as a table; all, on fake GPUs",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="fake memory of a CPU or of GPUs")
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
    asked = load_run(args.name, args.changes)
    if args.device == "cuda":
        _run_on_fake_gpus(asked, args)
    if args.rank != "stages" and not args.rank.isdecimal():
        choices = "a number, or stages; all needs --device cuda"
        raise ConfigError(Problem("--rank", f"{args.rank!r} is not a rank", choices))
    from moefold.dryrun.dry_run import dry_run, dry_run_json, dry_run_stages, report, stages_report

    if args.rank == "stages":
        _say_done(0, asked.parallel.pp)
        ranks = dry_run_stages(asked, args.world, args.microbatches, imbalance=args.imbalance, progress=_say_done)
        print(json.dumps({"ranks": [dry_run_json(each) for each in ranks]}) if args.json else stages_report(ranks))
        return 0
    found = dry_run(
        asked,
        args.world,
        int(args.rank),
        args.microbatches,
        imbalance=args.imbalance,
        progress=_progress_bar("actions"),
    )
    print(json.dumps(dry_run_json(found)) if args.json else report(found))
    return 0


def _run_on_fake_gpus(asked: RunConfig, args: argparse.Namespace) -> NoReturn:
    """Ends the process: torch's threads for backward passes on eight devices do not end by themselves."""
    from moefold.dryrun.fake_cuda.load_guard import load_guard

    load_guard()
    from moefold.dryrun.dry_run import dry_run_json, refuse, report
    from moefold.dryrun.fake_cuda.laboratory import compare, dry_run_on_gpu, run_ranks

    every = args.rank == "all"
    if not every and not args.rank.isdecimal():
        raise ConfigError(Problem("--rank", f"{args.rank!r} is not a rank", "a number or all, with --device cuda"))
    refuse(asked, args.world, 0 if every else int(args.rank), args.microbatches, args.imbalance)
    if every:
        reports = run_ranks(asked, args.world, args.microbatches, _progress_bar("ranks"))
        findings = compare(reports)
        data: dict[str, object] = {"peaks": {each.rank: each.peak for each in reports}}
        text = f"{args.world} ranks; the fullest holds {max(each.peak for each in reports) / 2**30:.2f} GiB"
    else:
        found, one = dry_run_on_gpu(
            asked, args.world, int(args.rank), args.microbatches, progress=_progress_bar("actions")
        )
        findings = list(one.findings)
        data = {} if found is None else dry_run_json(found)
        text = "" if found is None else report(found)
    listed = [str(finding) for finding in findings]
    summary = "\n".join([text, f"{len(listed)} findings on fake GPUs", *(f"  {each}" for each in listed)])
    print(json.dumps(data | {"findings": listed}) if args.json else summary, flush=True)
    os._exit(1 if listed else 0)


def _say_done(done: int, total: int) -> None:
    """A line per pipeline rank, each of which takes seconds; rewritten on a terminal."""
    start, end = ("\r", "\n" if done == total else "") if sys.stderr.isatty() else ("", "\n")
    print(f"{start}pipeline ranks: {done} of {total}", end=end, file=sys.stderr, flush=True)


def _progress_bar(what: str) -> Callable[[int, int], None]:
    """A callback of (done, total) that advances a progress bar."""
    bars: list[Iterator[int]] = []

    def advance(done: int, total: int) -> None:
        if not bars:
            bars.append(iter(with_progress(range(total), total, what)))
            next(bars[0])
        next(bars[0], None)

    return advance
