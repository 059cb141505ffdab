"""Heat maps of expert load: color is an expert's tokens over the mean of its layer, on a scale that doubles.

Balanced is the color of the page itself, so the eye goes to what is not: warm is overloaded, cold is idle, and an
expert that no token chose has a color of its own. The pictures are transparent in the middle instead of white, and so
work on light and dark pages alike.

A picture of small integers as a PNG: a heat map of a million cells in a few kilobytes.
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

from moefold.train.report.history import Bin
from moefold.train.router_stats import relative_load

WARM, COLD, DEAD, UNKNOWN = (226, 74, 26), (38, 110, 214), (240, 185, 11), (128, 128, 128)
# Full color at four times the mean, and at a quarter of it.
DOUBLINGS = 2.0
_LEVELS = 126
# Opacity of full color; dead experts are more opaque still, so that a reader of pixels can tell them.
_OPAQUE = 235
_UNKNOWN, _DEAD, _MIDDLE = 0, 1, 2 + _LEVELS


def palette() -> list[Color]:
    """0: no tokens at all in the layer. 1: a dead expert. Then from idle over balanced to overloaded."""
    colors: list[Color] = [(*UNKNOWN, 60), (*DEAD, 255)]
    for level in range(-_LEVELS, _LEVELS + 1):
        colors.append((*(WARM if level > 0 else COLD), round(_OPAQUE * abs(level) / _LEVELS)))
    return colors


def indices(counts_NE: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Rows of tokens per expert as palette indices."""
    load = relative_load(counts_NE.astype(np.float64))
    doublings = np.log2(load, out=np.zeros_like(load), where=load > 0)
    level = np.rint(np.clip(doublings / DOUBLINGS, -1, 1) * _LEVELS)
    shown = np.where(counts_NE == 0, _DEAD, _MIDDLE + level)
    silent = counts_NE.sum(-1, keepdims=True) == 0
    return np.where(silent, _UNKNOWN, shown).astype(np.uint8)


def heat_over_time(bins: Sequence[Bin], layers: Sequence[int]) -> str:
    """One map per mixture: time from left to right, experts from top to bottom."""
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
    """The last interval: experts from left to right, one row per mixture."""
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


def _framed(title: str, body: str, note: str, columns: Sequence[str], rows: Sequence[str]) -> str:
    """With what the page's script needs to name the cell under the pointer."""
    cells = {"columns": columns, "rows": rows, "perDoubling": _OPAQUE / DOUBLINGS, "most": _OPAQUE}
    return (
        f'<figure class="wide" data-cells="{escape(json.dumps(cells, separators=(",", ":")))}">'
        f"<figcaption><b>{title}</b>{_color_key()}</figcaption>{body}<p class=note>{escape(note)}</p></figure>"
    )


def _picture(indices_YX: npt.NDArray[np.uint8], name: str, *, tall: bool = False, height: int | None = None) -> str:
    address = data_address(png(np.ascontiguousarray(indices_YX), palette()))
    style = f' style="height:{height}px"' if height else ""
    return f'<img class="heat{" tall" if tall else ""}" alt="{escape(name)}"{style} src="{address}">'


def _color_key() -> str:
    """Drawn from the palette itself, so it cannot disagree with the maps."""
    strip = data_address(png(np.arange(2, 3 + 2 * _LEVELS, dtype=np.uint8)[None], palette()))
    return (
        '<span class="key">1/4 of the mean</span>'
        f'<img class="strip" alt="" src="{strip}"><span class="key">4 times</span>'
        f'<span class="key"><i style="background:rgb{DEAD}"></i>no token at all</span>'
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
