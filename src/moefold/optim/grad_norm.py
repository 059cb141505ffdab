"""One norm over all gradients, wherever their parts lie.

Each rank adds up the squares of the parts it speaks for: of a part that several ranks repeat, exactly one speaks. One
sum over all ranks then counts every element of the model once, across grids, stages and shards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.process_groups import Group

# Squares are added up in the gradient's own format over so many entries, and in float64 beyond.
_SPAN = 4096


@torch.no_grad()
def grad_norm_of(primary_shards: Iterable[Tensor], world: Group) -> Tensor:
    """The norm of the whole model's gradient, from the parts this rank speaks for."""
    squares = [sum_of_squares(part) for part in primary_shards]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    return all_reduce_no_grad(total, world).sqrt()


def sum_of_squares(part: Tensor) -> Tensor:
    """In float64, in one pass that writes nothing down: a wide copy of every gradient would cost more than the sum."""
    flat = part.reshape(-1)
    even = flat.numel() // _SPAN * _SPAN
    spans, rest = flat[:even].view(-1, _SPAN), flat[even:].double()
    wide = torch.promote_types(part.dtype, torch.float32)
    norms = torch.linalg.vector_norm(spans, dim=1, dtype=wide).double()
    return norms.square().sum() + rest.square().sum()


@torch.no_grad()
def clip_gradients(gradients: Iterable[Tensor], norm: Tensor, bound: float) -> None:
    """Scale in place so that the norm is at most ``bound``; every rank computes the same factor."""
    factor = (bound / norm).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
