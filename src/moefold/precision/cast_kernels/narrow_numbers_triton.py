"""The arithmetic of `precision/quantize.py` in Triton, a tile at a time: amax, scales, codes, noise, Hadamard.

Every kernel that narrows calls these functions, so that codes and scales have the reference's bits wherever values come
from. Three things keep the bits:

- Magnitudes are compared as integers. Bits of positive floats are ordered like the numbers, with NaN above all, so that
  a maximum needs no rule for NaN. Infinities are made NaN first.
- Quotients are ``div_rn``: Triton's ``/`` is an approximation on GPUs.
- A product that a compiler may fuse with a sum is with a power of two, and so exact either way.

E2M1 codes are found by comparing with the seven borders between its numbers: hardware has an instruction for this from
Blackwell on only, and no interpreter runs it.

ELEMENT and RULE are names of `config/casts.py`. A block has ROWS x COLUMNS values; ROWS 0: the whole matrix is one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moefold.ops.splitmix64 import wrapped
from moefold.precision.quantize import HADAMARD_SIGNS

# Functions of other kernels, none of its own.
BUILDS = ()

_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
# Bit i: the sign of the i-th of 16 values is -1.
_MINUS = tl.constexpr(sum(1 << place for place, sign in enumerate(HADAMARD_SIGNS) if sign < 0))
_NOISE_FACTOR = tl.constexpr(wrapped(0x9E3779B97F4A7C15))
_PLACE_FACTOR = tl.constexpr(wrapped(0xD1B54A32D192ED03))
_FIRST_FACTOR = tl.constexpr(wrapped(0xBF58476D1CE4E5B9))
_SECOND_FACTOR = tl.constexpr(wrapped(0x94D049BB133111EB))


# ---- amax ----


@triton.jit
def magnitude_bits(x):
    """Of |x| in float32; infinities are NaN."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits >= _INFINITY, _NAN, bits)


