"""`moefold bench`: measure this machine, and moefold's MoE layer and training step on it.

Comparisons with other libraries are no part of the wheel: see docs/bench.md and the folder `benchmarks/` of a clone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.cli.run_argument import Subparsers, add_device_option
from moefold.errors import ConfigError, MoefoldError, Problem, UnknownNameError
from moefold.tables import text_table
from moefold.units import format_seconds

if TYPE_CHECKING:
    from moefold.bench.clock import Timing
    from moefold.bench.layer_workload import LayerShape

EXAMPLES = """examples:
  moefold bench layer b
  moefold bench step --rounds 15
  moefold bench calibrate --out machine.json
  moefold plan debug_10m --machine machine.json --gpus 4 --no-search --parallel.ep 4

Times are of this machine at this moment: let nothing else run on it."""

CALIBRATE = """examples:
  moefold bench calibrate --out machine.json
  moefold bench calibrate --world 2 --json

On CPUs only. Takes a minute or two. Every measurement is divided by the time of a small matmul that runs just before
it, so other processes disturb it little; an idle machine is still better.
Exits with 0 when the table was made, 2 when the command cannot be understood."""

LAYER = """examples:
  moefold bench layer                                     # shapes a, b and c
  moefold bench layer b --device cuda
  moefold bench layer --tokens 512 --dim 256 --hidden 64 --experts 16 --top-k 4 --dtype float32 --json

Layer and dense matmuls alternate, one run each per round; ratios are taken round by round.
Exits with 0 when it was measured, 2 when the command cannot be understood."""

STEP = """examples:
  moefold bench step
  moefold bench step --device cuda --set kernels.backend=triton
  moefold bench step --set data.seq_len=128 --set model.num_layers=2 --json

