"""Narrow formats in plain torch: what a value becomes, bit for bit. The reference of every kernel that narrows.

A matrix is cut into blocks; the largest magnitude of a block, its amax, decides the scale by which codes are multiplied
to get values back (``decode``), and its inverse (``encode``). Last blocks may be partial. Leading dims are a stack of
matrices, each narrowed by itself.

All arithmetic is in float32 and elementwise, or a maximum, so the result does not depend on how torch orders sums.

Infinities and NaN have one rule for all casts: **a block that holds one becomes NaN as a whole**, by a scale that is
NaN (a two_level cast: the whole matrix, by the scale of the matrix); where the scale does not come from the block (one
that is given, or delayed) the value alone becomes NaN. Libraries differ here: some saturate, which hides an overflow
behind a large finite number.

Shapes: M rows, K columns, r and c their numbers of blocks; leading dims are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.config.casts import Cast, Element, ScaleRule
from moefold.ops.splitmix64 import logical_shift, mix64, wrapped

TOP: Final[dict[Element, float]] = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
_TOP_EXPONENT: Final[dict[Element, int]] = {"e4m3": 8, "e5m2": 15, "e2m1": 2}
_FRACTION_BITS: Final[dict[Element, int]] = {"e4m3": 3, "e5m2": 2, "e2m1": 1}
_SMALLEST_EXPONENT: Final[dict[Element, int]] = {"e4m3": -6, "e5m2": -14, "e2m1": 0}
# Of stored scales; E8M0 exponents are bytes.
SCALE_DTYPES: Final[dict[ScaleRule, torch.dtype]] = {
    "float32": torch.float32,
    "power_of_two": torch.float32,
    "e8m0_rceil": torch.uint8,
    "e8m0_floor": torch.uint8,
    "two_level": torch.float8_e4m3fn,
}
FLOAT8: Final = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_FLOAT32_MAX = torch.finfo(torch.float32).max
# Positive E2M1 numbers by code; bit 3 is the sign.
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Transformer Engine's fixed signs of the transform (its `get_wgrad_sign_vector`), as data that both operands share.
HADAMARD_SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@dataclass(frozen=True)
class Quantized:
    """``codes`` are float8, or uint8 with one E2M1 code each (``pack_e2m1`` puts two into a byte). ``scale`` has one
    entry per block: float32, an E8M0 exponent in uint8, or float8_e4m3fn under ``tensor_scale``."""

    codes_MK: Tensor
    scale_rc: Tensor
    # two_level: by what a block's scale is multiplied, one per matrix of the stack.
    tensor_scale: Tensor | None
    cast: Cast


def quantize(x_MK: Tensor, cast: Cast, *, seed: int = 0, amax: Tensor | None = None) -> Quantized:
    """``seed`` is of stochastic rounding's noise. ``amax`` replaces the matrix's own (delayed scaling, or a matrix of
    which this is a shard); it has the shape of the leading dims."""
    x_MK = hadamard(x_MK.float()).bfloat16().float() if cast.hadamard else x_MK.float()
    x_MK = torch.where(torch.isfinite(x_MK), x_MK, torch.nan)
    blocks = _blocks(x_MK, cast)
    # A maximum over values with a NaN is NaN.
    amax_rc = blocks.abs().amax((-3, -1)) if x_MK.numel() else blocks.new_zeros(*blocks.shape[:-3], blocks.shape[-2])
    if cast.block is None and amax is not None:
        amax_rc = amax.float()[..., None, None]
    tensor_amax = None
    if cast.scale == "two_level":
        own = amax_rc.flatten(-2)
        tensor_amax = amax.float() if amax is not None else own.amax(-1) if own.shape[-1] else own.sum(-1)
    scale_rc, encode_rc, tensor_scale = block_scales(amax_rc, cast, tensor_amax)
    scaled = blocks * encode_rc[..., :, None, :, None]
    if cast.rounding == "stochastic":
        scaled = round_stochastically(scaled, cast.element, block_noise(blocks, seed))
    scaled = scaled.flatten(-2).flatten(-3, -2)[..., : x_MK.shape[-2], : x_MK.shape[-1]]
    return Quantized(to_codes(scaled, cast.element), scale_rc, tensor_scale, cast)


def dequantize(quantized: Quantized) -> Tensor:
    """In float32. A Hadamard transform stays in: in a matmul of two transformed operands it cancels."""
    cast, decode_rc = quantized.cast, decode_scales(quantized)
    blocks = _blocks(from_codes(quantized.codes_MK, cast.element), cast)
    values = (blocks * decode_rc[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    return values[..., : quantized.codes_MK.shape[-2], : quantized.codes_MK.shape[-1]]


def decode_scales(quantized: Quantized) -> Tensor:
    """By what codes are multiplied, per block, in float32."""
    scale_rc = quantized.scale_rc
    if scale_rc.dtype == torch.uint8:
        return e8m0_to_float(scale_rc)
    if quantized.tensor_scale is None:
        return scale_rc
    return scale_rc.float() * quantized.tensor_scale[..., None, None]


def fake_quantize(x_MK: Tensor, cast: Cast, *, seed: int = 0, amax: Tensor | None = None) -> Tensor:
    """To the format and back, in float32: what a matmul computes with."""
    if cast.element == "bf16":
        return x_MK.bfloat16().float()
    return dequantize(quantize(x_MK, cast, seed=seed, amax=amax))


def _blocks(x_MK: Tensor, cast: Cast) -> Tensor:
    """[..., r, rows, c, columns], the last blocks filled with zeros."""
    m, k = x_MK.shape[-2:]
    rows, columns = cast.block_of(m, k)
    x_MK = F.pad(x_MK, (0, -k % columns, 0, -m % rows))
    shape = (x_MK.shape[-2] // rows, rows, x_MK.shape[-1] // columns, columns)
    return x_MK.reshape(*x_MK.shape[:-2], *shape)


def block_scales(amax_rc: Tensor, cast: Cast, tensor_amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As stored; to multiply values by; and the scale of the matrix."""
    if cast.scale in ("float32", "power_of_two"):
        encode = _divide(TOP[cast.element], amax_rc).clamp(max=_FLOAT32_MAX)
        if cast.scale == "power_of_two":
            encode = torch.where(torch.isnan(encode), encode, _cut_to_power_of_two(encode))
        encode = torch.where(amax_rc == 0, 1.0, encode)
        return 1.0 / encode, encode, None
    if cast.scale in ("e8m0_rceil", "e8m0_floor"):
        exponent = _e8m0(amax_rc, cast)
        encode = e8m0_to_float(torch.where(exponent == 255, 255, 254 - exponent.int()))
        return exponent, encode, None
    assert tensor_amax is not None
    # S = 448 * 6 / amax; a block's scale is amax_b * S / 6 with one rounding, and may be zero.
    whole = _divide(TOP["e4m3"] * TOP["e2m1"], tensor_amax).clamp(max=_FLOAT32_MAX)
    whole = torch.where((tensor_amax == 0) | (whole == 0), 1.0, whole)
    inverse = 1.0 / whole
    sixth = 1.0 / torch.tensor(6.0)
    block = (amax_rc * (whole * sixth)[..., None, None]).clamp(max=TOP["e4m3"]).to(torch.float8_e4m3fn)
    decode = block.float() * inverse[..., None, None]
    return block, (1.0 / decode).clamp(max=_FLOAT32_MAX), inverse


