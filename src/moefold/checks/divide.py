"""Even division, which most rules are about, and what would have divided."""

from __future__ import annotations

from math import isqrt

_FEW = 8
# Looking for divisors takes a step per candidate; sizes beyond this have none that anyone would type.
_SEARCHED = 10**12


def divides(parts: int, whole: int) -> bool:
    """Whether `whole` falls into `parts` equal pieces; sizes below one are another rule's problem."""
    return parts < 1 or whole % parts == 0


def divisors(*wholes: int) -> str:
    """The numbers that divide every one of `wholes`, for the fix of a problem: "1, 2, 3 or 6"."""
    smallest = min(wholes)
    if not 1 <= smallest <= _SEARCHED:
        return "a divisor"
    small = [n for n in range(1, min(isqrt(smallest), 10**6) + 1) if smallest % n == 0]
    found = sorted({*small, *(smallest // n for n in small)})
    found = [n for n in found if all(whole % n == 0 for whole in wholes)]
    if len(found) > _FEW:
        return f"a divisor of {' and '.join(map(str, wholes))}, such as {', '.join(map(str, found[:_FEW]))}"
    return " or ".join(filter(None, (", ".join(map(str, found[:-1])), str(found[-1]))))
