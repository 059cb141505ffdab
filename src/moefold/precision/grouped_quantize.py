"""Rows of all experts through one cast in one call (grouped quantisation), and the loop over experts it must equal.

Rows are sorted by expert. No block may have rows of two experts, and where the largest magnitude of a matrix is in
every scale, each expert's rows are a matrix of their own. One call per expert would be hundreds of small ones, so all
rows are cut into a stack of equal pieces that never cross experts, and one call narrows the stack:

    along features   pieces are rows, [R, 1, X];
    along tokens     pieces are blocks of c rows, transposed, [b, X, c]: each expert begins a new one, and rows of zeros
                     fill its last one.

Magnitudes of whole matrices are found per expert before, and given to the call. The ``*_reference`` functions are the
loops. Quantizers are those of `quantize.py` or `quantize_native.py`.

Shapes: R rows, X columns, e experts, b blocks of c rows, P rows with those of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moefold.config.casts import Cast
from moefold.ops.padded_runs import aligned, move_rows
from moefold.precision.quantize import hadamard

# Rows of a piece where a cast has no blocks: any number would do.
_PIECE = 16


def along_features(
    rows_RX: Tensor, cast: Cast, segments: Sequence[int], fake_quantize: Callable[..., Tensor], seed: int = 0
) -> Tensor:
    """Values in float32 of rows that are narrowed with blocks along their columns."""
    if cast.element == "bf16" or not cast.scales_whole_matrix or len(segments) == 1:
        return fake_quantize(rows_RX, cast, seed=seed)
    pieces_R1X = rows_RX[:, None]
    amax_R = _amax_of_pieces(pieces_R1X, cast, segments)
    return fake_quantize(pieces_R1X, cast, seed=seed, amax=amax_R)[:, 0]


def along_features_reference(
    rows_RX: Tensor, cast: Cast, segments: Sequence[int], fake_quantize: Callable[..., Tensor], seed: int = 0
) -> Tensor:
    return torch.cat([fake_quantize(part, cast, seed=seed) for part in rows_RX.split(list(segments))])


def along_tokens(
    rows_RX: Tensor, cast: Cast, segments: Sequence[int], fake_quantize: Callable[..., Tensor], seed: int = 0
) -> Tensor:
    """The same with blocks along the rows of an expert."""
    if cast.element == "bf16" or len(segments) == 1:
        return fake_quantize(rows_RX.t(), cast, seed=seed).t()
    if cast.block is not None and not cast.block[1]:
        # A scale for all rows of an expert, per column: pieces would have the same one.
        return along_tokens_reference(rows_RX, cast, segments, fake_quantize, seed)
    blocks_bXc, amax_b = cut(rows_RX, cast, segments)
    values_PX = fake_quantize(blocks_bXc, cast, seed=seed, amax=amax_b).transpose(1, 2).flatten(0, 1)
    return move_rows(values_PX, whole_blocks(segments, cast), segments)


def along_tokens_reference(
    rows_RX: Tensor, cast: Cast, segments: Sequence[int], fake_quantize: Callable[..., Tensor], seed: int = 0
) -> Tensor:
    return torch.cat([fake_quantize(part.t(), cast, seed=seed).t() for part in rows_RX.split(list(segments))])


def cut(rows_RX: Tensor, cast: Cast, segments: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Blocks along tokens, and the largest magnitude of each one's expert where the cast needs it."""
    whole, size = whole_blocks(segments, cast), piece(cast)
    blocks_bXc = move_rows(rows_RX, segments, whole).unflatten(0, (sum(whole) // size, size)).transpose(1, 2)
    return blocks_bXc, _amax_of_pieces(blocks_bXc, cast, [rows // size for rows in whole])


def piece(cast: Cast) -> int:
    return _PIECE if cast.block is None else cast.block[1]


def whole_blocks(segments: Sequence[int], cast: Cast) -> list[int]:
    """Rows of each expert with those that fill its last block."""
    return aligned(segments, piece(cast))


def _amax_of_pieces(pieces: Tensor, cast: Cast, pieces_per_expert: Sequence[int]) -> Tensor | None:
    """[b]: of each piece, the largest magnitude of its expert; NaN where that has a number that is not finite."""
    if not cast.scales_whole_matrix:
        return None
    values = hadamard(pieces.float()).bfloat16().float() if cast.hadamard else pieces.float()
    largest_b = torch.where(torch.isfinite(values), values.abs(), torch.nan).flatten(1).amax(1)
    count_e = torch.tensor(list(pieces_per_expert), device=pieces.device)
    if not len(largest_b):
        return largest_b
    amax_e = torch.segment_reduce(largest_b, "max", lengths=count_e, initial=0)
    return amax_e.repeat_interleave(count_e, output_size=len(largest_b))