def _divide(number: float, x: Tensor) -> Tensor:
    """Rounded once: ``number / x`` in torch is the reciprocal of x times the number."""
    return torch.full_like(x, number) / x


def _cut_to_power_of_two(x: Tensor) -> Tensor:
    """Rounded down; x is positive. A subnormal becomes 0, as the fraction's bits are its whole value."""
    return (x.view(torch.int32) & -0x800000).view(torch.float32)


def _e8m0(amax_rc: Tensor, cast: Cast) -> Tensor:
    """The biased exponent of the scale; 255 is NaN."""
    if cast.scale == "e8m0_rceil":
        bits = (amax_rc * (1.0 / TOP[cast.element])).view(torch.int32)
        exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
        # A subnormal has exponent 0, which as E8M0 is 2**-127, half way through the subnormals.
        exponent = exponent + torch.where(exponent == 0, fraction > 0x400000, fraction != 0).int()
    else:
        exponent = (((amax_rc.view(torch.int32) >> 23) & 0xFF) - _TOP_EXPONENT[cast.element]).clamp(min=0)
    return torch.where(torch.isnan(amax_rc), 255, exponent).to(torch.uint8)


def e8m0_to_float(exponent: Tensor) -> Tensor:
    """2**(exponent - 127): 0 is the subnormal 2**-127, 255 is NaN."""
    wide = exponent.int()
    value = torch.where(wide == 0, 0x00400000, wide << 23).view(torch.float32)
    return torch.where(wide == 255, torch.nan, value)


