from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.units import (
    UnitError,
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(80 * 2**30), "80.0 GiB"),
        (format_bytes(2**70), "1048576.0 PiB"),
        (format_count(671_025_397_760), "671.0B"),
        (format_count(999_960), "1.0M"),
        (format_count(12), "12"),
        (format_count(-1500), "-1.5K"),
        (format_seconds(0), "0 s"),
        (format_seconds(0.0123), "12.3 ms"),
        (format_seconds(7200), "2.0 h"),
        (format_seconds(2e-10), "0.2 ns"),
    ],
)
def test_printing(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (parse_bytes("80 GiB"), 80 * 2**30),
        (parse_bytes("80gb"), 80 * 10**9),
        (parse_bytes("4096"), 4096),
        (parse_count("671B"), 671 * 10**9),
        (parse_count("1.5T"), 1_500_000_000_000),
        (parse_seconds("1.5 h"), 5400.0),
        (parse_seconds("250ms"), 0.25),
    ],
)
def test_reading(read: float, expected: float) -> None:
    assert read == expected


@pytest.mark.parametrize("text", ["", "GiB", "-3", "3 parsecs", "1e999", "nan", "9" * 100_000, "1.5.2 s"])
def test_what_cannot_be_read_is_a_typed_error(text: str) -> None:
    for parse in (parse_bytes, parse_count, parse_seconds):
        with pytest.raises(UnitError, match="cannot read"):
            parse(text)


@given(st.integers(0, 10**18))
def test_reading_accepts_what_printing_writes(count: int) -> None:
    assert parse_count(format_count(count)) == pytest.approx(count, rel=0.06, abs=0.5)
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.06, abs=0.5)
