"""Capacity: how many assignments an expert, or a device full of experts, accepts, and which ones when there are more.

A capacity holds per owner (an expert, or a device with its experts) and per set of tokens: the whole microbatch, which
no layout changes, or a rank's own shard. Ranks are computed on the device and every shape is known beforehand, so
dropping needs no sync.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import torch
from torch import Tensor

from moefold.ops.segments import rank_within_key


def capacity_of(num_tokens: int, factor: float, top_k: int, num_owners: int) -> int:
    """ceil(factor * tokens * top_k / owners), at least 1.

    In fractions of the decimal the user wrote: in floats, 0.1 * 30 is a little over 3 and would be rounded up to 4.
    """
    return max(1, ceil(Fraction(str(factor)) * num_tokens * top_k / num_owners))


def keep_within_capacity(
    owner_TK: Tensor, priority_TK: Tensor | None, set_of_token_T: Tensor, capacities: tuple[int, ...], num_owners: int
) -> Tensor:
    """True for the assignments within capacity; ``capacities`` has one entry per set.

    Higher priority goes first and equal ones by position; without priorities it is first come, first served, by token
    and then by k.
    """
    set_TK = set_of_token_T[:, None].expand_as(owner_TK)
    rank_N = rank_within_key(
        (set_TK * num_owners + owner_TK).flatten(),
        len(capacities) * num_owners,
        None if priority_TK is None else priority_TK.flatten(),
    )
    # One fill per set: a device tensor made from a Python list would wait for a copy.
    capacity_Q = torch.stack([torch.full((), capacity, device=owner_TK.device) for capacity in capacities])
    return rank_N.view_as(owner_TK) < capacity_Q[set_of_token_T][:, None]


def keep_within_capacity_reference(
    owner_TK: Tensor, priority_TK: Tensor | None, set_of_token_T: Tensor, capacities: tuple[int, ...], num_owners: int
) -> Tensor:
    """Fill each owner of each set from the sorted list of its assignments."""
    kept_TK = torch.zeros_like(owner_TK, dtype=torch.bool)
    num_tokens, top_k = owner_TK.shape
    for token_set, capacity in enumerate(capacities):
        for owner in range(num_owners):
            asks = [
                (0.0 if priority_TK is None else -priority_TK[token, k].item(), token, k)
                for token in range(num_tokens)
                for k in range(top_k)
                if set_of_token_T[token] == token_set and owner_TK[token, k] == owner
            ]
            for _, token, k in sorted(asks)[:capacity]:
                kept_TK[token, k] = True
    return kept_TK
