"""`moefold schedule`: draw a pipeline schedule with its timing, bubble and microbatches in flight, or the order of a
layer's operations with its exposed communication."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.cli import layer_schedule
from moefold.errors import ConfigError, MoefoldError, Problem
from moefold.private_files import replace_file
from moefold.schedule.actions import Order
from moefold.schedule.layer_orders import LAYER_ORDERS
from moefold.schedule.names import SCHEDULES, schedule_named
from moefold.schedule.passes import add_transfers, split_backward
from moefold.schedule.simulate import Durations, PerStage, Timeline, simulate
from moefold.schedule.timeline_picture import chrome_trace, shown, svg, text_grid
from moefold.schedule.validate import check
from moefold.tables import text_table

if TYPE_CHECKING:
    from moefold.cli.run_argument import Subparsers

_TIMES = {
    "forward": "a rank's forward of one microbatch, all its stages",
    "backward_input": "its input gradients",
    "backward_weight": "its weight gradients",
}
_MOST_RANKS_SHOWN = 32
# More takes minutes to draw.
_LARGEST_ORDER, _LARGEST_PICTURE = 2_000_000, 200_000


def add_to(commands: Subparsers) -> None:
    orders = "\n".join(f"  {name:<24}{schedule.summary}" for name, schedule in SCHEDULES.items())
    of_layers = "\n".join(f"  {name:<24}{order.summary}" for name, order in LAYER_ORDERS.items())
    parser = commands.add_parser(
        "schedule",
        help="draw a pipeline schedule or a layer's order of operations, with its time",
        description=f"Build, validate, time and draw a pipeline schedule.\n\n{orders}\n\n"
        "Without NAME, compare all that take these sizes.\n\n"
        "Or the order of a layer's operations on a compute and a communication stream:\n\n"
        f"{of_layers}\n\n`moefold schedule layers` compares these.",
        epilog="example: moefold schedule interleaved --stages 4 --virtual 2 --microbatches 8 --svg order.svg\n"
        "         moefold schedule forward_backward --layers 2 --cost dispatch_exchange=3 --svg layer.svg",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of the schedules above")
    parser.add_argument("--stages", type=int, metavar="P", help="pipeline ranks")
    parser.add_argument(
        "--virtual", type=int, metavar="V", help="virtual stages per rank (2, where the schedule takes any number)"
    )
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches per step")
    parser.add_argument("--split", action="store_true", help="split backward and fill bubbles with weight gradients")
    for name, meaning in _TIMES.items():
        help_text = f"time of {meaning} (1); or one number per stage, with commas"
        parser.add_argument(f"--{name.replace('_', '-')}", default="1", metavar="T", help=help_text)
    parser.add_argument("--send", type=float, default=0.0, metavar="T", help="time of a message between ranks (0)")
    parser.add_argument(
        "--overlap",
        type=float,
        default=1.0,
        metavar="X",
        help="time of an overlapped forward and backward over the sum of both (1)",
    )
    layer_schedule.add_options(parser)
    parser.add_argument("--width", type=int, metavar="N", help="columns of the drawing (the terminal's)")
    parser.add_argument("--svg", metavar="FILE", help="write a picture")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.name == "layers":
        print(layer_schedule.layer_comparison(args.layers, args.cost))
        return 0
    if args.name in LAYER_ORDERS:
        return _layer(args)
    missing = [f"--{name}" for name in ("stages", "microbatches") if getattr(args, name) is None]
    if missing:
        known = f"{args.name or 'a comparison'} is of a pipeline"
        raise ConfigError(Problem(", ".join(missing), f"missing: {known}", "give both, or name an order of a layer"))
    if args.name is None:
        return _compare(args)
    timeline = _timeline(args, args.name)
    if args.svg:
        _refuse_large_pictures(timeline.order)
        _write(args.svg, svg(timeline))
    if args.trace:
        _write(args.trace, json.dumps(chrome_trace(timeline)))
    if args.json:
        print(json.dumps(_data(timeline), indent=2))
    else:
        print(_report(timeline, args.width or shutil.get_terminal_size((160, 24)).columns))
    return 0


def _layer(args: argparse.Namespace) -> int:
    timeline = layer_schedule.layer_timeline(args)
    for name, text in layer_schedule.pictures(timeline).items():
        if getattr(args, name):
            _write(getattr(args, name), text)
    if args.json:
        print(json.dumps(layer_schedule.layer_data(timeline), indent=2))
    else:
        print(layer_schedule.layer_report(timeline, args.width))
    return 0


def _write(path: str, text: str) -> None:
    try:
        replace_file(Path(path), text)
    except OSError as error:
        raise MoefoldError(f"{path}: cannot be written: {error.strerror}; choose another file") from error


def _compare(args: argparse.Namespace) -> int:
    if args.svg or args.trace:
        raise ConfigError(Problem("svg, trace", "a file shows one schedule", "name it: moefold schedule NAME ..."))
    found = {}
    for name, schedule in SCHEDULES.items():
        virtual = _virtual(args, name)
        if not schedule.problems(args.stages, virtual, args.microbatches):
            found[name] = _timeline(args, name)
    if not found:
        # No schedule takes these sizes; this raises the problems.
        schedule_named("interleaved").build(args.stages, args.virtual or 1, args.microbatches)
    if args.json:
        print(json.dumps({name: _data(timeline, actions=False) for name, timeline in found.items()}, indent=2))
    else:
        print(_comparison(found))
    return 0


def _virtual(args: argparse.Namespace, name: str) -> int:
    if args.virtual is not None and args.name is not None:
        return int(args.virtual)
    # A comparison includes schedules with a fixed number of stages per rank.
    return SCHEDULES[name].virtual or args.virtual or 2


def _timeline(args: argparse.Namespace, name: str) -> Timeline:
    schedule = schedule_named(name)
    virtual = _virtual(args, name)
    _refuse_sizes(args, virtual)
    order = schedule.build(args.stages, virtual, args.microbatches)
    durations = _durations(args, order)
    if args.split:
        order = split_backward(order, durations)
    return simulate(check(add_transfers(order)), durations)


def _refuse_sizes(args: argparse.Namespace, virtual: int) -> None:
    size = args.stages * virtual * args.microbatches
    if min(args.stages, virtual, args.microbatches) > 0 and size > _LARGEST_ORDER:
        message = (
            f"{args.stages:,} ranks x {virtual:,} stages x {args.microbatches:,} microbatches are {size:,} forwards"
        )
        raise ConfigError(Problem("microbatches", message, f"at most {_LARGEST_ORDER:,} can be shown"))


def _refuse_large_pictures(order: Order) -> None:
    boxes = sum(map(len, order.actions))
    if boxes > _LARGEST_PICTURE:
        raise ConfigError(
            Problem("svg", f"a picture of {boxes:,} actions", f"at most {_LARGEST_PICTURE:,} can be drawn")
        )


def _durations(args: argparse.Namespace, order: Order) -> Durations:
    if not (args.send >= 0 and args.overlap > 0 and math.isfinite(args.send + args.overlap)):
        raise ConfigError(Problem("send, overlap", f"{args.send} and {args.overlap}", "use 0 or more, and more than 0"))
    times = {name: _per_stage(name, getattr(args, name), order) for name in _TIMES}
    return Durations(**times, send=args.send, overlap=args.overlap)


def _per_stage(name: str, text: str, order: Order) -> PerStage:
    path = name.replace("_", "-")
    try:
        times = [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(Problem(path, f"{text[:80]!r} are not numbers", "write 1 or 0.5,1,1,1.5")) from None
    if not all(0 < time < math.inf for time in times):
        raise ConfigError(Problem(path, f"{text[:80]!r}: a time must be more than 0", "write 1 or 0.5,1,1,1.5"))
    if len(times) == 1:
        return times[0] / order.num_virtual
    if len(times) != order.num_stages:
        message = f"{len(times)} times for {order.num_stages} stages of {order.name}"
        raise ConfigError(Problem(path, message, f"give 1 time or {order.num_stages}"))
    return times


def _report(timeline: Timeline, width: int) -> str:
    order = timeline.order
    rows = [
        ["..."] * 4
        if rank is None
        else [
            rank,
            ", ".join(map(str, order.stages_of(rank))),
            f"{timeline.bubbles[rank]:.2%}",
            _in_flight(timeline, rank),
        ]
        for rank in shown(order.num_ranks, _MOST_RANKS_SHOWN)
    ]
    return "\n".join(
        [
            f"{order.name}   ranks {order.num_ranks:,}   stages per rank {order.num_virtual}"
            f"   microbatches {order.num_microbatches:,}",
            "",
            text_grid(timeline, width, _MOST_RANKS_SHOWN),
            "",
            text_table(["rank", "stages", "bubble", "microbatches in flight"], rows),
            "",
            f"finish {timeline.finish:g}   bubble {timeline.bubble:.2%}"
            f"   at most {max(timeline.peak_live) / order.num_virtual:g} microbatches in flight on a rank",
        ]
    )


def _in_flight(timeline: Timeline, rank: int) -> str:
    """In microbatches of a whole rank: one of its V stages counts 1 / V."""
    return f"{timeline.peak_live[rank] / timeline.order.num_virtual:g}"


def _comparison(found: dict[str, Timeline]) -> str:
    rows = [
        [
            name,
            timeline.order.num_virtual,
            f"{timeline.finish:g}",
            f"{timeline.bubble:.2%}",
            f"{max(timeline.peak_live) / timeline.order.num_virtual:g}",
            SCHEDULES[name].summary,
        ]
        for name, timeline in found.items()
    ]
    return text_table(["schedule", "stages per rank", "finish", "bubble", "microbatches in flight", "about"], rows)


def _data(timeline: Timeline, actions: bool = True) -> dict[str, Any]:
    order = timeline.order
    data: dict[str, Any] = {
        "name": order.name,
        "ranks": order.num_ranks,
        "virtual": order.num_virtual,
        "microbatches": order.num_microbatches,
        "finish": timeline.finish,
        "bubble": timeline.bubble,
        "peak_live": timeline.peak_live,
        "bubbles": timeline.bubbles,
        "rank_of_stage": order.rank_of_stage,
    }
    if actions:
        data["actions"] = [
            [{"action": str(action), "start": start, "stop": stop} for action, (start, stop) in zip(row, spans)]
            for row, spans in zip(order.actions, timeline.spans)
        ]
    return data
