"""A layer whose exchanges run beside computation of the same microbatch, in an order that is data.

The tokens of this rank go to the experts and back in chunks. All chunks leave one after the other; the experts compute
one when it has arrived, while those behind it are on the wire, and it goes back while those behind it are computed:

    compute   prepare 0, 1 | shared up | experts 0      | experts 1          | shared down | sum 0, 1
    comm                   | dispatch 0, dispatch 1     | combine 0          | combine 1

One chunk is the whole microbatch, and then only the shared expert can run beside its exchanges. The order is that of
``exchange_order`` (`schedule/layer_orders.py`), checked before the first forward; each of its operations is a phase
here. An exchange is started where it stands in the order, and waited for by the phase that reads what it brought;
autograd mirrors this in the backward (`moe/exchange_beside.py`). The plain layer (`moe/layer.py`) is the reference.

Every token's experts see the rows that they would see in the whole microbatch, in fewer rows at a time. A weight's
gradient is the sum over chunks, so it agrees with the plain layer's up to rounding, and not to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from moefold.moe.dispatch.base import Carried, Dispatcher, ExpertInput, Routing
from moefold.moe.exchange_beside import ExchangesBeside
from moefold.moe.load_balancing import RoutingReport
from moefold.nn.phase import Phase, Stream
from moefold.schedule.layer_operations import Operation, step_and_chunk
from moefold.topology.folded_layout import shard_sizes


class LayerOverlap(NamedTuple):
    """``order``: of a layer's forward; ``dispatchers``: one for each chunk."""

    exchanges: ExchangesBeside
    order: tuple[Operation, ...]
    dispatchers: tuple[Dispatcher, ...]


class ChunkTokens(NamedTuple):
    """Tokens of one chunk in the dim in which they travel, and their experts and probs."""

    x_cL: Tensor
    routing: Routing


class Overlapped(NamedTuple):
    """Between two phases. ``tokens`` are None once they are prepared; ``rows``: of each chunk its counts, then its rows
    as sent, their exchange under way, as received, and so back; ``shared``: the shared expert's hidden activations,
    in chunks, after its first matmul, its output after its second."""

    x_tD: Tensor
    shared: Carried
    tokens: tuple[ChunkTokens | None, ...]
    rows: tuple[Carried, ...]
    tickets: tuple[Carried, ...]
    report: RoutingReport


class SharedExpert(NamedTuple):
    """Its two halves, the second with its gate."""

    up: Callable[[Tensor], tuple[Tensor, ...]]
    down: Callable[[tuple[Tensor, ...], Tensor], Tensor]


# One operation of one chunk.
ChunkStep = Callable[[Overlapped, int], Overlapped]


