"""Which dispatcher is cheapest: what each sends and copies, times what the link costs.

t tokens of a rank, K experts per token, E experts, W ranks of an ep group, B bytes of a row, D entries of a row.

    all_to_all      t * K rows go, and come back
    deduplicated    t * N rows go, and come back; N is how many ranks have one of a token's experts
    all_gather      t * (W - 1) rows come; as many sums of D float32 entries go back

A token's K experts differ, so a rank that holds E / W of them has none of the K with probability

    C(E - E/W, K) / C(E, K)        and        N = W * (1 - that)

Rows that go may be narrower than those that come back (`precision.dispatch`).
Of rows sent, one in W stays where it is. A row that is sent on its own is also gathered before dispatch and added up in
combine, which costs memory traffic; computing the routing maps takes a number of small operations. Times are those of
one dispatch and combine; the backward does the same in the other direction, so it does not change the ranking.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal, cast, get_args

from moefold.blueprint.narrow_bytes import cast_bytes
from moefold.config.parallel import EngineDispatcher, LinkConfig, NamedDispatcher, PlannedDispatcherName
from moefold.config.precision import BYTES
from moefold.config.precision_recipes import DISPATCH_CASTS
from moefold.config.run import RunConfig

# The dispatchers that have formulas of their own (`expert_messages.py`, `traffic.py`), and variants that share them.
OwnDispatcher = Literal["all_to_all", "all_gather", "deduplicated", "two_level"]
PlannedDispatcher = Literal[OwnDispatcher, PlannedDispatcherName]
_VARIANT_OF: dict[str, PlannedDispatcher] = {
    "all_to_all_aligned": "all_to_all",
    # More rows in messages and buffers, by its bounds (`expert_messages.py`), and no host read.
    "all_to_all_bounded": "all_to_all",
    "deepep_elastic": "deepep",
    # One host read where all_to_all has two (`timing/layer_time.py`).
    "symmetric_memory": "all_to_all",
}
ENGINE_DISPATCHERS: tuple[EngineDispatcher, ...] = get_args(EngineDispatcher)

# Of a prob, an expert's number with a row, and one that is gathered.
_WEIGHT, _NUMBER, _GATHERED_NUMBER = 4, 2, 8
# Counts, rows, assignments, expert outputs; or tokens, probs, assignments, sums.
_MESSAGES = 4
# Finding an assignment's place among the rows takes as long as moving so many bytes (70 ns of a core).
_PLACED = 400


@dataclass(frozen=True)
class Exchange:
    """What decides: tokens of a rank, entries of a row and their bytes, and how experts are spread."""

    tokens: int
    dim: int
    word: int
    num_experts: int
    top_k: int
    ep: int
    etp: int = 1
    # Bytes of a row on its way to experts; None: as on the way back.
    sent_row: int | None = None

    @property
    def row(self) -> int:
        return self.dim * self.word

    @property
    def row_there(self) -> int:
        return self.row if self.sent_row is None else self.sent_row


@dataclass(frozen=True)
class Volume:
    """Of one dispatch and combine on one rank: messages, and bytes that it receives or moves."""

    messages: float
    operations: float
    exchanged: float
    gathered: float
    summed: float
    copied: float

    def seconds(self, link: LinkConfig) -> float:
        waited = self.messages * link.latency_us + self.operations * link.operation_us
        sent = (
            self.exchanged / link.all_to_all_gb_s
            + self.gathered / link.all_gather_gb_s
            + self.summed / link.reduce_scatter_gb_s
        )
        return waited * 1e-6 + (sent + self.copied / link.copy_gb_s) * 1e-9


def ranks_met(num_experts: int, ep: int, top_k: int) -> float:
    """On how many of ``ep`` ranks a token's experts are, on average over random assignments."""
    missed = comb(num_experts - num_experts // ep, top_k) / comb(num_experts, top_k)
    return ep * (1 - missed)


def volumes(e: Exchange) -> dict[NamedDispatcher, Volume]:
    """Of each dispatcher that the choice is between."""
    return {
        "all_to_all": _one_by_one(e, e.top_k, _WEIGHT, 30),
        "deduplicated": _one_by_one(e, ranks_met(e.num_experts, e.ep, e.top_k), e.top_k * (_WEIGHT + _NUMBER), 60),
        "all_gather": _everything(e),
    }


def estimates(run: RunConfig) -> dict[NamedDispatcher, float]:
    """Seconds of each dispatcher that this run may use."""
    found = {name: volume.seconds(run.parallel.link) for name, volume in volumes(dispatch_sizes_of(run)).items()}
    moe = run.model.moe
    if moe is not None and moe.capacity is not None and moe.capacity.pad:
        # Its counts are not known before tokens are routed.
        del found["deduplicated"]
    return found


def dispatcher_in_use(run: RunConfig) -> NamedDispatcher | EngineDispatcher:
    """The one that is named, or the cheapest of our own; of a run that can be trained."""
    if run.parallel.dispatcher != "adaptive":
        return cast(NamedDispatcher | EngineDispatcher, run.parallel.dispatcher)
    found = estimates(run)
    return min(found, key=lambda name: found[name])


def planned_as(run: RunConfig) -> PlannedDispatcher:
    """The dispatcher whose bytes, times and memory the planner takes for this run's."""
    name = dispatcher_in_use(run)
    return _VARIANT_OF.get(name) or cast(PlannedDispatcher, name)


def sent_row_bytes(run: RunConfig, dim: int, word: int) -> int:
    """Of a row of ``dim`` entries on its way to an expert; ``word``: bytes of an entry that is not narrowed."""
    name = run.precision.dispatch
    return dim * word if name is None else cast_bytes(DISPATCH_CASTS[name].forward, 1, dim)


def dispatch_sizes_of(run: RunConfig) -> Exchange:
    moe, parallel = run.model.moe, run.parallel
    assert moe is not None
    dim = moe.latent_dim or run.model.dim
    word = BYTES[run.precision.compute]
    return Exchange(
        tokens=run.data.micro_batch * run.data.seq_len // parallel.cp // parallel.tp,
        dim=dim,
        word=word,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        ep=parallel.ep,
        etp=parallel.etp,
        sent_row=sent_row_bytes(run, dim, word),
    )


def _one_by_one(e: Exchange, rows_per_token: float, beside: int, operations: int) -> Volume:
    """``beside``: bytes that go with a row and do not come back."""
    rows = e.tokens * rows_per_token
    away = (e.ep - 1) / e.ep
    # Ranks that split experts gather each other's rows, and sum in float32.
    others = e.etp - 1
    return Volume(
        messages=_MESSAGES + 3 * (others > 0),
        operations=operations,
        exchanged=rows * away * (e.row_there + e.row + beside),
        gathered=rows * others * (e.row_there + beside),
        summed=rows * others * e.dim * max(4, e.word),
        copied=2 * rows * e.row
        + e.tokens * e.top_k * _PLACED
        + (rows * e.etp * e.dim * max(4, e.word) if others else 0.0),
    )


def _everything(e: Exchange) -> Volume:
    block = e.ep * e.etp
    wide = e.dim * max(4, e.word)
    return Volume(
        messages=_MESSAGES,
        operations=20,
        exchanged=0.0,
        gathered=e.tokens * (block - 1) * (e.row_there + e.top_k * (_WEIGHT + _GATHERED_NUMBER)),
        summed=e.tokens * (block - 1) * wide,
        # Answers are widened before they are summed.
        copied=e.tokens * block * (e.top_k * _PLACED / 4 + (wide if e.word < 4 else 0)),
    )