Exits with 0 when it was measured, 2 when the command cannot be understood."""

SIZES = ("tokens", "dim", "hidden", "experts", "top_k", "shared")
# Between two lines of progress where stderr is no terminal.
_SECONDS_BETWEEN_LINES = 10.0


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure this machine, and moefold's MoE layer and training step beside plain matmuls",
        description="Measure this machine, and moefold's MoE layer and training step on it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(metavar="WHAT", title="what to measure", required=True)
    _add_calibrate(kinds)
    _add_layer(kinds)
    _add_step(kinds)


def _add_calibrate(kinds: Subparsers) -> None:
    parser = kinds.add_parser(
        "calibrate",
        help="compute and communication speeds of this machine, as `moefold plan --machine` reads them",
        description="Measure matmuls, attention, memory traffic, the optimizer and collectives between processes on "
        "this machine, one thread per rank as in training, and how ranks that share its cores slow each other down.",
        epilog=CALIBRATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument("--world", type=int, default=4, metavar="N", help="most ranks that will run here (default 4)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="rounds of each measurement (default 15)")
    parser.add_argument("--json", action="store_true", help="print the table as one JSON object")
    parser.set_defaults(run=calibrate)


def _add_layer(kinds: Subparsers) -> None:
    parser = kinds.add_parser(
        "layer",
        help="one MoE layer beside dense matmuls of the same FLOPs",
        description="Forward and backward of one MoE layer beside dense matmuls of the same FLOPs, on a CPU or a GPU.",
        epilog=LAYER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shapes(parser)
    add_timing_options(parser, devices=True)
    parser.set_defaults(run=layer)


def _add_step(kinds: Subparsers) -> None:
    parser = kinds.add_parser(
        "step",
        help="a whole training step beside a matmul",
        description="One training step of the recipe debug_50m on a CPU or a GPU: time, tokens per second, and model "
        "FLOP/s as a part of what a matmul reaches.",
        epilog=STEP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_changes(parser)
    add_timing_options(parser, devices=True)
    parser.set_defaults(run=step)


# ---- options that benchmarks/ has as well ----


def add_shapes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="a, b or c (default: all three)")
    add_sizes(parser, SIZES, "others from SHAPE or b")


def add_sizes(parser: argparse.ArgumentParser, sizes: tuple[str, ...], otherwise: str) -> None:
    group = parser.add_argument_group("own sizes", otherwise)
    for size in sizes:
        group.add_argument(f"--{size.replace('_', '-')}", type=int, metavar="N")


def add_changes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the run, as in data.seq_len=256"
    )


def add_timing_options(
    parser: argparse.ArgumentParser, threads: bool = True, devices: bool = False, budget: float = 30.0
) -> None:
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    if threads:
        parser.add_argument("--threads", type=int, default=1, metavar="N", help="per process (default 1)")
    if devices:
        add_device_option(parser)
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="most rounds that count (default 9)")
    parser.add_argument("--warm", type=int, default=8, metavar="N", help="most rounds before those (default 8)")
    parser.add_argument(
        "--budget",
        type=float,
        default=budget,
        metavar="SECONDS",
        help=f"fewer rounds where they would take longer (default {budget:g}, for each comparison)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def timing_problems(args: argparse.Namespace) -> list[Problem]:
    return [
        Problem(f"--{name}", f"is {getattr(args, name)}", f"use {least} or more")
        for name, least in (("rounds", 1), ("warm", 0), ("threads", 1), ("budget", 1))
        if getattr(args, name, least) < least
    ]


def shapes_of(args: argparse.Namespace) -> list[LayerShape]:
    from moefold.bench.layer_workload import SHAPES, checked

    for name in args.shapes:
        if name not in SHAPES:
            raise UnknownNameError("shape", name, SHAPES)
    own = {size: getattr(args, size) for size in SIZES if getattr(args, size) is not None}
    if not own:
        return [SHAPES[name] for name in args.shapes or SHAPES]
    if len(args.shapes) > 1:
        raise ConfigError(Problem("SHAPE", f"{len(args.shapes)} shapes and own sizes", "name one shape or none"))
    return [checked(replace(SHAPES[args.shapes[0] if args.shapes else "b"], **own))]


def changes_of(args: argparse.Namespace) -> dict[str, str]:
    pairs = [word.partition("=") for word in args.set]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(Problem("--set", f"{key!r} has no '='", "write it as data.seq_len=256"))
    return {key: value for key, _, value in pairs}


def progress_line() -> Callable[[str, int, int], None]:
    """A line that is rewritten on a terminal; elsewhere one line per finished measurement and every 10 seconds."""
    live = sys.stderr.isatty()
    # The first line at once: a run can take long.
    printed = -_SECONDS_BETWEEN_LINES

    def show(what: str, done: int, total: int) -> None:
        nonlocal printed
        if live:
            end = "\n" if done == total else ""
            print(f"\r{what}: {done} of {total}    ", end=end, file=sys.stderr, flush=True)
        elif done == total or time.monotonic() > printed + _SECONDS_BETWEEN_LINES:
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)
            printed = time.monotonic()

    return show


# ---- commands ----


def calibrate(args: argparse.Namespace) -> int:
    from moefold.bench.calibrate import calibrate as measure
    from moefold.bench.calibrate import calibration_report
    from moefold.hardware.machine import machine_json
    from moefold.private_files import replace_file

    if args.out is not None and not args.out.parent.is_dir():
        raise MoefoldError(f"--out {args.out}: {args.out.parent} is no directory")
    found = measure(args.world, args.rounds, progress_line())
    if args.out is not None:
        try:
            replace_file(args.out, machine_json(found.machine))
        except OSError as error:
            raise MoefoldError(f"{args.out}: cannot be written: {error.strerror}; choose another --out") from error
    print(json.dumps(asdict(found.machine)) if args.json else calibration_report(found))
    if args.out is not None:
        print(f"wrote {args.out}", file=sys.stderr)
    return 0


def layer(args: argparse.Namespace) -> int:
    device = _start(args)
    from moefold.bench.layer_bench import DENSE, bench_layer

    shapes = shapes_of(args)
    found = []
    for shape in shapes:
        timings = bench_layer(shape, args.dtype, args.rounds, args.warm, progress_line(), device, args.budget)
        found.append(_timings_json(args, device, str(shape), timings))
    for each, shape in zip(found, shapes):
        for timing in each["timings"].values():
            timing["gflops"] = shape.flops() / timing["seconds"]["median"] / 1e9
    if args.json:
        print(json.dumps({"layers": found}))
    else:
        print("\n\n".join(_timings_text(each, DENSE) for each in found))
    return 0


def step(args: argparse.Namespace) -> int:
    device = _start(args)
    from moefold.bench.step_bench import MATMUL, MATMUL_SIZE, RECIPE, STEP, bench_step, run_for_bench
    from moefold.blueprint.flops import training_flops_per_token

    changes = changes_of(args)
    run = run_for_bench(args.dtype, changes, device=device)
    timings = bench_step(run, args.rounds, args.warm, progress_line(), device, args.budget)
    found = _timings_json(args, device, f"training step of {RECIPE}{' with changes' if changes else ''}", timings)
    tokens = run.data.global_batch * run.data.seq_len
    seconds = {name: timing["seconds"]["median"] for name, timing in found["timings"].items()}
    flops = {STEP: tokens * training_flops_per_token(run.model, run.data.seq_len), MATMUL: 2.0 * MATMUL_SIZE**3}
    for name, timing in found["timings"].items():
        timing["gflops"] = flops[name] / seconds[name] / 1e9
    found["tokens_per_second"] = tokens / seconds[STEP]
    found["matmul_utilization"] = found["timings"][STEP]["gflops"] / found["timings"][MATMUL]["gflops"]
    if args.json:
        print(json.dumps(found))
    else:
        print(_timings_text(found))
        print(f"\n{found['tokens_per_second']:,.0f} tokens/s; model FLOP/s are "
              f"{found['matmul_utilization']:.0%} of the matmul's")  # fmt: skip
    return 0


def _start(args: argparse.Namespace) -> str:
    """Refuses bad options; then sets threads and allocator as the launcher of `moefold train` does. Returns the device:
    cpu or cuda."""
    if problems := timing_problems(args):
        raise ConfigError(*problems)
    import torch

    from moefold.comm.spawn import disable_malloc_trim, this_device

    device = this_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    disable_malloc_trim()
    torch.set_num_threads(args.threads)
    return device.type


def _timings_json(args: argparse.Namespace, device: str, title: str, timings: Mapping[str, Timing]) -> dict[str, Any]:
    """CPU time with one thread, wall time with more and on a GPU."""
    from moefold.bench.clock import spread

    clock = "cpu" if args.threads == 1 and device == "cpu" else "wall"
    where = f"{args.threads} thread{'s' * (args.threads > 1)}" if device == "cpu" else "one GPU"
    base = list(timings)[-1]
    return {
        "title": f"{title}, {args.dtype}, {where}",
        "device": device,
        "clock": clock,
        "rounds": len(timings[base].wall),
        "rounds_asked": args.rounds,
        "budget": args.budget,
        "timings": {
            name: {
                "seconds": asdict(spread(timing.of(clock))),
                "ratio": asdict(spread([a / b for a, b in zip(timing.of(clock), timings[base].of(clock))])),
                "wall": timing.wall,
                "cpu": timing.cpu,
            }
            for name, timing in timings.items()
        },
    }


def _timings_text(found: Mapping[str, Any], base: str | None = None) -> str:
    """``base``: the timing that ratios are relative to, where they mean something."""
    clock = "CPU time" if found["clock"] == "cpu" else "wall time"
    head = ["", clock, "GFLOP/s", *([f"x {base}"] if base else [])]
    rows = []
    for name, timing in found["timings"].items():
        row = [name, format_seconds(timing["seconds"]["median"]), f"{timing['gflops']:.0f}"]
        ratio = timing["ratio"]
        rows.append(row + ([f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"] if base else []))
    rounds, asked = found["rounds"], found["rounds_asked"]
    fewer = f" of {asked}, which is what fits into --budget {found['budget']:g} s" if rounds < asked else ""
    return f"{found['title']}; medians and quartiles, rounds: {rounds}{fewer}\n\n{text_table(head, rows)}"
