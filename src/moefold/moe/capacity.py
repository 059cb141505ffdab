"""How many tokens an expert, or a device full of experts, accepts, and which ones when more ask.

T tokens, K choices per token, N = T*K choices.

A capacity holds per owner (an expert, or a device with its experts) and per set of tokens: the whole microbatch, which
no layout changes, or a rank's own shard. Everything is ranked on the device and every shape is known beforehand, so a
full owner costs no look at the data.
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
    """True for the choices that fit; ``capacities`` has one entry per set.

    Higher priority goes first and equal ones by position; without priorities it is first come, first served, by token
    and then by the order of its choices.
    """
    set_TK = set_of_token_T[:, None].expand_as(owner_TK)
    rank_N = rank_within_key(
        (set_TK * num_owners + owner_TK).flatten(),
        len(capacities) * num_owners,
        None if priority_TK is None else priority_TK.flatten(),
    )
    # One fill per set: building a device tensor from a Python list would wait for a copy.
    capacity_s = torch.stack([torch.full((), capacity, device=owner_TK.device) for capacity in capacities])
    return rank_N.view_as(owner_TK) < capacity_s[set_of_token_T][:, None]


def keep_within_capacity_reference(
    owner_TK: Tensor, priority_TK: Tensor | None, set_of_token_T: Tensor, capacities: tuple[int, ...], num_owners: int
) -> Tensor:
    """The twin of ``keep_within_capacity``: fill each owner of each set from a sorted list of who asks."""
    kept_TK = torch.zeros_like(owner_TK, dtype=torch.bool)
    num_tokens, num_choices = owner_TK.shape
    for token_set, capacity in enumerate(capacities):
        for owner in range(num_owners):
            asks = [
                (0.0 if priority_TK is None else -priority_TK[token, k].item(), token, k)
                for token in range(num_tokens)
                for k in range(num_choices)
                if set_of_token_T[token] == token_set and owner_TK[token, k] == owner
            ]
            for _, token, k in sorted(asks)[:capacity]:
                kept_TK[token, k] = True
    return kept_TK
