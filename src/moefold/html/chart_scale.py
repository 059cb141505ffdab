"""Axis scales for charts: values to pixels, round tick values, short labels."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end] in pixels; `end` may be smaller, as it is on a y axis."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        fraction = (self._transformed(value) - self._transformed(self.low)) / (
            self._transformed(self.high) - self._transformed(self.low)
        )
        return self.start + fraction * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else round_ticks(self.low, self.high, about)

    def _transformed(self, value: float) -> float:
        return math.log10(value) if self.log else value


def round_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    every = max(1, (last - first) // 6)
    ticks = [10.0**power * factor for power in range(first, last + 1, every) for factor in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def short(value: float) -> str:
    """A number in few characters: 12.3K, 0.05, 3e-4."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 999.5:
        for letter, unit in (("Q", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
            if size >= unit * 0.9995:
                return f"{value / unit:.3g}{letter}" if size < 999.5 * unit else f"{value:.1e}"
    if size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.3g}" if size < 100 else f"{value:.4g}"
