"""A million values that are hard to narrow, the same ones on every machine and with every version of torch.

Random bits are those of splitmix64. A quarter of the rows are arbitrary bit patterns, so that every
exponent, subnormals and zeros occur; the others have magnitudes within seven octaves, around one per row. A few rows
are constants and the borders at which a scale changes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moefold.data.sample_order import mix_array

SIDE = 1024
Kind = Literal["bfloat16", "float32", "narrow range", "narrow range of bfloat16"]


def random_bits(count: int, seed: int) -> np.ndarray:
    """uint64: splitmix64 from ``seed`` * 2**40 on."""
    with np.errstate(over="ignore"):
        states = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 40)
        return mix_array(states)


def hard_values(kind: Kind) -> Tensor:
    """[SIDE, SIDE] finite float32; in kinds of bfloat16, all of them are bfloat16 numbers."""
    bits = random_bits(SIDE * SIDE, 1).reshape(SIDE, SIDE)
    narrow = kind.startswith("narrow")
    octaves = 6 if narrow else 30
    middle = 127 - octaves + (random_bits(SIDE, 2) % np.uint64(2 * octaves)).astype(np.int64)
    exponent = middle[:, None] - (bits >> np.uint64(32)).astype(np.int64) % 7
    sign_and_fraction = bits.astype(np.uint32) & np.uint32(0x807FFFFF)
    x = torch.from_numpy((sign_and_fraction | (exponent.astype(np.uint32) << np.uint32(23))).view(np.float32).copy())
    if not narrow:
        patterns = torch.from_numpy((bits >> np.uint64(20)).astype(np.uint32).view(np.float32).copy())
        x[: SIDE // 4] = torch.where(torch.isfinite(patterns), patterns, 0.0)[: SIDE // 4]
        _put_borders(x)
    if kind.endswith("bfloat16"):
        x = x.bfloat16().float()
        # The largest float32 numbers have rounded to infinity.
        x = torch.where(torch.isfinite(x), x, 0.0)
    return x


def _put_borders(x: Tensor) -> None:
    largest_bfloat16 = (2 - 2.0**-7) * 2.0**127
    constants = (0.0, -0.0, 2.0**-149, 2.0**-126, largest_bfloat16, 448.0, 447.99997, 448.00003)
    x[:8] = torch.tensor(constants)[:, None]
    # Where a scale tips over: every power of two times 448, its neighbours, and other fractions.
    tops = torch.exp2(torch.arange(-120, 8).float()) * 448
    near = (tops, torch.nextafter(tops, 2 * tops), torch.nextafter(tops, 0 * tops), tops * 1.0078125)
    fractions = (1 / 448, 1.75 / 448, 1.5 / 448, 1 / 64)
    x[8:16] = torch.stack((*near, *(tops * fraction for fraction in fractions))).repeat(1, SIDE // 128)
