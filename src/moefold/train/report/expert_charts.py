"""The experts of a run: curves and heat maps of their load, layer by layer and over time.

The color of a heat map is an expert's tokens over the mean of its layer, on a logarithmic scale. In maps of whole
layers it is the busiest expert's load, the experts in effective use (e to the entropy, over all experts), and each
balance loss over its value if experts were balanced, which is its coefficient. Balanced is transparent, which works on
light and dark pages; warm is overloaded, cold is idle, and an expert without a token has a color of its own. Maps are
PNGs of small integers: a million cells take a few kilobytes.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

from moefold.train.metrics import RouterStats, relative_load, router_stats
from moefold.train.report.history import Bin, History, number
from moefold.train.report.line_chart import Downsampled, Series, downsample, line_chart
from moefold.train.report.summary import layer_numbers

WARM, COLD, DEAD, UNKNOWN = (226, 74, 26), (38, 110, 214), (240, 185, 11), (128, 128, 128)
# Full color at four times the mean, and at a quarter of it.
DOUBLINGS = 2.0
_LEVELS = 126
# Opacity of full color; dead experts are more opaque still, so that the page's script can tell them from the pixel.
_OPAQUE = 235
_UNKNOWN, _DEAD, _MIDDLE = 0, 1, 2 + _LEVELS


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
    dropped = downsample(history.steps, history.column("dropped"))
    some_dropped = bool(np.nanmax(dropped.high, initial=0.0) > 0)
    dead_note = f"of {history.last_bin.counts.size:,} in all layers" + ("" if some_dropped else "; nothing was dropped")
    idle = Series("dead", Downsampled(x, dead, dead, dead, 1))
    charts = [
        line_chart("Busiest expert", [Series("load", load)], unit="times the mean", note=over_layers, x_range=span),
        line_chart(
            "Routing entropy", [Series("entropy", entropy)], unit="1 is balanced", note=over_layers, x_range=span
        ),
        line_chart("Dead experts", [idle], unit="experts", note=dead_note, from_zero=True, x_range=span),
    ]
    if some_dropped:
        charts.append(
            line_chart(
                "Dropped assignments per step",
                [Series("dropped", dropped)],
                unit="assignments",
                from_zero=True,
                x_range=span,
            )
        )
    maps = layers_over_time(history, stats, layers)
    maps += heat_over_time(history.bins, layers) + heat_now(history.last_bin, layers)
    table = _layer_table(router_stats(history.last_bin.counts), layers, history.last_bin)
    return f'<h2>Experts</h2><div class="charts">{maps}{"".join(charts)}{table}</div>'


def _over_layers(x: npt.NDArray[np.float64], rows: list[list[float]]) -> Downsampled:
    values = np.array(rows, float)
    return Downsampled(x, values.mean(1), values.min(1), values.max(1), 1)


def _layer_table(stats: RouterStats, layers: list[int], last: Bin) -> str:
    rows = []
    for index, (name, layer) in enumerate(zip(layers, stats.layers)):
        few = ", ".join(map(str, layer.dead[:12])) + (", ..." if len(layer.dead) > 12 else "")
        dead = f'<td class="warn">{len(layer.dead)} ({few})</td>' if layer.dead else "<td>0</td>"
        losses = "".join(f"<td>{_loss(row[index])}</td>" for row in last.balance.values())
        rows.append(
            f"<tr><td>{name}</td><td>{layer.max_load:.2f}</td><td>{layer.min_load:.3f}</td><td>{layer.cv:.3f}</td>"
            f"<td>{layer.entropy:.4f}</td>{losses}{dead}</tr>"
        )
    named = "".join(f"<th>{escape(name)} loss</th>" for name in last.balance)
    head = "<tr><th>layer</th><th>busiest</th><th>idlest</th><th>spread</th><th>entropy</th>"
    head += f"{named}<th>dead experts</th></tr>"
    note = "busiest and idlest in multiples of the mean; spread is the standard deviation of the load"
    note += "; losses are what the layer adds in the mean step" * bool(last.balance)
    return (
        "<figure class=wide><figcaption><b>Layers in the last interval</b></figcaption>"
        f'<div class="scroll"><table>{head}{"".join(rows)}</table></div><p class=note>{note}</p></figure>'
    )


def _loss(value: float) -> str:
    return f"{value:.3g}" if np.isfinite(value) else ""


def layers_over_time(history: History, stats: Sequence[RouterStats], layers: Sequence[int]) -> str:
    """One map per quantity: time from left to right, MoE layers from top to bottom."""
    bins, experts = history.bins, history.bins[-1].counts.shape[1]
    values = {
        "busiest expert over the mean": np.array([[layer.max_load for layer in each.layers] for each in stats]),
        "experts in effective use over all": np.array(
            [[experts ** (layer.entropy - 1.0) if layer.tokens else 0.0 for layer in each.layers] for each in stats]
        ),
    }
    coefficients = _coefficients(history)
    for name in bins[-1].balance:
        unknown = np.full(len(layers), np.nan)
        loss_BM = np.array([each.balance.get(name, unknown) for each in bins])
        known = loss_BM[np.isfinite(loss_BM)]
        # The z-loss has no value of balance.
        over = coefficients.get(name, 0.0) if name != "z" else 0.0
        over, words = (over, "balanced") if over > 0 else (float(known.mean()) if known.size else 0.0, "its mean")
        if over > 0:
            values[f"{name} loss over {words}"] = np.nan_to_num(loss_BM / over)
    height = min(max(len(layers) * 12, 48), 260)
    maps = [
        f"<div><p>{escape(name)}</p>{_picture(levels(value_BM.T), name, height=height)}</div>"
        for name, value_BM in values.items()
    ]
    note = (
        f"Left to right: steps {bins[0].first:,} to {bins[-1].last:,} in {len(bins)} intervals. "
        f"Top to bottom: layers {layers[0]} to {layers[-1]}. Balanced has no color."
    )
    body = f'<div class="maps" style="--columns:{min(len(maps), 3)}">{"".join(maps)}</div>'
    rows = [f"layer {layer}" for layer in layers]
    return _framed("Layers over time", body, note, [_steps(each) for each in bins], rows, "times")


def _coefficients(history: History) -> dict[str, float]:
    """Of balance losses, as far as the run's configuration is known."""
    found: object = history.start.get("config")
    for name in ("model", "moe", "balance"):
        found = found.get(name) if isinstance(found, dict) else None
    pairs = found.items() if isinstance(found, dict) else ()
    return {str(name): number(value) for name, value in pairs}