def to_codes(scaled_MK: Tensor, element: Element) -> Tensor:
    """Nearest, ties to even; too large values saturate, NaN stays NaN (E2M1 has none: 0)."""
    scaled_MK = scaled_MK.clamp(-TOP[element], TOP[element])
    if element != "e2m1":
        return scaled_MK.to(FLOAT8[element])
    magnitude = scaled_MK.abs()
    # Spacing 0.5 below 2, 1 below 4, 2 above; the first code of each part is even, so ties to even codes are ties to
    # even multiples.
    first = torch.where(magnitude < 2, 0, torch.where(magnitude < 4, 2, 4))
    code = first + torch.round(magnitude / _e2m1_spacing(magnitude)) + 8 * torch.signbit(scaled_MK)
    return torch.where(torch.isnan(code), 0.0, code).to(torch.uint8)


def from_codes(codes_MK: Tensor, element: Element) -> Tensor:
    if element != "e2m1":
        return codes_MK.float()
    numbers = torch.tensor((*_E2M1, *(-number for number in _E2M1)), device=codes_MK.device)
    return numbers[codes_MK.int()]


def _e2m1_spacing(magnitude: Tensor) -> Tensor:
    return torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))


def round_stochastically(scaled: Tensor, element: Element, noise: Tensor) -> Tensor:
    """Up with the probability of the distance from below, to a number of the format: unbiased inside of its range."""
    magnitude = scaled.abs().clamp(max=TOP[element])
    # The exponent of the spacing: that of the number, or of the smallest normal number, less the fraction's bits.
    exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp(min=_SMALLEST_EXPONENT[element])
    spacing = ((exponent - _FRACTION_BITS[element] + 127) << 23).view(torch.float32)
    rounded = torch.floor(magnitude / spacing + noise) * spacing
    return torch.copysign(rounded, scaled)


def block_noise(blocks: Tensor, seed: int) -> Tensor:
    """In [0, 1), multiples of 2**-24: a hash of the seed, of the values of the element's block and of its place there.

    [..., r, rows, c, columns]. What an element is rounded by depends on nothing outside of its block: ranks that hold a
    shard, or rows in another order, round it alike, and so does recomputation, without numbers of rows that would have
    to travel with them. Values count in bfloat16, so that sums in another order leave the noise as it is. Those below
    2**-32 of the largest count for nothing: padding, and what is zero but for the rounding of a sum. Two equal blocks
    are rounded alike.
    """
    rows, columns = blocks.shape[-3], blocks.shape[-1]
    place = torch.arange(1, rows * columns + 1, device=blocks.device).view(rows, 1, columns)
    bits = blocks.bfloat16().view(torch.int16).long() & 0xFFFF
    amax = blocks.abs().amax((-3, -1), keepdim=True) if blocks.numel() else blocks
    counts = (blocks != 0) & (blocks.abs() >= amax * 2.0**-32) & ((bits & 0x7F80) < 0x7F80)
    words = torch.where(counts, mix64(bits + place * wrapped(0xD1B54A32D192ED03)), 0)
    content = words.sum((-3, -1), keepdim=True) + wrapped(seed)
    return logical_shift(mix64(content + place * wrapped(0x9E3779B97F4A7C15)), 40).float() * 2.0**-24


def pack_e2m1(codes_MK: Tensor) -> Tensor:
    """Two codes a byte, the even column in the low half."""
    return codes_MK[..., ::2] | (codes_MK[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def hadamard(x_MK: Tensor) -> Tensor:
    """Groups of 16 along the last dim times an orthogonal matrix of signs / 4.

    By additions in four rounds, in one order on every device: a matmul would sum in the order of its library.
    """
    x = x_MK.unflatten(-1, (-1, 16)) * torch.tensor(HADAMARD_SIGNS, dtype=torch.float32, device=x_MK.device)
    for distance in (1, 2, 4, 8):
        pairs = x.unflatten(-1, (-1, 2, distance))
        low, high = pairs.unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
    return (x * 0.25).flatten(-2)


def swizzle_scales(scale_rc: Tensor) -> Tensor:
    """In the order in which tensor cores read them: padded to 128 x 4 with zeros, 32 x 16 bytes per such tile."""
    rows, columns = scale_rc.shape
    padded = F.pad(scale_rc, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4))
    return tiles.permute(0, 3, 2, 1, 4).flatten()
