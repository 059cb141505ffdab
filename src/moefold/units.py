"""Bytes, counts and seconds: how they are printed everywhere, and how they are read from a command line.

Memory is counted in powers of 1024 (GiB), links and disks in powers of 1000 (GB), parameters and tokens in thousands
with the letters that papers use (671.0B). Reading accepts what printing writes.
"""

from __future__ import annotations

import re

from moefold.errors import MoefoldError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_COUNT = ("", "K", "M", "B", "T", "Q")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?(?:[eE][-+]?[0-9]{1,2})?)\s*([A-Za-z]{0,3})\s*")


class UnitError(MoefoldError):
    """A quantity that cannot be read."""


def format_bytes(count: float) -> str:
    """`format_bytes(80 * 2**30)` is "80.0 GiB"."""
    return _scaled(count, 1024, tuple(f" {unit}" for unit in _BINARY))


def format_count(count: float) -> str:
    """`format_count(671_025_397_760)` is "671.0B"."""
    return _scaled(count, 1000, _COUNT)


def format_seconds(seconds: float) -> str:
    """The largest unit in which the number is at least one: "12.3 ms", "2.0 h"."""
    fits = [unit for unit, size in _SECONDS.items() if abs(seconds) >= size]
    if not fits:
        return "0 s" if seconds == 0 else f"{seconds / 1e-9:.1f} ns"
    return f"{seconds / _SECONDS[fits[-1]]:.1f} {fits[-1]}"


def parse_bytes(text: str) -> int:
    """Accepts 1024s (GiB) and 1000s (GB); a bare number is bytes."""
    sizes = {unit: 1024**power for power, unit in enumerate(_BINARY)}
    sizes |= {unit: 1000**power for power, unit in enumerate(_DECIMAL)}
    return round(_read(text, sizes, default="B"))


def parse_count(text: str) -> int:
    """`parse_count("1.5T")` is 1_500_000_000_000."""
    return round(_read(text, {unit: 1000**power for power, unit in enumerate(_COUNT)}, default=""))


def parse_seconds(text: str) -> float:
    """`parse_seconds("1.5 h")` is 5400.0; a bare number is seconds."""
    return float(_read(text, _SECONDS, default="s"))


def _scaled(count: float, step: int, units: tuple[str, ...]) -> str:
    value, power = float(count), 0
    # 999.96 would print as "1000.0", so the next unit starts a little earlier.
    while abs(value) >= step - 0.05 and power < len(units) - 1:
        value, power = value / step, power + 1
    digits = 0 if power == 0 and value == int(value) else 1
    return f"{value:.{digits}f}{units[power]}"


def _read(text: str, sizes: dict[str, int] | dict[str, float], default: str) -> float:
    matched = _NUMBER_AND_UNIT.fullmatch(text)
    spelled = {unit.lower(): size for unit, size in sizes.items()}
    unit = (matched[2] or default).lower() if matched else None
    if matched is None or unit not in spelled:
        known = ", ".join(unit for unit in sizes if unit)
        raise UnitError(f"cannot read {text[:40]!r}: write a number and one of {known}, such as 1.5 {list(sizes)[-2]}")
    return float(matched[1]) * spelled[unit]
