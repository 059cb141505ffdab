"""What one forward sees: the tokens, and which of them belong together.

T tokens on this rank before they are cut into shards (t), S sequence length.

Balance losses and capacities are defined over sets of tokens: a sequence, a microbatch, a rank's shard. A layout must
not change these sets, so they are written down here and not read off the shape of whatever tensor a rank holds. A rank
of a parallel run sees one microbatch at a time; the one-process reference may lay the microbatches of all
data-parallel ranks side by side in one batch, and the sets keep them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moefold.topology.shares import share_sizes

IGNORED = -100


@dataclass(frozen=True)
class TokenSets:
    """A partition of tokens: the set each belongs to, and how many tokens each set has in all."""

    set_of_token: Tensor
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Equal-length sequences, one after the other."""

    tokens_T: Tensor
    labels_T: Tensor
    positions_T: Tensor
    num_sequences: int
    # How many microbatches lie side by side here, and into how many shards each is cut for the experts.
    num_microbatches: int
    shards_per_microbatch: int
    # Of the whole step, over all ranks and microbatches: the divisors of the loss and of the balance losses.
    step_labels: int
    step_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.shape[0]

    @property
    def seq_len(self) -> int:
        return self.num_tokens // self.num_sequences

    @cached_property
    def sequences(self) -> TokenSets:
        return self._equal_sets(self.num_sequences)

    @cached_property
    def microbatches(self) -> TokenSets:
        return self._equal_sets(self.num_microbatches)

    @cached_property
    def shards(self) -> TokenSets:
        sizes = (
            share_sizes(self.num_tokens // self.num_microbatches, self.shards_per_microbatch) * self.num_microbatches
        )
        device = self.tokens_T.device
        ids = torch.arange(len(sizes), device=device)
        of_token = ids.repeat_interleave(torch.tensor(sizes, device=device), output_size=self.num_tokens)
        return TokenSets(of_token, sizes)

    def _equal_sets(self, count: int) -> TokenSets:
        size = self.num_tokens // count
        return TokenSets(torch.arange(self.num_tokens, device=self.tokens_T.device) // size, (size,) * count)


def cut_rows(x_T: Tensor, sizes: tuple[int, ...], index: int) -> Tensor:
    """The ``index``-th of consecutive shares of rows."""
    start = sum(sizes[:index])
    return x_T[start : start + sizes[index]]