def palette() -> list[Color]:
    """0: no tokens at all in the layer. 1: a dead expert. Then from idle over balanced to overloaded."""
    colors: list[Color] = [(*UNKNOWN, 60), (*DEAD, 255)]
    for level in range(-_LEVELS, _LEVELS + 1):
        colors.append((*(WARM if level > 0 else COLD), round(_OPAQUE * abs(level) / _LEVELS)))
    return colors


def indices(counts_NE: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Rows of tokens per expert as palette indices."""
    shown = np.where(counts_NE == 0, _DEAD, levels(relative_load(counts_NE.astype(np.float64))))
    silent = counts_NE.sum(-1, keepdims=True) == 0
    return np.where(silent, _UNKNOWN, shown).astype(np.uint8)


def levels(ratio: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Ratios to a balanced value as palette indices; 0 is not known."""
    doublings = np.log2(ratio, out=np.zeros_like(ratio), where=ratio > 0)
    level = np.rint(np.clip(doublings / DOUBLINGS, -1, 1) * _LEVELS)
    return np.where(ratio > 0, _MIDDLE + level, _UNKNOWN).astype(np.uint8)


def heat_over_time(bins: Sequence[Bin], layers: Sequence[int]) -> str:
    """One map per MoE layer: time from left to right, experts from top to bottom."""
    counts_BME = np.stack([each.counts for each in bins])
    maps = []
    for row, layer in enumerate(layers):
        picture = _picture(indices(counts_BME[:, row]).T, f"layer {layer}", tall=True)
        maps.append(f"<div><p>layer {layer}</p>{picture}</div>")
    tall = "" if len(layers) <= 24 else " many"
    experts = [f"expert {expert}" for expert in range(counts_BME.shape[2])]
    note = (
        f"Left to right: steps {bins[0].first:,} to {bins[-1].last:,} in {len(bins)} intervals. "
        f"Top to bottom: experts 0 to {len(experts) - 1}."
    )
    body = f'<div class="maps{tall}" style="--columns:{_columns(len(layers))}">{"".join(maps)}</div>'
    return _framed("Expert load over time", body, note, [_steps(each) for each in bins], experts)


def heat_now(last: Bin, layers: Sequence[int]) -> str:
    """The last interval: experts from left to right, one row per MoE layer."""
    rows, experts = len(layers), last.counts.shape[1]
    picture = _picture(indices(last.counts), "", height=min(max(rows * 18, 54), 420))
    few = rows <= 12
    names = "".join(f"<span>{layer}</span>" for layer in (layers if few else (layers[0], layers[-1])))
    note = f"{_steps(last).capitalize()}. One row per layer, experts 0 to {experts - 1} from left to right."
    body = f'<div class="now"><div class="rows{"" if few else " ends"}">{names}</div>{picture}</div>'
    columns = [f"expert {expert}" for expert in range(experts)]
    return _framed("Expert load at the end", body, note, columns, [f"layer {layer}" for layer in layers])


def _columns(maps: int) -> int:
    """As many maps side by side as leave the fewest places empty."""
    if maps <= 4:
        return maps
    return min(range(4, 7) if maps <= 24 else range(8, 6, -1), key=lambda columns: -maps % columns)


def _steps(span: Bin) -> str:
    return f"step {span.last:,}" if span.first == span.last else f"steps {span.first:,} to {span.last:,}"


def _framed(
    title: str, body: str, note: str, columns: Sequence[str], rows: Sequence[str], unit: str = "times the mean"
) -> str:
    """With what the page's script needs to name the cell under the pointer."""
    cells = {"columns": columns, "rows": rows, "perDoubling": _OPAQUE / DOUBLINGS, "most": _OPAQUE, "unit": unit}
    return (
        f'<figure class="wide" data-cells="{escape(json.dumps(cells, separators=(",", ":")))}">'
        f"<figcaption><b>{title}</b>{_color_key(unit)}</figcaption>{body}<p class=note>{escape(note)}</p></figure>"
    )


def _picture(indices_YX: npt.NDArray[np.uint8], name: str, *, tall: bool = False, height: int | None = None) -> str:
    address = data_address(png(np.ascontiguousarray(indices_YX), palette()))
    style = f' style="height:{height}px"' if height else ""
    return f'<img class="heat{" tall" if tall else ""}" alt="{escape(name)}"{style} src="{address}">'


def _color_key(unit: str) -> str:
    """Drawn from the palette itself, so it cannot disagree with the maps. ``unit`` as in "4 times the mean"."""
    strip = data_address(png(np.arange(2, 3 + 2 * _LEVELS, dtype=np.uint8)[None], palette()))
    return (
        f'<span class="key">1/4{unit.removeprefix("times").replace(" the", " of the")}</span>'
        f'<img class="strip" alt="" src="{strip}"><span class="key">4 times</span>'
        + (f'<span class="key"><i style="background:rgb{DEAD}"></i>no token at all</span>' if unit != "times" else "")
    )


Color = tuple[int, int, int, int]


def png(indices_YX: npt.NDArray[np.uint8], palette: Sequence[Color]) -> bytes:
    """One byte per cell, looked up in `palette` as red, green, blue and opacity."""
    height, width = indices_YX.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    colors = b"".join(bytes(color[:3]) for color in palette)
    opacities = bytes(color[3] for color in palette)
    # Each row starts with the number of its filter; 0 is none.
    rows = np.concatenate((np.zeros((height, 1), np.uint8), indices_YX), axis=1).tobytes()
    chunks = ((b"IHDR", header), (b"PLTE", colors), (b"tRNS", opacities), (b"IDAT", zlib.compress(rows, 9)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, body) for name, body in (*chunks, (b"IEND", b"")))


def data_address(picture: bytes) -> str:
    """The picture as an address that holds it, so that a page needs no other file."""
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
