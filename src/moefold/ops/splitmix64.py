"""splitmix64's finaliser on tensors: a hash of 64 bits, the same on every device.

Whatever must not depend on the layout is a hash of where an element lies in the whole: init values, and the noise of
stochastic rounding. torch's int64 wraps around, as the hash needs; its right shift keeps the sign, which it must not.
"""

from __future__ import annotations

from torch import Tensor


def mix64(word: Tensor) -> Tensor:
    word = (word ^ logical_shift(word, 30)) * wrapped(0xBF58476D1CE4E5B9)
    word = (word ^ logical_shift(word, 27)) * wrapped(0x94D049BB133111EB)
    return word ^ logical_shift(word, 31)


def logical_shift(word: Tensor, by: int) -> Tensor:
    """To the right, filled with zeros."""
    return (word >> by) & ((1 << (64 - by)) - 1)


def wrapped(number: int) -> int:
    """As a signed number of 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
