"""Padding tokens are computed like all others, but must not change anything.

Attention and the loss need no help, as padding is at the end of its document and has no labels. A router needs it:
padding must not be sent to experts, take another token's capacity, or count towards any expert's load.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.nn.batch import Batch, TokenSets
from moefold.nn.parallel_interfaces import TokenSharding
from moefold.ops.segments import count_keys


def real_tokens(batch: Batch, tokens: TokenSharding) -> Tensor | None:
    """False for padding tokens of this rank; None where there is no padding."""
    return None if batch.real_S is None else tokens.tp_shard(batch.real_S)


def keep_real(expert_tK: Tensor, kept_tK: Tensor | None, real_t: Tensor | None) -> Tensor | None:
    """The kept assignments without those of padding tokens."""
    if real_t is None:
        return kept_tK
    real_tK = real_t[:, None].expand_as(expert_tK)
    return real_tK if kept_tK is None else kept_tK & real_tK


def only_real(sets: TokenSets, real: Tensor) -> TokenSets:
    """The same sets without padding tokens, which become one more set, the last. Reads the sizes back."""
    num_sets = len(sets.sizes)
    set_of_token = torch.where(real, sets.set_of_token_T, num_sets)
    return TokenSets(set_of_token, tuple(count_keys(set_of_token, num_sets + 1).tolist()))
