"""QK-clip (MuonClip, Kimi K2): weights of heads whose largest logit exceeds a bound are scaled back after the update.

With tau the bound (`optim.qk_clip`) and s the largest logit of a head in the step's forwards, over all tokens,
microbatches and ranks,

    gamma = tau / s  where s > tau, else 1

and the head's logits are multiplied by gamma through its projections, each by the power of gamma that the table
``EXPONENTS`` names. A logit is a product of a query and a key, so the two powers add up to 1:

    GQA    queries and keys 1/2 each. Query heads that share a key are scaled together, by the largest logit of them.
    MLA    the unrotated parts of query and key 1/2 each; the rotated part of the query 1, because all heads share the
           rotated key, which stays as it is. Values stay.

Only heads over the bound change, and only then. A largest logit of 0 or less, or none, gives gamma 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from moefold.blueprint.model_shape import Attention
from moefold.blueprint.muon_matrices import spans_of
from moefold.optim.chunked_adamw import local_of
from moefold.optim.muon_exchange import box_views
from moefold.optim.trained_pieces import Piece

# Consecutive rows of each head's block, and the exponent of gamma for them.
Exponents = tuple[tuple[int, float], ...]


def exponents(name: str, attention: Attention) -> Exponents | None:
    """Of the rows of one head; None for parameters that QK-clip leaves alone."""
    nope = attention.qk_dim - attention.rope_dim
    gate = (attention.qk_dim * attention.output_gate, 0.0)
    query, key = ((nope, 0.5), (attention.rope_dim, 1.0), gate), ((nope, 0.5),)
    table: dict[str, Exponents] = {
        "*.attention.q.weight": query,
        "*.attention.q.bias": query,
        "*.attention.q_up.weight": query,
        "*.attention.k.weight": key,
        "*.attention.k.bias": key,
        "*.attention.kv_up.weight": (*key, (attention.v_dim, 0.0)),
    }
    return next((rows for pattern, rows in table.items() if fnmatchcase(name, pattern)), None)


def gammas(max_LH: Tensor, bound: float, attention: Attention) -> Tensor:
    """[L, J]: by block and key/value head."""
    max_LJ = max_LH.unflatten(1, (attention.kv_heads, -1)).amax(-1)
    return torch.where(max_LJ > bound, bound / max_LJ, 1.0)


@torch.no_grad()
def clip_heads(pieces: Iterable[Piece], gamma_of_block: dict[str, Tensor], attention: Attention) -> None:
    """Scale this rank's pieces in place; ``gamma_of_block`` is [J] by name of the block, such as "layers.3"."""
    for piece in pieces:
        rows = exponents(piece.name, attention)
        if rows is None:
            continue
        block, _, _ = piece.name.partition(".attention.")
        factor_R = row_factors(gamma_of_block[block], rows, piece.shard.shape[0])
        boxes = [spans_of(box) for box in piece.boxes]
        for view, ((start, stop), *_) in zip(box_views(local_of(piece.parameter), boxes), boxes, strict=True):
            factor = factor_R[start:stop].to(view.dtype)
            view.mul_(factor.view(-1, *[1] * (view.dim() - 1)))


def row_factors(gamma_J: Tensor, rows: Exponents, num_rows: int) -> Tensor:
    """[R]: of every row of the whole parameter; several query heads may share an entry of ``gamma_J``."""
    powers = torch.cat([gamma_J.new_full((count,), exponent) for count, exponent in rows])
    heads = num_rows // len(powers)
    gamma_H = gamma_J.repeat_interleave(heads // len(gamma_J))
    return gamma_H[:, None].pow(powers).flatten()
