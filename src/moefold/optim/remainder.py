"""A float32 main weight as its bfloat16 weight and a 16-bit remainder: 4 bytes for both instead of 6.

The forward pass reads the bfloat16 weight, so it should be the float32 value rounded to nearest, and not its upper 16
bits, which are too small by half a unit on average. Seen as integers, the bit patterns of a float32 value and of its
bfloat16 rounding differ by at most 2**15; a carry into the exponent is a carry of the integer too. That difference is
the remainder, and adding it back restores the float32 value to the last bit.

Ties need care. A cast rounds them to even, so 2**16 + 1 float32 values belong to each even bfloat16 value, one more
than 16 bits can tell apart: a remainder beside a cast cannot be lossless, and loses exactly there. So ties are rounded
away from zero. Then the remainder is the lower half of the bits, read as a signed number, pairs of weight and remainder
are all different, and every float32 value has one. The weight differs from a cast's at half of the exact ties, one
value in 2**17, where both neighbours are equally near.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 main weight, in new memory, of a bfloat16 ``weight`` and its int16 ``remainder``."""
    bits = weight.float().view(torch.int32)
    return bits.add_(remainder).view(torch.float32)


def split_into(main: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write the two halves of a float32 ``main`` into ``weight`` (bfloat16) and ``remainder`` (int16)."""
    bits = main.view(torch.int32)
    # The conversion keeps the lower 16 bits, and reads them as a signed number.
    remainder.copy_(bits)
    weight.copy_((bits - remainder).view(torch.float32))


def rounded_weight(main: Tensor) -> Tensor:
    """The bfloat16 weight alone: nearest, ties away from zero."""
    bits = main.view(torch.int32)
    return (bits - bits.to(torch.int16)).view(torch.float32).bfloat16()
