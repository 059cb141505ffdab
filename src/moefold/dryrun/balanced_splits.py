"""Split sizes where no tensor can be read: those of the balanced router.

N tokens of a microbatch, K experts per token, E experts.

The balanced router assigns experts in turn: assignment n*K + k of a microbatch goes to expert (n*K + k) mod E. So the
number of rows of every rank for every expert follows from the tokens that the rank holds, and those follow from the
layout. A router that decides by scores sends the same rows on average; ``imbalance`` is the load of this rank's experts
relative to the average, for the most loaded rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from torch import Tensor

from moefold.batching.zigzag import held_spans
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import ExchangedRows, ExchangeName, HostRows
from moefold.moe.topk import capacity_of
from moefold.topology.folded_layout import FoldedLayout, levels, shard_sizes


class BalancedSplitSizes:
    """For microbatches that all have the same documents: ``lengths`` tokens long, sharded over ``context`` ranks."""

    def __init__(
        self,
        run: RunConfig,
        layout: FoldedLayout,
        rank: int,
        lengths: Sequence[int],
        context: int,
        imbalance: float = 1.0,
        chunk: tuple[int, int] = (0, 1),
    ) -> None:
        """``chunk``: which of how many chunks of every rank's tokens."""
        self.chunk = chunk
        self.run, self.layout, self.rank = run, layout, rank
        self.lengths, self.context, self.imbalance = tuple(lengths), context, imbalance
        # Computed once: every layer of every microbatch asks for them.
        self._exchanged: dict[ExchangeName, HostRows] = {}

    def of_chunk(self, chunk: int, chunks: int) -> BalancedSplitSizes:
        of_rank = self.run, self.layout, self.rank, self.lengths, self.context, self.imbalance
        return BalancedSplitSizes(*of_rank, (chunk, chunks))

    def leaving(self, rows_per_expert_E: Tensor) -> list[int]:
        return self._leaving

    def arriving(self, rows_from_Se: Tensor) -> list[list[int]]:
        return self._arriving

    def exchanged(self, rows_per_expert_E: Tensor, rows_from_Se: Tensor) -> HostRows:
        return HostRows(self._leaving, self._arriving)

    def gathered(self, rows_per_expert_e: Tensor) -> list[int]:
        return self._gathered

    def tokens_and_gathered(self, tokens_of_P: Tensor, rows_per_expert_e: Tensor) -> tuple[list[int], list[int]]:
        block = self.layout.ranks("expert_block", self.rank)
        return [len(self._chunk_of(self._tokens_of(peer))) for peer in block], self._gathered

    def exchanged_once(self, exchanges: Mapping[ExchangeName, ExchangedRows]) -> dict[ExchangeName, HostRows]:
        for hop in exchanges.keys() - self._exchanged.keys():
            self._exchanged[hop] = HostRows(self._leaving_once(hop), self._arriving_once(hop))
        return {hop: self._exchanged[hop] for hop in exchanges}

    def cloned(self, expert_N: Tensor) -> list[int]:
        """No rank has more rows than another, so that there are no clones."""
        return [-1] * expert_N.numel()

    def overflow(self, rows: Tensor) -> int:
        """Bounds hold an even routing."""
        return 0

    def _leaving_once(self, hop: ExchangeName) -> list[int]:
        peers, holders = self._peers(hop, self.rank), self._holders(hop, self.rank)
        return [sum(self._tokens_and_rows(hop, source, peer)[0] for source in holders) for peer in peers]

    def _arriving_once(self, hop: ExchangeName) -> list[list[int]]:
        """Sources are ordered as in ``_arriving``."""
        ends = (self.rank,) if hop == "across" else self.layout.ranks("etp", self.rank)
        found = []
        for source in (source for end in ends for source in self._peers(hop, end)):
            counts = [self._tokens_and_rows(hop, holder, self.rank) for holder in self._holders(hop, source)]
            found.append([self._scaled(sum(column)) for column in zip(*counts, strict=True)])
        return found

    @cached_property
    def _leaving(self) -> list[int]:
        return self._rows_of(self.rank)

    @cached_property
    def _arriving(self) -> list[list[int]]:
        """Sources are ordered by etp peer, then by their index in that peer's ep group."""
        sources = [peer for etp in self.layout.ranks("etp", self.rank) for peer in self.layout.ranks("ep", etp)]
        return [[self._scaled(rows) for rows in self._rows_of(peer)[self._own_experts]] for peer in sources]

    @cached_property
    def _gathered(self) -> list[int]:
        block = self.layout.ranks("expert_block", self.rank)
        by_peer = [self._rows_of(peer)[self._own_experts] for peer in block]
        return [self._scaled(sum(rows)) for rows in zip(*by_peer, strict=True)]

    @property
    def _own_experts(self) -> slice:
        """The experts of this rank."""
        return self._experts_at("direct", self.rank)

    def _experts_at(self, hop: ExchangeName, rank: int) -> slice:
        """Those of a rank, or of its host."""
        assert self.run.model.moe is not None
        size = self.run.parallel.ep_inner if hop == "across" else 1
        number = self._num_places // self.layout.size("ep") * size
        first = self.layout.index("ep", rank) // size * number
        return slice(first, first + number)

    def _peers(self, hop: ExchangeName, rank: int) -> tuple[int, ...]:
        """The ranks of a hop's group."""
        ep_ranks = self.layout.ranks("ep", rank)
        across, inside = levels(ep_ranks, rank, self.run.parallel.ep_inner)
        return {"direct": ep_ranks, "across": across, "inside": inside}[hop]

    def _holders(self, hop: ExchangeName, rank: int) -> tuple[int, ...]:
        """Ranks whose tokens a rank sends in this exchange: inside a host, those it received from other hosts."""
        return self._peers("across", rank) if hop == "inside" else (rank,)

    def _tokens_and_rows(self, hop: ExchangeName, source: int, end: int) -> list[int]:
        """Of the source's tokens: how many are assigned to experts of ``end``, and how many to each of these."""
        assert self.run.model.moe is not None
        experts, assignments = self._experts_at(hop, end), self._assignments_of(source)
        place = self._places_of(assignments)
        there = assignments[(place >= experts.start) & (place < experts.stop)]
        return [len(np.unique(there // self.run.model.moe.top_k)), *self._rows_of(source)[experts]]

    def _scaled(self, rows: int) -> int:
        return round(rows * self.imbalance)

    def _rows_of(self, rank: int) -> list[int]:
        """Number of a rank's rows for each expert after dropping."""
        return np.bincount(self._places_of(self._assignments_of(rank)), minlength=self._num_places).tolist()

    @property
    def _num_places(self) -> int:
        """Experts, and with ECHO the spare slots of all ranks, which stay empty: no rank has more rows than another."""
        assert self.run.model.moe is not None
        echo = self.run.parallel.echo
        return self.run.model.moe.num_experts + (0 if echo is None else echo.slots * self.layout.size("ep"))

    def _places_of(self, assignments: np.ndarray) -> np.ndarray:
        assert self.run.model.moe is not None
        expert, echo = assignments % self.run.model.moe.num_experts, self.run.parallel.echo
        each = self.run.model.moe.num_experts // self.layout.size("ep")
        return expert if echo is None else expert + expert // each * echo.slots

    def _assignments_of(self, rank: int) -> np.ndarray:
        """Indices of a rank's assignments that are not dropped."""
        moe = self.run.model.moe
        assert moe is not None
        tokens = self._tokens_of(rank)
        assignments = (tokens[:, None] * moe.top_k + np.arange(moe.top_k)).ravel()
        # Dropped before tokens are cut into chunks.
        is_kept = np.ones(len(assignments), bool)
        if moe.capacity is not None:
            is_kept = self._is_kept(assignments, len(tokens))
        return assignments[is_kept & np.isin(assignments // moe.top_k, self._chunk_of(tokens))]

    def _chunk_of(self, tokens: np.ndarray) -> np.ndarray:
        number, chunks = self.chunk
        ends = np.cumsum(shard_sizes(len(tokens), chunks))
        return np.split(tokens, ends[:-1])[number]

    def _is_kept(self, assignments: np.ndarray, num_tokens: int) -> np.ndarray:
        """Drops by position, the only policy that needs no scores."""
        moe = self.run.model.moe
        assert moe is not None and moe.capacity is not None
        local = moe.capacity.scope == "local"
        tokens = num_tokens if local else sum(self.lengths)
        owners = moe.num_experts if moe.capacity.per == "expert" else moe.capacity.device_groups
        experts_each = moe.num_experts // owners
        limit = capacity_of(tokens, moe.capacity.factor, moe.top_k, owners)
        experts = assignments % moe.num_experts
        if not local:
            return assignments // moe.num_experts * experts_each + experts % experts_each < limit
        owner = experts // experts_each
        order = np.argsort(owner, kind="stable")
        before = np.empty_like(order)
        before[order] = np.arange(len(order)) - np.searchsorted(owner[order], owner[order])
        return before < limit

    def _tokens_of(self, rank: int) -> np.ndarray:
        """Indices of the tokens of its microbatch that a rank holds."""
        index = self.layout.context_place(rank) % self.context
        spans = held_spans(self.lengths, index, self.context)
        held = np.concatenate([np.zeros(0, np.int64), *(np.arange(start, stop) for start, stop in spans)])
        ends = np.cumsum(shard_sizes(len(held), self.layout.size("tp")))
        return np.split(held, ends[:-1])[self.layout.index("tp", rank)]
