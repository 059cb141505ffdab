"""`moefold routing`: what a recorded routing does to experts and ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.cli.run_argument import Subparsers

if TYPE_CHECKING:
    from moefold.train.routing_loads import RoutingLoads

EXAMPLES = """examples:
  moefold train debug_small --trace-routing 8
  moefold routing runs/debug_small/routing
  moefold routing runs/debug_small/routing --ep 4 --slots 2 --json
  moefold train debug_small --name again --train.routing_trace.replay runs/debug_small/routing

Prints for every MoE layer the load of the busiest and of the idlest expert over the mean, the entropy (1: balanced) and
dead experts. With --ep, also the rows of the busiest rank over the mean rank's, averaged over exchanges: with experts
in order, with ECHO's clones in --slots spare slots of every rank, and with experts dealt out by the first half of the
exchanges and measured on the second. The last line has what `moefold plan --imbalance` takes.
Exits with 0, or 2 when the trace cannot be read."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "routing",
        help="load and entropy of a recorded routing, and what clones or another placement would change",
        description="Show what a recorded routing does to experts and ranks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="the `routing` directory of a run")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="ranks that share the experts (default 1)")
    parser.add_argument(
        "--slots", type=int, default=1, metavar="S", help="spare slots of a rank for clones (default 1)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="samples of one exchange (default: a microbatch from each of --ep ranks)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from moefold.errors import ConfigError, Problem
    from moefold.train.routing_loads import routing_loads
    from moefold.train.routing_trace import RoutingTrace

    if args.slots < 0:
        raise ConfigError(Problem("--slots", f"{args.slots} is no number of slots", "use 0 or more"))
    trace = RoutingTrace(args.trace)
    found = routing_loads(trace, args.ep, args.slots, args.samples)
    if args.json:
        print(json.dumps(_data(found) | {"run": trace.info.run, "steps": list(trace.steps)}, indent=2, allow_nan=False))
        return 0
    info = trace.info
    steps = f"{len(trace.steps)} step{'s' * (len(trace.steps) != 1)}"
    print(f"{info.run}: {steps}, {found.tokens:,} tokens, {info.num_experts} experts, {info.top_k} per token")
    for line in _lines(found, args.ep, args.slots):
        print(line)
    return 0


def _data(found: RoutingLoads) -> dict[str, object]:
    from dataclasses import asdict

    layers = [
        {"layer": name} | asdict(stats) | ({"ranks": asdict(found.ranks[number])} if found.ranks else {})
        for number, (name, stats) in enumerate(zip(found.layers, found.stats, strict=True))
    ]
    imbalance = {"imbalance": asdict(found.imbalance)} if found.ranks else {}
    return {"tokens": found.tokens, "exchanges": found.exchanges, "layers": layers} | imbalance


def _lines(found: RoutingLoads, ep: int, slots: int) -> list[str]:
    from moefold.tables import text_table

    header = ["layer", "busiest", "idlest", "entropy", "dead"]
    header += [f"in order, ep {ep}", f"clones, {slots} slots", "placement"] if found.ranks else []
    rows = []
    for number, (name, stats) in enumerate(zip(found.layers, found.stats, strict=True)):
        row = [name, f"{stats.max_load:.2f}", f"{stats.min_load:.2f}", f"{stats.entropy:.3f}", str(len(stats.dead))]
        if found.ranks:
            ranks = found.ranks[number]
            row += [f"{value:.3f}" for value in (ranks.in_order, ranks.clones, ranks.placement)]
        rows.append(tuple(row))
    lines = text_table(tuple(header), rows).splitlines()
    if found.ranks:
        mean = found.imbalance
        lines.append(
            f"busiest rank over the mean, all layers, {found.exchanges} exchanges: {mean.in_order:.3f} in order "
            f"(moefold plan --imbalance {mean.in_order:.2f}), {mean.clones:.3f} with clones, {mean.placement:.3f} "
            "dealt out anew"
        )
    return lines
