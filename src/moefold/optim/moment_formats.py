"""Formats in which AdamW's moments are stored between updates; the update itself is computed in float32.

    wide       float32 (or float64): stored as computed
    bfloat16   half the bytes; 8 significant bits
    float8     a quarter: e4m3 codes and one power of two per block of 128 elements

Why rounding matters: beta2 = 0.999 changes the second moment by at most 0.1 % per step, and nearest rounding to
bfloat16 drops every change below 0.2 to 0.4 %: the moment cannot fall when gradients do. Stochastic rounding keeps such
changes on average. `checks.precision` refuses nearest rounding where it would freeze a moment.

float8 keeps the square root of the second moment, which halves the range of exponents in a block. A positive second
moment is never stored as zero: beside a first moment that is not zero it would make the update huge, while a moment
that is too large makes it small. Scales are powers of two, so values that were read are stored again without loss, and
checkpoints hold them as bfloat16: four significant bits, and eight after squaring, fit exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from moefold.optim.element_noise import NOISE_BITS

# Elements that share a scale: consecutive ones of the flattened global tensor.
BLOCK = 128
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# Below this e4m3 is subnormal, and evenly spaced.
_E4M3_MIN_EXPONENT, _E4M3_MANTISSA = -6, 3
_E4M3_TINY = 2.0**-9
# Exponents of scales: squares of stored roots are normal float32 numbers, and 448 * 2**120 is beyond float32.
_MIN_SCALE, _MAX_SCALE = -48, 120


class MomentFormat(Protocol):
    """How one moment is stored. ``stored`` is what `allocate` made, or slices of it that start with a block."""

    # In checkpoints: added to the moment's name where the values are not those of the dtype alone; and the dtype.
    @property
    def suffix(self) -> str: ...
    @property
    def saved_dtype(self) -> torch.dtype: ...

    def allocate(self, size: int, lead: int, place: HostOrDevice) -> dict[str, Tensor]:
        """Zeros for ``size`` elements, of which the first is number ``lead`` of its block."""
        ...

    def span(self, part: str, start: int, stop: int, lead: int) -> slice:
        """Where the elements from ``start`` to ``stop`` are in one of the tensors of `allocate`."""
        ...

    def read(self, stored: Mapping[str, Tensor], lead: int) -> Tensor:
        """Wide values; they may be the stored tensor itself."""
        ...

    def write(self, values: Tensor, stored: Mapping[str, Tensor], lead: int, noise: Tensor | None) -> None:
        """Round and store; stochastically with ``noise``, 16 random bits per element."""
        ...


class HostOrDevice(Protocol):
    """Makes tensors of zeros where states live."""

    def __call__(self, size: int, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True)
class Wide:
    """As computed: nothing is rounded, and the stored tensor is updated in place."""

    saved_dtype: torch.dtype
    suffix: str = ""

    def allocate(self, size: int, lead: int, place: HostOrDevice) -> dict[str, Tensor]:
        return {"": place(size, self.saved_dtype)}

    def span(self, part: str, start: int, stop: int, lead: int) -> slice:
        return slice(start, stop)

    def read(self, stored: Mapping[str, Tensor], lead: int) -> Tensor:
        return stored[""]

    def write(self, values: Tensor, stored: Mapping[str, Tensor], lead: int, noise: Tensor | None) -> None:
        if values is not stored[""]:
            stored[""].copy_(values)


@dataclass(frozen=True)
class BFloat16:
    """8 significant bits, and the exponents of float32."""

    suffix: str = ""
    saved_dtype: torch.dtype = torch.bfloat16

    def allocate(self, size: int, lead: int, place: HostOrDevice) -> dict[str, Tensor]:
        return {"": place(size, torch.bfloat16)}

    def span(self, part: str, start: int, stop: int, lead: int) -> slice:
        return slice(start, stop)

    def read(self, stored: Mapping[str, Tensor], lead: int) -> Tensor:
        return stored[""].float()

    def write(self, values: Tensor, stored: Mapping[str, Tensor], lead: int, noise: Tensor | None) -> None:
        stored[""].copy_(values if noise is None else stochastic_bfloat16(values, noise))


@dataclass(frozen=True)
class Float8:
    """e4m3 with a power of two per block; ``root``: of the square root of what is stored."""

    root: bool
    suffix: str = "_float8"
    saved_dtype: torch.dtype = torch.bfloat16

    def allocate(self, size: int, lead: int, place: HostOrDevice) -> dict[str, Tensor]:
        return {"": place(size, E4M3), "_scale": place(-(-(lead + size) // BLOCK), torch.int8)}

    def span(self, part: str, start: int, stop: int, lead: int) -> slice:
        return slice((lead + start) // BLOCK, -(-(lead + stop) // BLOCK)) if part else slice(start, stop)

    def read(self, stored: Mapping[str, Tensor], lead: int) -> Tensor:
        size = stored[""].numel()
        blocks = _blocks(stored[""].float(), lead) * _power_of_two(stored["_scale"])[:, None]
        values = blocks.view(-1)[lead : lead + size]
        return values * values if self.root else values

    def write(self, values: Tensor, stored: Mapping[str, Tensor], lead: int, noise: Tensor | None) -> None:
        blocks = _blocks(values.sqrt() if self.root else values, lead)
        exponents = block_exponents(blocks)
        stored["_scale"].copy_(exponents)
        scaled = (blocks * _power_of_two(-exponents)[:, None]).view(-1)[lead : lead + values.numel()]
        if noise is not None:
            scaled = stochastic_e4m3(scaled, noise, squared=self.root)
        if self.root:
            scaled = torch.where(values > 0, scaled.clamp(min=_E4M3_TINY), scaled)
        stored[""].copy_(scaled)


def moment_formats(name: str) -> tuple[MomentFormat, MomentFormat]:
    """Of the first and of the second moment, for a name of `precision.moments`."""
    return FORMATS[name]


FORMATS: dict[str, tuple[MomentFormat, MomentFormat]] = {
    "float64": (Wide(torch.float64), Wide(torch.float64)),
    "float32": (Wide(torch.float32), Wide(torch.float32)),
    "bfloat16": (BFloat16(), BFloat16()),
    "float8": (Float8(root=False), Float8(root=True)),
}


def stochastic_bfloat16(values: Tensor, noise: Tensor) -> Tensor:
    """float32 values that bfloat16 has: random low bits are added to the bit pattern, and then cut off."""
    bits = values.view(torch.int32) + noise
    return bits.bitwise_and_(-(1 << NOISE_BITS)).view(torch.float32)


def stochastic_e4m3(values: Tensor, noise: Tensor, squared: bool = False) -> Tensor:
    """float32 values that e4m3 has, from values of at most 448 in size; ``squared``: right on average after squaring.

    Roots that are right on average have squares that are too large by the variance of rounding, and a second moment
    collects that over its 1 / (1 - beta2) steps.
    """
    exponents = (values.view(torch.int32) >> 23).bitwise_and_(255).clamp_(min=127 + _E4M3_MIN_EXPONENT)
    unit = (exponents - _E4M3_MANTISSA).bitwise_left_shift_(23).view(torch.float32)
    # Division by a power of two is exact. `floor` rounds down for either sign, and the noise is the chance of the next.
    exact = values / unit
    if squared:
        # Between n and n + 1: (x**2 - n**2) / ((n + 1)**2 - n**2) instead of x - n.
        below = exact.floor()
        exact = below + (exact - below) * (exact + below) / (2 * below + 1)
    return exact.add_(noise, alpha=2.0**-NOISE_BITS).floor_().mul_(unit)


def block_exponents(blocks: Tensor) -> Tensor:
    """By block the smallest e such that all elements are at most 448 * 2**e in size, as int8."""
    _, exponents = torch.frexp(blocks.abs().amax(1) / E4M3_MAX)
    # frexp: x = f * 2**e with 0.5 <= f < 1, so 2**e is enough, and 2**(e - 1) is where x is a power of two.
    exponents = torch.where(_power_of_two(exponents - 1) * E4M3_MAX >= blocks.abs().amax(1), exponents - 1, exponents)
    return exponents.clamp_(_MIN_SCALE, _MAX_SCALE).to(torch.int8)


def _power_of_two(exponents: Tensor) -> Tensor:
    """From the bits of float32."""
    return (exponents.to(torch.int32).clamp_(-126, 127) + 127).bitwise_left_shift_(23).view(torch.float32)


def _blocks(values: Tensor, lead: int) -> Tensor:
    """[blocks, 128]; zeros before the first and after the last element, where blocks are not full. May be a view."""
    behind = -(lead + values.numel()) % BLOCK
    return (pad(values, (lead, behind)) if lead or behind else values).view(-1, BLOCK)
