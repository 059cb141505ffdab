"""How many rows go where when nothing can be looked at: as the balanced router sends them.

N tokens of a microbatch, K choices per token, E experts.

The balanced router deals choices in turn: choice number n*K + k of a microbatch goes to expert (n*K + k) mod E. So the
rows of every rank for every expert follow from which tokens the rank holds, and that follows from the layout. A run
whose own router decides by scores has the same rows on average; ``imbalance`` says how many times the average this
rank's experts get, as the rank that is worst off would.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from torch import Tensor

from moefold.batching.zigzag import places
from moefold.config.run import RunConfig
from moefold.moe.capacity import capacity_of
from moefold.moe.dispatch.base import ExchangeName
from moefold.topology.folded_layout import FoldedLayout, levels
from moefold.topology.shares import share_sizes


class BalancedSplitSizes:
    """For microbatches that all have the same documents: ``lengths`` tokens long, cut over ``context`` ranks."""

    def __init__(
        self,
        run: RunConfig,
        layout: FoldedLayout,
        rank: int,
        lengths: Sequence[int],
        context: int,
        imbalance: float = 1.0,
    ) -> None:
        self.run, self.layout, self.rank = run, layout, rank
        self.lengths, self.context, self.imbalance = tuple(lengths), context, imbalance
        # Every layer of every microbatch asks again.
        self._leaving_by_hop: dict[ExchangeName, list[int]] = {}
        self._arriving_by_hop: dict[ExchangeName, list[list[int]]] = {}

    def leaving(self, rows_per_expert_E: Tensor) -> list[int]:
        return self._leaving

    def arriving(self, rows_from_Se: Tensor) -> list[list[int]]:
        return self._arriving

    def gathered(self, rows_per_expert_e: Tensor) -> list[int]:
        return self._gathered

    def tokens(self, tokens_of_P: Tensor) -> list[int]:
        return [len(self._tokens_of(peer)) for peer in self.layout.ranks("expert_block", self.rank)]

    def leaving_once(self, hop: ExchangeName, rows_P: Tensor) -> list[int]:
        if hop not in self._leaving_by_hop:
            self._leaving_by_hop[hop] = self._leaving_once(hop)
        return self._leaving_by_hop[hop]

    def arriving_once(self, hop: ExchangeName, counts_S: Tensor) -> list[list[int]]:
        if hop not in self._arriving_by_hop:
            self._arriving_by_hop[hop] = self._arriving_once(hop)
        return self._arriving_by_hop[hop]

    def _leaving_once(self, hop: ExchangeName) -> list[int]:
        peers, holders = self._peers(hop, self.rank), self._holders(hop, self.rank)
        return [sum(self._told(hop, source, peer)[0] for source in holders) for peer in peers]

    def _arriving_once(self, hop: ExchangeName) -> list[list[int]]:
        """Sources stand as in ``_arriving``."""
        ends = (self.rank,) if hop == "across" else self.layout.ranks("etp", self.rank)
        found = []
        for source in (source for end in ends for source in self._peers(hop, end)):
            on_action = [self._told(hop, holder, self.rank) for holder in self._holders(hop, source)]
            found.append([self._more(sum(column)) for column in zip(*on_action, strict=True)])
        return found

    @cached_property
    def _leaving(self) -> list[int]:
        return self._rows_of(self.rank)

    @cached_property
    def _arriving(self) -> list[list[int]]:
        """Sources stand etp peer by etp peer, and by their place in that peer's ep group."""
        sources = [peer for etp in self.layout.ranks("etp", self.rank) for peer in self.layout.ranks("ep", etp)]
        return [[self._more(rows) for rows in self._rows_of(peer)[self._mine]] for peer in sources]

    @cached_property
    def _gathered(self) -> list[int]:
        block = self.layout.ranks("expert_block", self.rank)
        by_peer = [self._rows_of(peer)[self._mine] for peer in block]
        return [self._more(sum(rows)) for rows in zip(*by_peer, strict=True)]

    @property
    def _mine(self) -> slice:
        """The experts of this rank."""
        return self._experts_at("direct", self.rank)

    def _experts_at(self, hop: ExchangeName, rank: int) -> slice:
        """Those of a rank, or of its host."""
        assert self.run.model.moe is not None
        size = self.run.parallel.ep_inner if hop == "across" else 1
        number = self.run.model.moe.num_experts // self.layout.size("ep") * size
        first = self.layout.index("ep", rank) // size * number
        return slice(first, first + number)

    def _peers(self, hop: ExchangeName, rank: int) -> tuple[int, ...]:
        """The ranks of a hop's group."""
        everyone = self.layout.ranks("ep", rank)
        across, inside = levels(everyone, rank, self.run.parallel.ep_inner)
        return {"direct": everyone, "across": across, "inside": inside}[hop]

    def _holders(self, hop: ExchangeName, rank: int) -> tuple[int, ...]:
        """Whose tokens a rank sends on this hop: inside a host, those that have crossed to it."""
        return self._peers("across", rank) if hop == "inside" else (rank,)

    def _told(self, hop: ExchangeName, source: int, end: int) -> list[int]:
        """Of the source's tokens: how many have a choice at the hop's end, and how many chose each expert there."""
        assert self.run.model.moe is not None
        experts, choices = self._experts_at(hop, end), self._choices_of(source)
        number = choices % self.run.model.moe.num_experts
        there = choices[(number >= experts.start) & (number < experts.stop)]
        return [len(np.unique(there // self.run.model.moe.top_k)), *self._rows_of(source)[experts]]

    def _more(self, rows: int) -> int:
        return round(rows * self.imbalance)

    def _rows_of(self, rank: int) -> list[int]:
        """A rank's rows for each expert, those that capacities leave."""
        moe = self.run.model.moe
        assert moe is not None
        return np.bincount(self._choices_of(rank) % moe.num_experts, minlength=moe.num_experts).tolist()

    def _choices_of(self, rank: int) -> np.ndarray:
        """The numbers of a rank's choices that are kept."""
        moe = self.run.model.moe
        assert moe is not None
        tokens = self._tokens_of(rank)
        choices = (tokens[:, None] * moe.top_k + np.arange(moe.top_k)).ravel()
        return choices if moe.capacity is None else choices[self._is_kept(choices, len(tokens))]

    def _is_kept(self, choices: np.ndarray, num_tokens: int) -> np.ndarray:
        """First come, first served: the only rule that needs no scores."""
        moe = self.run.model.moe
        assert moe is not None and moe.capacity is not None
        local = moe.capacity.scope == "local"
        over = num_tokens if local else sum(self.lengths)
        owners = moe.num_experts if moe.capacity.per == "expert" else moe.capacity.device_groups
        experts_each = moe.num_experts // owners
        room = capacity_of(over, moe.capacity.factor, moe.top_k, owners)
        experts = choices % moe.num_experts
        if not local:
            return choices // moe.num_experts * experts_each + experts % experts_each < room
        owner = experts // experts_each
        order = np.argsort(owner, kind="stable")
        before = np.empty_like(order)
        before[order] = np.arange(len(order)) - np.searchsorted(owner[order], owner[order])
        return before < room

    def _tokens_of(self, rank: int) -> np.ndarray:
        """Which tokens of its microbatch a rank holds."""
        index = self.layout.context_place(rank) % self.context
        spans = places(self.lengths, index, self.context)
        held = np.concatenate([np.zeros(0, np.int64), *(np.arange(start, stop) for start, stop in spans)])
        ends = np.cumsum(share_sizes(len(held), self.layout.size("tp")))
        return np.split(held, ends[:-1])[self.layout.index("tp", rank)]
