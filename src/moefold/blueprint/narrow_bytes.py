"""Bytes of narrow values, derived from casts: what is saved for the backward, copied, sent and gathered.

One table says which cast a tensor is in, and every count of bytes follows from it:

    saved input of a matmul    waits for wgrad                               x_wgrad
    copies of a weight         narrowed once per step, for fprop and dgrad   w_fprop, w_dgrad
    rows sent to experts       their first matmul reads them                 x_fprop
    gathered weight            as fprop reads it                             w_fprop

``bytes_per_value`` of a cast is the share of one value, for predictions; ``cast_bytes`` counts a matrix exactly, with
partial blocks and scales of whole matrices, for ledgers and buffers.
"""

from __future__ import annotations

from dataclasses import replace

from moefold.config.casts import ELEMENT_BITS, SCALE_BYTES, Cast
from moefold.config.precision_recipes import PRECISION_RECIPES, LinearCasts, RecipeName

# Above the scales of two_level's blocks there is a float32 per matrix.
_MATRIX_SCALE = 4


def casts_of(recipe: RecipeName | None) -> LinearCasts | None:
    return None if recipe is None else PRECISION_RECIPES[recipe].casts


def value_bytes(cast: Cast | None, word: float) -> float:
    """Of one value; ``word``: as `precision.compute` has it, where nothing is narrowed."""
    return word if cast is None else cast.bytes_per_value


def cast_bytes(cast: Cast, rows: int, columns: int, matrices: int = 1) -> int:
    """Of codes and all scales of a stack of matrices; E2M1 has two codes in a byte."""
    codes = -(-rows * columns * ELEMENT_BITS[cast.element] // 8)
    if cast.scale == "none":
        return matrices * codes
    high, wide = cast.block_of(rows, columns)
    scales = -(-rows // high) * -(-columns // wide) * SCALE_BYTES[cast.scale]
    return matrices * (codes + scales + _MATRIX_SCALE * (cast.scale == "two_level"))


def saved_bytes(casts: LinearCasts | None, word: float) -> float:
    """Of one value of a linear layer's input, where it waits for wgrad in narrow form."""
    return value_bytes(None if casts is None else casts.x_wgrad, word)


def sent_bytes(casts: LinearCasts | None, word: float) -> float:
    """Of one value of a row that travels as fprop reads it."""
    return value_bytes(None if casts is None else casts.x_fprop, word)


def gathered_bytes(casts: LinearCasts | None, word: float) -> float:
    """Of one value of a weight that is gathered as fprop reads it, and narrowed before."""
    return value_bytes(None if casts is None else casts.w_fprop, word)


def serves_both(casts: LinearCasts) -> bool:
    """Whether one narrow copy of a weight is right for fprop and dgrad: the scales of its transpose are the same."""
    return casts.w_fprop == casts.w_dgrad and (casts.w_fprop is None or casts.w_fprop.is_square)


def weight_copy_bytes(casts: LinearCasts, one_order: bool) -> float:
    """Of the narrow copies of a weight, per value. ``one_order``: matmuls of the GPU read one order of elements alone,
    so a transposed copy is kept even where its values are the same."""
    copies = (casts.w_fprop, casts.w_dgrad)
    kept = copies if one_order or not serves_both(casts) else copies[:1]
    return sum(as_read(cast).bytes_per_value for cast in kept if cast is not None)


def as_read(cast: Cast) -> Cast:
    """Tensor cores read a scale of E2M1 for every row of a block, so a square block's is held once per row."""
    if cast.scale != "two_level" or cast.block is None:
        return cast
    return replace(cast, block=(1, cast.block[1]))


def matmul_bits(casts: LinearCasts | None, wide: int = 16) -> int:
    """Of the wider operands: what tensor cores run at the rate of."""
    if casts is None:
        return wide
    return max(wide if cast is None else ELEMENT_BITS[cast.element] for _, cast in casts.items())
