"""A picture of small integers as a PNG: a heat map of a million cells in a few kilobytes."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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