@triton.jit
def block_bits(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The amax of every block of a tile, as bits: [r, c]."""
    bits = magnitude_bits(x)
    bits = tl.max(tl.reshape(bits, (x.shape[0], x.shape[1] // COLUMNS, COLUMNS)), axis=2)
    if ROWS > 1:
        bits = tl.max(tl.reshape(bits, (x.shape[0] // ROWS, ROWS, x.shape[1] // COLUMNS)), axis=1)
    return bits


@triton.jit
def spread_over_block(scale, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[r, c] as a tile of the shape of x."""
    if ROWS > 1:
        scale = tl.broadcast_to(scale[:, None, :], (x.shape[0] // ROWS, ROWS, x.shape[1] // COLUMNS))
        scale = tl.reshape(scale, (x.shape[0], x.shape[1] // COLUMNS))
    scale = tl.broadcast_to(scale[:, :, None], (x.shape[0], x.shape[1] // COLUMNS, COLUMNS))
    return tl.reshape(scale, (x.shape[0], x.shape[1]))


# ---- scales ----


@triton.jit
def _top(ELEMENT: tl.constexpr):
    """Its largest number."""
    top: tl.constexpr = 448.0 if ELEMENT == "e4m3" else (57344.0 if ELEMENT == "e5m2" else 6.0)
    return top


@triton.jit
def _at_most(x, top):
    """NaN stays."""
    return tl.where(x > top, top, x)


@triton.jit
def _quotient(number: tl.constexpr, x):
    return tl.div_rn(tl.full(x.shape, number, tl.float32), x)


@triton.jit
def e8m0_to_float(exponent):
    """2**(exponent - 127): 0 is the subnormal 2**-127, 255 is NaN."""
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return tl.where(exponent == 255, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def _e8m0(bits, ELEMENT: tl.constexpr, RULE: tl.constexpr):
    """The biased exponent of the scale, as int32; 255 is NaN."""
    if RULE == "e8m0_rceil":
        quotient = bits.to(tl.float32, bitcast=True) * (1.0 / _top(ELEMENT))
        found = quotient.to(tl.int32, bitcast=True)
        exponent, fraction = (found >> 23) & 0xFF, found & 0x7FFFFF
        exponent += tl.where(exponent == 0, fraction > 0x400000, fraction != 0).to(tl.int32)
    else:
        highest: tl.constexpr = 8 if ELEMENT == "e4m3" else (15 if ELEMENT == "e5m2" else 2)
        exponent = tl.maximum(((bits >> 23) & 0xFF) - highest, 0)
    return tl.where(bits >= _INFINITY, 255, exponent)


@triton.jit
def tensor_scales(tensor_amax):
    """Of two_level casts: by what values of the whole matrix are multiplied, and its inverse, which is stored."""
    encode = _at_most(_quotient(2688.0, tensor_amax), _FLOAT32_MAX)
    encode = tl.where((tensor_amax == 0) | (encode == 0), 1.0, encode)
    return encode, _quotient(1.0, encode)


@triton.jit
def scales_of(bits, tensor_amax, ELEMENT: tl.constexpr, RULE: tl.constexpr):
    """From amax: the scale as stored, by what values are multiplied, and by what codes are."""
    if RULE == "float32" or RULE == "power_of_two":
        amax = bits.to(tl.float32, bitcast=True)
        encode = _at_most(_quotient(_top(ELEMENT), amax), _FLOAT32_MAX)
        if RULE == "power_of_two":
            cut = (encode.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
            encode = tl.where(encode != encode, encode, cut)
        encode = tl.where(bits == 0, 1.0, encode)
        decode = _quotient(1.0, encode)
        stored = decode
    elif RULE == "two_level":
        whole, inverse = tensor_scales(tensor_amax)
        sixth = _quotient(1.0, tl.full(whole.shape, 6.0, tl.float32))
        stored = _at_most(bits.to(tl.float32, bitcast=True) * (whole * sixth), 448.0).to(tl.float8e4nv)
        decode = stored.to(tl.float32) * inverse
        encode = _at_most(_quotient(1.0, decode), _FLOAT32_MAX)
    else:
        stored = _e8m0(bits, ELEMENT, RULE)
        decode = e8m0_to_float(stored)
        encode = e8m0_to_float(tl.where(stored == 255, 255, 254 - stored))
    return stored, encode, decode


# ---- codes ----


@triton.jit
def to_codes(scaled, ELEMENT: tl.constexpr):
    """Nearest, ties to even; too large values saturate. E2M1: one code per uint8, 0 for NaN."""
    top: tl.constexpr = _top(ELEMENT)
    scaled = tl.where(scaled < -top, -top, _at_most(scaled, top))
    if ELEMENT == "e4m3":
        codes = scaled.to(tl.float8e4nv)
    elif ELEMENT == "e5m2":
        codes = scaled.to(tl.float8e5)
    else:
        # Of the two numbers beside a border, the one with an even code has the border itself.
        size = tl.abs(scaled)
        code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
        code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
        code += (size > 5.0).to(tl.int32)
        code += (scaled.to(tl.int32, bitcast=True) < 0).to(tl.int32) * 8
        codes = tl.where(scaled != scaled, 0, code).to(tl.uint8)
    return codes


@triton.jit
def from_codes(codes, ELEMENT: tl.constexpr):
    if ELEMENT == "e2m1":
        number = (codes & 7).to(tl.float32)
        size = tl.where(number < 5, number * 0.5, tl.where(number == 7, 6.0, number - 2.0))
        values = tl.where((codes & 8) != 0, -size, size)
    else:
        values = codes.to(tl.float32)
    return values


@triton.jit
def round_stochastically(scaled, noise, ELEMENT: tl.constexpr):
    """Up with the probability of the distance from below, to a number of the format."""
    fraction_bits: tl.constexpr = 3 if ELEMENT == "e4m3" else (2 if ELEMENT == "e5m2" else 1)
    smallest: tl.constexpr = -6 if ELEMENT == "e4m3" else (-14 if ELEMENT == "e5m2" else 0)
    size = _at_most(tl.abs(scaled), _top(ELEMENT))
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, smallest) - fraction_bits
    spacing = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    rounded = tl.floor(size * inverse + noise) * spacing
    sign = scaled.to(tl.int32, bitcast=True) & -0x80000000
    rounded = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(scaled != scaled, scaled, rounded)


@triton.jit
def block_noise(x, amax, seed, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """In [0, 1), of the shape of x: a hash of the seed, the block's values in bfloat16 and the element's place."""
    row, column = tl.arange(0, x.shape[0]) % ROWS, tl.arange(0, x.shape[1]) % COLUMNS
    place = (row[:, None] * COLUMNS + column[None, :] + 1).to(tl.int64)
    bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    counts = (x != 0) & (tl.abs(x) >= amax * 2.3283064365386963e-10) & ((bits & 0x7F80) < 0x7F80)
    words = tl.where(counts, _mix64(bits + place * _PLACE_FACTOR), 0)
    content = tl.sum(tl.reshape(words, (x.shape[0], x.shape[1] // COLUMNS, COLUMNS)), axis=2)
    if ROWS > 1:
        content = tl.sum(tl.reshape(content, (x.shape[0] // ROWS, ROWS, x.shape[1] // COLUMNS)), axis=1)
    content = spread_over_block(content + seed, x, ROWS, COLUMNS)
    return _shifted(_mix64(content + place * _NOISE_FACTOR), 40).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _mix64(word):
    """splitmix64's finaliser, as `ops/splitmix64.py` has it."""
    word = (word ^ _shifted(word, 30)) * _FIRST_FACTOR
    word = (word ^ _shifted(word, 27)) * _SECOND_FACTOR
    return word ^ _shifted(word, 31)


@triton.jit
def _shifted(word, BY: tl.constexpr):
    """To the right, filled with zeros."""
    return (word.to(tl.uint64, bitcast=True) >> BY).to(tl.int64, bitcast=True)


# ---- the transform ----


@triton.jit
def hadamard(x):
    """Groups of 16 along the last dim, rounded to bfloat16; sums in the order of the reference."""
    M: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    minus = (tl.full((K,), _MINUS, tl.int32) >> (tl.arange(0, K) % 16)) & 1
    x = tl.where(minus[None, :] != 0, -x, x)
    x = _butterfly(x, 1)
    x = _butterfly(x, 2)
    x = _butterfly(x, 4)
    x = _butterfly(x, 8)
    return (tl.reshape(x, (M, K)) * 0.25).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _butterfly(x, DISTANCE: tl.constexpr):
    """Sums and differences of values that are DISTANCE apart."""
    M: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    pairs = tl.reshape(x, (M, K // (2 * DISTANCE), 2, DISTANCE))
    low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    pairs = tl.join(low + high, low - high)
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (M, K))


# ---- a whole tile ----


@triton.jit
def finite_or_nan(x):
    return tl.where((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= _INFINITY, float("nan"), x)


@triton.jit
def cast_tile(
    x, tensor_amax, seed,
    ELEMENT: tl.constexpr, RULE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Codes of a tile of whole blocks, scales as stored, and codes' values; ``x`` is float32, transformed already."""
    x = finite_or_nan(x)
    if ROWS == 0:
        bits = tensor_amax.to(tl.int32, bitcast=True)
        stored, encode, decode = scales_of(bits, tensor_amax, ELEMENT, RULE)
        scaled = x * encode
    else:
        bits = block_bits(x, ROWS, COLUMNS)
        stored, encode, decode = scales_of(bits, tensor_amax, ELEMENT, RULE)
        scaled = x * spread_over_block(encode, x, ROWS, COLUMNS)
        decode = spread_over_block(decode, x, ROWS, COLUMNS)
    if STOCHASTIC:
        amax = spread_over_block(block_bits(x, ROWS, COLUMNS).to(tl.float32, bitcast=True), x, ROWS, COLUMNS)
        scaled = round_stochastically(scaled, block_noise(x, amax, seed, ROWS, COLUMNS), ELEMENT)
    codes = to_codes(scaled, ELEMENT)
    return codes, stored, from_codes(codes, ELEMENT) * decode
