"""The experts of a run: who gets how many tokens, layer by layer and over time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moefold.train.report.downsample import Thinned, thin
from moefold.train.report.heat import heat_now, heat_over_time
from moefold.train.report.history import History
from moefold.train.report.line_chart import Series, line_chart
from moefold.train.report.summary import layer_numbers
from moefold.train.router_stats import RouterStats, router_stats


def experts(history: History) -> str:
    assert history.last_bin is not None
    layers = layer_numbers(history)
    stats = [router_stats(each.counts) for each in history.bins]
    span = (float(history.steps[0]), float(history.steps[-1]))
    x = np.array([(each.first + each.last) / 2 for each in history.bins])
    over_layers = "the line is the mean of all layers, the band the lowest and highest layer"
    load = _over_layers(x, [[layer.max_load for layer in each.layers] for each in stats])
    entropy = _over_layers(x, [[layer.entropy for layer in each.layers] for each in stats])
    dead = np.array([each.dead for each in stats], float)
    dropped = thin(history.steps, history.column("dropped"))
    some_dropped = bool(np.nanmax(dropped.high, initial=0.0) > 0)
    dead_note = f"of {history.last_bin.counts.size:,} in all layers" + ("" if some_dropped else "; nothing was dropped")
    idle = Series("dead", Thinned(x, dead, dead, dead, 1))
    charts = [
        line_chart("Busiest expert, times the mean", [Series("load", load)], note=over_layers, x_range=span),
        line_chart("Routing entropy, 1 is balanced", [Series("entropy", entropy)], note=over_layers, x_range=span),
        line_chart("Dead experts", [idle], note=dead_note, from_zero=True, x_range=span),
    ]
    if some_dropped:
        charts.append(
            line_chart("Dropped choices per step", [Series("dropped", dropped)], from_zero=True, x_range=span)
        )
    maps = heat_over_time(history.bins, layers) + heat_now(history.last_bin, layers)
    table = _layer_table(router_stats(history.last_bin.counts), layers)
    return f'<h2>Experts</h2><div class="charts">{maps}{"".join(charts)}{table}</div>'


def _over_layers(x: npt.NDArray[np.float64], rows: list[list[float]]) -> Thinned:
    values = np.array(rows, float)
    return Thinned(x, values.mean(1), values.min(1), values.max(1), 1)


def _layer_table(stats: RouterStats, layers: list[int]) -> str:
    rows = []
    for number, layer in zip(layers, stats.layers):
        few = ", ".join(map(str, layer.dead[:12])) + (", ..." if len(layer.dead) > 12 else "")
        dead = f'<td class="warn">{len(layer.dead)} ({few})</td>' if layer.dead else "<td>0</td>"
        rows.append(
            f"<tr><td>{number}</td><td>{layer.max_load:.2f}</td><td>{layer.min_load:.3f}</td><td>{layer.cv:.3f}</td>"
            f"<td>{layer.entropy:.4f}</td>{dead}</tr>"
        )
    head = "<tr><th>layer</th><th>busiest</th><th>idlest</th><th>spread</th><th>entropy</th><th>dead experts</th></tr>"
    note = "busiest and idlest in multiples of the mean; spread is the standard deviation of the load"
    return (
        "<figure class=wide><figcaption><b>Layers in the last interval</b></figcaption>"
        f'<div class="scroll"><table>{head}{"".join(rows)}</table></div><p class=note>{note}</p></figure>'
    )
