"""Where a layer communicates with other ranks, and the one-process version of each interface.

A layer is written for one device and given these objects. On one process they do nothing;
``parallel/tensor_parallel.py`` has the versions that communicate. Which gradient each one has is part of its contract,
because that is where parallel training goes wrong silently.

A sharded matmul takes its tokens chunk by chunk, so that one chunk can be on its way while another is multiplied. Where
nothing overlaps, all tokens are one chunk (``OneChunk``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

from torch import Tensor

from moefold.nn.batch import Batch

# Whose counts belong together: the ranks that share one microbatch's tokens, or all ranks that run at the same time.
Reach = Literal["microbatch", "everyone"]


class TokenSharding(Protocol):
    """How the tokens of a microbatch are cut over the ranks that share them."""

    def gather(self, x_tX: Tensor, batch: Batch) -> Tensor:
        """[S, X] from the tp ranks. Each does different work with them, so backward adds up the gradients and cuts."""
        ...

    def reduce(self, x_SD: Tensor) -> Tensor:
        """Partial sums of all S tokens, reduce-scattered over tp to this rank's. Backward gathers."""
        ...

    def gather_chunks(self, batch: Batch, *x_tX: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """``gather`` of these tensors in chunks of tokens. What the caller computes of one does not wait for the next
        to arrive, nor for its gradients to leave. A chunk holds some tokens of every rank: see ``split_chunks``."""
        ...

    def reduce_chunks(self, partial_SD: Iterable[Tensor], batch: Batch) -> Tensor:
        """``reduce`` of the same chunks. What makes the next one does not wait until the last one has been summed."""
        ...

    def split_chunks(self, per_token: Tensor) -> tuple[Tensor, ...]:
        """All tokens as these chunks; no exchange."""
        ...

    def join_chunks(self, chunks: Sequence[Tensor]) -> Tensor:
        """The inverse: chunks as all tokens, in their order."""
        ...

    def all_gather(self, x_t: Tensor, batch: Batch) -> Tensor:
        """All T tokens' values in the microbatch's own order, for a decision; no gradient."""
        ...

    def local_shard(self, x_T: Tensor, batch: Batch) -> Tensor:
        """My cut of what every rank holds in full; no exchange, so only for things without a gradient."""
        ...

    def tp_shard(self, x_S: Tensor) -> Tensor:
        """The same cut of what this context share holds in full."""
        ...

    def head_rows(self, num_rows: int) -> slice:
        """Which rows belong to this rank's heads, of a tensor of all heads that every tp rank holds in full."""
        ...

    def sum_heads(self, x: Tensor) -> Tensor:
        """Add up over the ranks that hold the other heads; backward adds up too."""
        ...

    def sum_counts(self, counts: Tensor, reach: Reach, batch: Batch) -> Tensor:
        """Add up counts over the ranks in reach; no gradient."""
        ...


class VocabSharding(Protocol):
    """How the vocabulary is cut. Every rank computes the same loss, so backward needs no exchange."""

    def first_row(self, num_rows: int) -> int:
        """The global number of the first of this rank's ``num_rows`` vocabulary rows."""
        ...

    def merge_logsumexp(self, lse_S: Tensor) -> Tensor:
        """log-sum-exp over the whole vocabulary from each rank's part; backward keeps this rank's share."""
        ...

    def merge_sum(self, x_S: Tensor) -> Tensor:
        """Sum over the ranks' parts; backward hands the gradient through unchanged."""
        ...


class OneChunk:
    """All tokens of a sharded matmul are exchanged at once, before it or after it."""

    def gather(self, x_tX: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError

    def reduce(self, x_SD: Tensor) -> Tensor:
        raise NotImplementedError

    def gather_chunks(self, batch: Batch, *x_tX: Tensor) -> Iterator[tuple[Tensor, ...]]:
        yield tuple(self.gather(x, batch) for x in x_tX)

    def reduce_chunks(self, partial_SD: Iterable[Tensor], batch: Batch) -> Tensor:
        (whole_SD,) = partial_SD
        return self.reduce(whole_SD)

    def split_chunks(self, per_token: Tensor) -> tuple[Tensor, ...]:
        return (per_token,)

    def join_chunks(self, chunks: Sequence[Tensor]) -> Tensor:
        (whole,) = chunks
        return whole


class LocalTokens(OneChunk):
    """One rank holds all tokens."""

    def gather(self, x_tX: Tensor, batch: Batch) -> Tensor:
        return x_tX

    def reduce(self, x_SD: Tensor) -> Tensor:
        return x_SD

    def all_gather(self, x_t: Tensor, batch: Batch) -> Tensor:
        return x_t.detach()

    def local_shard(self, x_T: Tensor, batch: Batch) -> Tensor:
        return x_T

    def tp_shard(self, x_S: Tensor) -> Tensor:
        return x_S

    def head_rows(self, num_rows: int) -> slice:
        return slice(0, num_rows)

    def sum_heads(self, x: Tensor) -> Tensor:
        return x

    def sum_counts(self, counts: Tensor, reach: Reach, batch: Batch) -> Tensor:
        return counts


class LocalVocab:
    """One rank holds the whole vocabulary."""

    def first_row(self, num_rows: int) -> int:
        return 0

    def merge_logsumexp(self, lse_S: Tensor) -> Tensor:
        return lse_S

    def merge_sum(self, x_S: Tensor) -> Tensor:
        return x_S
