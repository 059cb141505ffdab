"""Tokens that only fill a document's place up: they are computed like all others, but nothing may notice them.

t tokens of this rank, N tokens of the microbatches, K choices per token.

Attention and the loss need no help, as pads stand at the end of their document and have no labels. A router needs it:
pads must not be sent to experts, take another token's room, or count towards anyone's load.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.nn.batch import Batch, TokenSets
from moefold.nn.parallel_interfaces import TokenSharding
from moefold.ops.segments import count_keys


def real_tokens(batch: Batch, tokens: TokenSharding) -> Tensor | None:
    """True for this rank's tokens that are none; None where no token is a pad."""
    return None if batch.real_T is None else tokens.tp_shard(batch.real_T)


def keep_real(expert_tK: Tensor, kept_tK: Tensor | None, real_t: Tensor | None) -> Tensor | None:
    """The choices that were kept before, without those of pads."""
    if real_t is None:
        return kept_tK
    real_tK = real_t[:, None].expand_as(expert_tK)
    return real_tK if kept_tK is None else kept_tK & real_tK


def only_real(sets: TokenSets, real: Tensor) -> TokenSets:
    """The same sets without their pads, which get one more set to themselves, the last. Reads the sizes back."""
    num_sets = len(sets.sizes)
    set_of_token = torch.where(real, sets.set_of_token_N, num_sets)
    return TokenSets(set_of_token, tuple(count_keys(set_of_token, num_sets + 1).tolist()))
