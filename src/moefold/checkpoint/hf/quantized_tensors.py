"""Weights that were published in 8 or 4 bits, read as the numbers that they stand for.

    fp8 (DeepSeek-V3, MiniMax-M2)   NAME in float8_e4m3, [out, in], and NAME_scale_inv, one number for each block of
                                    128 x 128: weight = code * scale. Blocks at the edges may be smaller.
    mxfp4 (gpt-oss)                 NAME_blocks, bytes, [.., out, in / 32, 16], and NAME_scales, [.., out, in / 32]: a
                                    byte holds two codes, the lower half first, and a scale is the exponent of 32 codes:
                                    weight = value(code) * 2 ** (scale - 127). NAME itself would be [.., in, out].

Which format a directory has stands in `quantization_config` of config.json; any other is refused. Two stored tensors
then appear as one tensor of the name and shape that the family's rules expect, and are treated as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moefold.checkpoint.hf.untrusted_files import WEIGHT_DTYPES, HeaderEntry
from moefold.errors import ConversionError, Problem

KEY = "quantization_config"
_FIX = "load them in transformers, `dequantize`, save as bfloat16, and convert that"
# Values of the 16 codes of float4_e2m1: a sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES_PER_SCALE = 32


@dataclass(frozen=True)
class Quantization:
    """`block` is the rows and columns that share a scale; mxfp4 has its own."""

    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] = (128, 128)

    def __str__(self) -> str:
        if self.method == "mxfp4":
            return f"float4_e2m1 with an exponent for {_CODES_PER_SCALE} (mxfp4)"
        return f"float8_e4m3 with a scale for {self.block[0]} x {self.block[1]} (fp8)"


def read_quantization(value: object) -> Quantization | None:
    """Of `quantization_config`; ConversionError where the weights cannot be read."""
    if value is None:
        return None
    found = value if isinstance(value, dict) else {}
    method = found.get("quant_method")
    if method == "mxfp4":
        return Quantization("mxfp4")
    block = found.get("weight_block_size")
    if method != "fp8":
        raise ConversionError(Problem(f"config.json: {KEY}", f"{str(method)[:40]!r} is not one of fp8, mxfp4", _FIX))
    if found.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ConversionError(Problem(f"config.json: {KEY}.fmt", f"{str(found['fmt'])[:40]!r} is not e4m3", _FIX))
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise ConversionError(
            Problem(f"config.json: {KEY}.weight_block_size", f"{str(block)[:40]} is not two sizes of a block", _FIX)
        )
    return Quantization("fp8", (block[0], block[1]))


@dataclass(frozen=True)
class StoredParts:
    """The two tensors that a weight is stored as."""

    codes: str
    scales: str
    quantization: Quantization

    def read(self, read: Callable[[str, tuple[int, ...]], Tensor], at: tuple[int, ...]) -> Tensor:
        """The weight in float32, or its slice with these leading indices; ``read`` reads a stored tensor."""
        codes, scales = read(self.codes, at), read(self.scales, at)
        if self.quantization.method == "fp8":
            return dequantize_blocks(codes, scales, self.quantization.block)
        return dequantize_mxfp4(codes, scales).mT


def dequantize_blocks(codes_XY: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """In float32. ``scales`` has a number for each block of rows and columns, those at the edges included."""
    rows, columns = codes_XY.shape
    by_row = scales.float().repeat_interleave(block[0], dim=0)[:rows]
    return codes_XY.float() * by_row.repeat_interleave(block[1], dim=1)[:, :columns]


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """In float32, in which every product is exact: [.., G, 16] bytes and [.., G] exponents to [.., 32 G]."""
    values = torch.tensor((*_E2M1, *(-value for value in _E2M1)), dtype=torch.float32)
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(values[codes.long()], scales.int()[..., None] - 127).flatten(-2)


def join_parts(
    found: Mapping[str, HeaderEntry], quantization: Quantization | None
) -> tuple[dict[str, HeaderEntry], dict[str, StoredParts]]:
    """The entries as if nothing were quantized, and of those weights that are, what they are stored as."""
    if quantization is None:
        return dict(found), {}
    endings = ("", "_scale_inv") if quantization.method == "fp8" else ("_blocks", "_scales")
    parts = {
        name: StoredParts(name + endings[0], name + endings[1], quantization)
        for scales in found
        if scales.endswith(endings[1]) and (name := scales.removesuffix(endings[1])) + endings[0] in found
    }
    whole = {name: HeaderEntry("F32", _shape(found, stored), 0, 0) for name, stored in parts.items()}
    stored_names = {name for stored in parts.values() for name in (stored.codes, stored.scales)}
    return {name: entry for name, entry in found.items() if name not in stored_names} | whole, parts


def _shape(found: Mapping[str, HeaderEntry], stored: StoredParts) -> tuple[int, ...]:
    """Of the weight; raises where codes and scales do not fit each other."""
    codes, scales = found[stored.codes], found[stored.scales]
    if stored.quantization.method == "fp8":
        block = stored.quantization.block
        grid = tuple(-(-size // part) for size, part in zip(codes.shape, block))
        fits = len(codes.shape) == 2 and scales.shape == grid and scales.dtype in WEIGHT_DTYPES
        if not fits or codes.dtype != "F8_E4M3":
            _refuse(stored, found, f"float8_e4m3 in blocks of {block[0]} x {block[1]} has scales of shape {grid}")
        return codes.shape
    fits = len(codes.shape) >= 3 and codes.shape[-1] == _CODES_PER_SCALE // 2 and scales.shape == codes.shape[:-1]
    if not fits or (codes.dtype, scales.dtype) != ("U8", "U8"):
        _refuse(stored, found, "bytes of shape [.., G, 16] have byte exponents of shape [.., G]")
    *outer, out, groups, _ = codes.shape
    return (*outer, groups * _CODES_PER_SCALE, out)


def _refuse(stored: StoredParts, found: Mapping[str, HeaderEntry], needs: str) -> None:
    codes, scales = found[stored.codes], found[stored.scales]
    message = f"is {codes.dtype} {codes.shape} with {scales.dtype} {scales.shape}; {needs}"
    raise ConversionError(Problem(stored.codes, message))
