"""Tensor and sequence parallelism: the seams of ``model/seams.py`` on real groups.

T tokens of a microbatch, t the tokens of this rank, D width.

Between attention and feed-forward the tokens of a microbatch are cut over the tp ranks, in contiguous shares that need
not be equal. Matmuls that are cut by heads or hidden width need all tokens, so they stand between a ``gather`` and a
``reduce``. The head and the loss are cut by vocabulary; every tp rank ends with the same loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.comm.gather import gather_plain, gather_rows, gather_same, reduce_rows, sum_partial, sum_plain, sum_same
from moefold.comm.group import Group
from moefold.comm.mesh import Groups
from moefold.model.seams import Reach
from moefold.topology.shares import share_sizes


class TokenShards:
    """The tokens of a microbatch, cut over the tp ranks."""

    def __init__(self, groups: Groups, num_tokens: int) -> None:
        self.tp = groups["tp"]
        self.sizes = share_sizes(num_tokens, self.tp.size)
        self.reach = {"microbatch": groups["microbatch"], "everyone": groups["stage"]}

    def gather(self, x_tD: Tensor) -> Tensor:
        return gather_rows(x_tD, self.sizes, self.tp)

    def reduce(self, x_TD: Tensor) -> Tensor:
        return reduce_rows(x_TD, self.sizes, self.tp)

    def whole(self, x_t: Tensor) -> Tensor:
        if x_t.dtype == torch.bool:
            return gather_plain(x_t.byte(), self.sizes, self.tp).bool()
        return gather_plain(x_t, self.sizes, self.tp)

    def mine(self, x_T: Tensor) -> Tensor:
        return x_T.split(self.sizes)[self.tp.index]

    def sum_heads(self, x: Tensor) -> Tensor:
        return sum_partial(x, self.tp)

    def sum_counts(self, counts: Tensor, reach: Reach) -> Tensor:
        return sum_plain(counts, self.reach[reach])


class VocabShards:
    """The vocabulary, cut over the tp ranks in equal contiguous parts."""

    def __init__(self, tp: Group) -> None:
        self.tp = tp

    def first_row(self, num_rows: int) -> int:
        return self.tp.index * num_rows

    def merge_logsumexp(self, lse_T: Tensor) -> Tensor:
        parts_PT = gather_same(lse_T.unsqueeze(0), (1,) * self.tp.size, self.tp)
        return parts_PT.logsumexp(0)

    def merge_sum(self, x_T: Tensor) -> Tensor:
        return sum_same(x_T, self.tp)
