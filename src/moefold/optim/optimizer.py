"""The update: the global norm of all gradients, clipping by it, and AdamW with weight decay on matrices only.

Each rank sums the squares of the shards for which it is the primary replica; every shard has exactly one. One
all-reduce over all ranks then counts every element of the model once, across grids, stages and shards.

Norms, biases and sinks get no weight decay. DTensors and plain tensors are in separate param groups, because one fused
update cannot mix the two.

``optim.implementation`` names torch's implementation. The fused update reads and writes parameter, gradient and moments
once; foreach makes about a dozen passes, and holds temporary copies of all parameters of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.process_groups import Group
from moefold.config.optim import OptimConfig

# Squares are summed in float32 (or float64) over spans of this many entries, and the spans in float64.
_SPAN = 4096


@torch.no_grad()
def grad_norm_of(primary_shards: Iterable[Tensor], world: Group, device: torch.device) -> Tensor:
    """The norm of the whole model's gradient, from the shards for which this rank is the primary replica.

    A rank may be primary for none; its zero is on the device all the same, where the others' all-reduce is.
    """
    shards = list(primary_shards)
    squares = sums_of_squares(shards) if device.type == "cuda" else [sum_of_squares(shard) for shard in shards]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    return all_reduce_no_grad(total, world).sqrt()


def sums_of_squares(shards: Sequence[Tensor]) -> list[Tensor]:
    """``sum_of_squares`` of each, for GPUs: a few launches for all of them instead of eight for each.

    The foreach kernel reads the gradient as it is and sums in float64. On a CPU it would loop over tensors, and make a
    float64 copy of each.
    """
    if not shards:
        return []
    norms = torch._foreach_norm([shard.reshape(-1) for shard in shards], 2, torch.float64)
    return list(torch._foreach_mul(norms, norms))


def sum_of_squares(shard: Tensor) -> Tensor:
    """In float64, in one pass without a float64 copy of the gradient."""
    flat = shard.reshape(-1)
    even = flat.numel() // _SPAN * _SPAN
    spans, rest = flat[:even].view(-1, _SPAN), flat[even:].double()
    acc_dtype = torch.promote_types(shard.dtype, torch.float32)
    norms = torch.linalg.vector_norm(spans, dim=1, dtype=acc_dtype).double()
    return norms.square().sum() + rest.square().sum()


@torch.no_grad()
def clip_gradients(gradients: Iterable[Tensor], norm: Tensor, bound: float) -> None:
    """Scale in place so that the norm is at most ``bound``; every rank computes the same factor."""
    factor = (bound / norm).clamp(max=1.0)
    of_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        of_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, members in of_dtype.items():
        torch._foreach_mul_(members, factor.to(dtype))


NO_WEIGHT_DECAY = frozenset({"norm", "bias", "sink"})


def adamw(parameters: Iterable[tuple[nn.Parameter, str]], config: OptimConfig) -> optim.AdamW:
    """``parameters`` are pairs of a parameter and its kind in the blueprint."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter, kind in parameters:
        groups.setdefault((kind not in NO_WEIGHT_DECAY, isinstance(parameter, DTensor)), []).append(parameter)
    return optim.AdamW(
        [
            {"params": members, "weight_decay": config.weight_decay if decayed else 0.0}
            for (decayed, _), members in groups.items()
        ]
        # A pipeline rank with empty stages has no parameters; torch needs at least one group.
        or [{"params": []}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=config.implementation == "foreach",
        fused=config.implementation == "fused",
    )
