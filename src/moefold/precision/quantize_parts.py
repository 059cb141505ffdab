"""Narrow a part of a matrix as the whole matrix would be narrowed, to the bit.

Data-parallel ranks hold parts of a weight that end anywhere, also inside of a block. The scale of a block follows from
its largest magnitude, so ranks that share a block need the largest of theirs:

    merge_amax         the largest magnitudes of this part, in a buffer with a number for every block of the matrix
    (maximum over the ranks)
    scales_of          scales of all blocks, the same on every rank: they need not be sent
    codes_of           this part's codes under them

A block with infinities or NaN has the magnitude infinity until then: a maximum over ranks may lose a NaN, depending on
the library that computes it.

Shapes: a part is a box, a slice per dim of a matrix or of a stack of matrices; M rows, K columns of the part; r and c
the blocks of the whole matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.config.casts import Cast
from moefold.precision.quantize import block_scales, to_codes

Box = tuple[slice, ...]


def merge_amax(amax_rc: Tensor, x_MK: Tensor, box: Box, cast: Cast) -> None:
    """In place: blocks that the part touches have at least its magnitudes."""
    if not x_MK.numel():
        return
    x_MK = x_MK.float()
    magnitude_MK = torch.where(torch.isfinite(x_MK), x_MK.abs(), torch.inf)
    touched = amax_rc[touched_blocks(box, cast)]
    touched.copy_(torch.maximum(touched, _blocks(magnitude_MK, box, cast).amax((-3, -1))))


def scales_of(amax_rc: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    """As stored with the codes, and to multiply values by."""
    scale_rc, encode_rc, _ = block_scales(torch.where(torch.isinf(amax_rc), torch.nan, amax_rc), cast, None)
    return scale_rc, encode_rc


def codes_of(x_MK: Tensor, box: Box, encode_rc: Tensor, cast: Cast) -> Tensor:
    x_MK = x_MK.float()
    x_MK = torch.where(torch.isfinite(x_MK), x_MK, torch.nan)
    encode = encode_rc[touched_blocks(box, cast)]
    scaled = (_blocks(x_MK, box, cast) * encode[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    top, left = _corner(box, cast)
    return to_codes(scaled[..., top : top + x_MK.shape[-2], left : left + x_MK.shape[-1]], cast.element)


def touched_blocks(box: Box, cast: Cast) -> Box:
    """The blocks of which the part has elements, as a box of the scales."""
    *stack, rows, columns = box
    if cast.block is None:
        return (*stack, slice(0, 1), slice(0, 1))
    inner = zip((rows, columns), cast.block, strict=True)
    return (*stack, *(slice(part.start // size, -(-part.stop // size)) for part, size in inner))


def _corner(box: Box, cast: Cast) -> tuple[int, int]:
    """Where the part starts inside of the first block that it touches."""
    if cast.block is None:
        return 0, 0
    return box[-2].start % cast.block[0], box[-1].start % cast.block[1]


def _blocks(x_MK: Tensor, box: Box, cast: Cast) -> Tensor:
    """[..., blocks, rows, blocks, columns]: touched blocks, with zeros for what the part does not have of them."""
    m, k = x_MK.shape[-2:]
    rows, columns = cast.block or (m, k)
    top, left = _corner(box, cast)
    x_MK = F.pad(x_MK, (left, -(left + k) % columns, top, -(top + m) % rows))
    shape = (x_MK.shape[-2] // rows, rows, x_MK.shape[-1] // columns, columns)
    return x_MK.reshape(*x_MK.shape[:-2], *shape)