class OverlappedSteps:
    """The operations between a layer's router and its output."""

    def __init__(
        self, overlap: LayerOverlap, experts: Callable[[ExpertInput], Tensor], shared: SharedExpert | None
    ) -> None:
        self.overlap, self.experts, self.shared = overlap, experts, shared

    def phases(self) -> tuple[Phase, ...]:
        """In the order of ``overlap.order``, from a layer's counts to the outputs of all chunks."""
        steps: Mapping[str, tuple[Stream, ChunkStep, bool]] = {
            "dispatch_prepare": (Stream.COMPUTE, self._prepare_dispatch, False),
            "dispatch_exchange": (Stream.COMM, self._start_dispatch, False),
            "dispatch_finish": (Stream.COMPUTE, self._end_dispatch, False),
            # The whole expert: what is between its matmuls is one operation with them here.
            "experts_up": (Stream.COMPUTE, self._run_experts, True),
            "combine_prepare": (Stream.COMPUTE, self._prepare_combine, False),
            "combine_exchange": (Stream.COMM, self._start_combine, False),
            "combine_finish": (Stream.COMPUTE, self._end_combine, False),
        }
        if self.shared is not None:
            steps = {
                **steps,
                "shared_up": (Stream.COMPUTE, self._shared_up, True),
                "shared_down": (Stream.COMPUTE, self._shared_down, True),
            }
        found = []
        for operation in self.overlap.order:
            step, chunk = step_and_chunk(operation.name)
            if step in steps:
                stream, run, has_weights = steps[step]
                name = operation.name.replace("experts_up", "experts")
                found.append(Phase(name, stream, partial(_run, run, chunk), has_weights=has_weights))
        return tuple(found)

    def start(self, x_tD: Tensor, x_tL: Tensor, routing: Routing, report: RoutingReport) -> Overlapped:
        """Tokens in chunks, and the counts of all of them, which no exchange hides."""
        dispatchers = self.overlap.dispatchers
        tokens = split_tokens(x_tL, routing, len(dispatchers))
        counts = tuple(each.dispatch_counts(chunk.routing) for each, chunk in zip(dispatchers, tokens, strict=True))
        return Overlapped(x_tD, None, tokens, counts, (None,) * len(tokens), report)

    def outputs(self, returned: Overlapped) -> Tensor:
        """[t, L]: of all chunks, one behind the other."""
        return returned.rows[0] if len(returned.rows) == 1 else torch.cat(returned.rows)

    def _prepare_dispatch(self, carry: Overlapped, chunk: int) -> Overlapped:
        tokens = carry.tokens[chunk]
        assert tokens is not None
        sent = self.overlap.dispatchers[chunk].dispatch_prepare(tokens.x_cL, tokens.routing, carry.rows[chunk])
        return carry._replace(tokens=_put(carry.tokens, chunk, None), rows=_put(carry.rows, chunk, sent))

    def _start_dispatch(self, carry: Overlapped, chunk: int) -> Overlapped:
        exchange = self.overlap.dispatchers[chunk].dispatch_exchange
        return carry._replace(rows=_put(carry.rows, chunk, self.overlap.exchanges.start(exchange, carry.rows[chunk])))

    def _end_dispatch(self, carry: Overlapped, chunk: int) -> Overlapped:
        received = self.overlap.dispatchers[chunk].dispatch_finish(carry.rows[chunk].wait())
        overflow = received.overflow
        if overflow is not None and carry.report.overflow is not None:
            overflow = carry.report.overflow + overflow
        return carry._replace(
            rows=_put(carry.rows, chunk, received),
            tickets=_put(carry.tickets, chunk, received.ticket),
            report=carry.report._replace(overflow=overflow),
        )

    def _run_experts(self, carry: Overlapped, chunk: int) -> Overlapped:
        return carry._replace(rows=_put(carry.rows, chunk, self.experts(carry.rows[chunk])))

    def _prepare_combine(self, carry: Overlapped, chunk: int) -> Overlapped:
        dispatcher = self.overlap.dispatchers[chunk]
        return carry._replace(
            rows=_put(carry.rows, chunk, dispatcher.combine_prepare(carry.rows[chunk], carry.tickets[chunk]))
        )

    def _start_combine(self, carry: Overlapped, chunk: int) -> Overlapped:
        exchange = partial(self.overlap.dispatchers[chunk].combine_exchange, ticket=carry.tickets[chunk])
        return carry._replace(rows=_put(carry.rows, chunk, self.overlap.exchanges.start(exchange, carry.rows[chunk])))

    def _end_combine(self, carry: Overlapped, chunk: int) -> Overlapped:
        returned, ticket = carry.rows[chunk].wait(), carry.tickets[chunk]
        y_cL = self.overlap.dispatchers[chunk].combine_finish(returned, ticket)
        return carry._replace(rows=_put(carry.rows, chunk, y_cL), tickets=_put(carry.tickets, chunk, None))

    def _shared_up(self, carry: Overlapped, _: int) -> Overlapped:
        assert self.shared is not None
        return carry._replace(shared=self.shared.up(carry.x_tD))

    def _shared_down(self, carry: Overlapped, _: int) -> Overlapped:
        assert self.shared is not None and carry.shared is not None
        return carry._replace(shared=self.shared.down(carry.shared, carry.x_tD))


def split_tokens(x_tL: Tensor, routing: Routing, chunks: int) -> tuple[ChunkTokens, ...]:
    """Neighbouring tokens together, in chunks that differ by at most one; some are empty where there are fewer."""
    if chunks == 1:
        return (ChunkTokens(x_tL, routing),)
    # Split and not sliced: the gradient is one copy then, and no sum of as many with zeros.
    sizes = shard_sizes(x_tL.shape[0], chunks)
    experts, probs = routing.experts.split(sizes), routing.probs.split(sizes)
    kept: Sequence[Tensor | None] = (None,) * chunks if routing.kept is None else routing.kept.split(sizes)
    return tuple(
        ChunkTokens(x_cL, Routing(*assigned))
        for x_cL, *assigned in zip(x_tL.split(sizes), experts, probs, kept, strict=True)
    )


T = TypeVar("T")


def _put(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _run(step: ChunkStep, chunk: int, carry: Overlapped) -> Overlapped:
    return step(carry, chunk)
