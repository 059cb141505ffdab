"""`moefold schedule` of one layer: its operations on two streams in a named order, timed and drawn."""

from __future__ import annotations

import argparse
import json
import shutil
from typing import Any

from moefold.errors import ConfigError, Problem
from moefold.schedule.layer_operations import STREAMS, LayerTimeline
from moefold.schedule.layer_orders import LAYER_ORDERS, layer_order
from moefold.schedule.layer_picture import label, layer_grid, layer_svg, layer_trace
from moefold.tables import text_table


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=2, metavar="L", help="layers of an order of a layer (2)")
    parser.add_argument(
        "--cost",
        action="append",
        default=[],
        metavar="NAME=T",
        help="time of an operation's forward, such as dispatch_exchange=3; again for more",
    )


def layer_timeline(args: argparse.Namespace) -> LayerTimeline:
    return layer_order(args.name, args.layers, _costs(args.cost))


def layer_report(timeline: LayerTimeline, width: int | None) -> str:
    costs = {operation.name: operation.cost for operation in timeline.order if operation.direction == "F"}
    busy = "   ".join(f"{stream} {timeline.busy(stream):g}" for stream in STREAMS)
    return "\n".join(
        [
            f"{timeline.name}   {LAYER_ORDERS[timeline.name].summary}",
            "",
            layer_grid(timeline, width or shutil.get_terminal_size((160, 24)).columns),
            "",
            *([text_table(["operation", "forward"], [[n, f"{c:g}"] for n, c in costs.items()]), ""] if costs else []),
            f"finish {timeline.finish:g}   {busy}   exposed {timeline.exposed:g} "
            f"({timeline.exposed / max(timeline.finish, 1e-12):.1%})   bound {timeline.bound:g}",
        ]
    )


def layer_comparison(layers: int, costs: list[str]) -> str:
    """All orders of a layer at the same costs."""
    rows = []
    for name, order in LAYER_ORDERS.items():
        timeline = layer_order(name, layers, _costs(costs))
        exposed = f"{timeline.exposed / max(timeline.finish, 1e-12):.1%}"
        rows.append([name, f"{timeline.finish:g}", f"{timeline.bound:g}", exposed, order.summary])
    return text_table(["order of a layer", "finish", "bound", "exposed", "about"], rows)


def layer_data(timeline: LayerTimeline) -> dict[str, Any]:
    return {
        "name": timeline.name,
        "finish": timeline.finish,
        "exposed": timeline.exposed,
        "bound": timeline.bound,
        "busy": {stream: timeline.busy(stream) for stream in STREAMS},
        "operations": [
            {
                "operation": label(operation),
                "layer": operation.layer,
                "stream": operation.stream,
                "start": start,
                "stop": stop,
            }
            for operation, (start, stop) in zip(timeline.order, timeline.spans, strict=True)
        ],
    }


def pictures(timeline: LayerTimeline) -> dict[str, str]:
    """The text of the files that can be written."""
    return {"svg": layer_svg(timeline), "trace": json.dumps(layer_trace(timeline))}


def _costs(words: list[str]) -> dict[str, float]:
    costs = {}
    for word in words:
        name, equals, number = word.partition("=")
        try:
            costs[name] = float(number if equals else "")
        except ValueError:
            message = f"{word[:80]!r} is not a name and a time"
            raise ConfigError(Problem("cost", message, "write dispatch_exchange=3")) from None
    return costs
