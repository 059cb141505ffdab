"""A layer as a graph of operations: what each reads and writes, on which of two streams it runs, and how long it takes.

    attention -> route -> counts -> prepare -> exchange -> finish -> experts -> prepare -> exchange -> finish -> output
                      \\                                                                                      /
                       `-------------------------- shared expert ---------------------------------------------

The forward is written down once, below. The backward follows from it: an operation's backward reads the gradients that
the backwards of all readers of its outputs have written, and what its forward saved. A weight gradient may be an
operation of its own, which nothing waits for; and what was not saved may be computed or sent again.

An order is a list of these operations, as the host issues them. Each stream runs its own in this sequence, one after
the other, and starts one as soon as the stream is free and the inputs are there: CUDA streams with events work so, and
so does a thread that communicates beside one that computes. The simulation follows from that alone; ``exposed`` is the
time in which nothing computes.

The tokens of a microbatch may go to the experts and back in chunks. Then a step between the counts and the output is
one operation per chunk, such as ``experts_up.0``, each with its share of the cost: a chunk's experts compute while
another chunk is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from moefold.errors import OrderError

StreamName = Literal["compute", "comm"]
STREAMS: tuple[StreamName, ...] = ("compute", "comm")
# Forward, backward (of inputs, and of weights unless that is apart), weight gradients, forward once more.
Direction = Literal["F", "B", "W", "R"]


@dataclass(frozen=True)
class Step:
    """One operation of a layer's forward. Values are names inside the layer; ``in`` is what the layer before wrote."""

    name: str
    stream: StreamName
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    # In any unit; of a plausible layer, for pictures.
    cost: float
    has_weights: bool = False
    # Counts have no gradient.
    has_backward: bool = True


STEPS: tuple[Step, ...] = (
    Step("attention", "compute", ("in",), ("x",), 3.0, has_weights=True),
    Step("route", "compute", ("x",), ("routing",), 0.2, has_weights=True),
    Step("dispatch_counts", "comm", ("routing",), ("counts",), 0.1, has_backward=False),
    Step("dispatch_prepare", "compute", ("x", "routing", "counts"), ("sent",), 0.2),
    Step("dispatch_exchange", "comm", ("sent",), ("received",), 2.0),
    Step("dispatch_finish", "compute", ("received",), ("rows",), 0.2),
    Step("shared_up", "compute", ("x",), ("shared_hidden",), 0.6, has_weights=True),
    Step("experts_up", "compute", ("rows",), ("hidden",), 2.0, has_weights=True),
    Step("activation", "compute", ("hidden",), ("activated",), 0.2),
    Step("experts_down", "compute", ("activated",), ("expert_out",), 1.0, has_weights=True),
    Step("combine_prepare", "compute", ("expert_out",), ("outgoing",), 0.2),
    Step("combine_exchange", "comm", ("outgoing",), ("returned",), 2.0),
    Step("shared_down", "compute", ("shared_hidden",), ("shared",), 0.3, has_weights=True),
    Step("combine_finish", "compute", ("returned",), ("y",), 0.2),
    Step("output", "compute", ("x", "y", "shared"), ("out",), 0.2),
)
# Steps of which every chunk of a microbatch has its own.
IN_CHUNKS: tuple[str, ...] = (
    *("dispatch_prepare", "dispatch_exchange", "dispatch_finish"),
    *("experts_up", "activation", "experts_down"),
    *("combine_prepare", "combine_exchange", "combine_finish"),
)


def chunk_name(step: str, chunk: int, chunks: int) -> str:
    """Of a step or a value; the whole microbatch is one chunk without a number."""
    return step if chunks == 1 else f"{step}.{chunk}"


def step_and_chunk(name: str) -> tuple[str, int]:
    """From an operation's name."""
    step, _, chunk = name.partition(".")
    return step, int(chunk or 0)


@cache
def steps_of(chunks: int) -> tuple[Step, ...]:
    """The steps of a layer that sends its tokens in so many chunks."""
    of_chunks = {value for step in STEPS if step.name in IN_CHUNKS for value in step.writes}

    def renamed(values: tuple[str, ...], numbers: Sequence[int]) -> tuple[str, ...]:
        return tuple(
            name
            for value in values
            for name in ([chunk_name(value, n, chunks) for n in numbers] if value in of_chunks else [value])
        )

    found: list[Step] = []
    for step in STEPS:
        if step.name not in IN_CHUNKS:
            found.append(replace(step, reads=renamed(step.reads, range(chunks))))
            continue
        for chunk in range(chunks):
            reads, writes = (renamed(values, [chunk]) for values in (step.reads, step.writes))
            name = chunk_name(step.name, chunk, chunks)
            found.append(replace(step, name=name, reads=reads, writes=writes, cost=step.cost / chunks))
    return tuple(found)


def chunk_costs(costs: Mapping[str, float], chunks: int) -> dict[str, float]:
    """Of the steps of all chunks, from the costs of the whole microbatch's."""
    found = {}
    for step in steps_of(chunks):
        whole, _ = step_and_chunk(step.name)
        found[step.name] = costs[whole] / (chunks if whole in IN_CHUNKS else 1)
    return found


@dataclass(frozen=True)
class Operation:
    """A step of one layer and microbatch in one direction. Values are names of the whole graph."""

    direction: Direction
    microbatch: int
    layer: int
    name: str
    stream: StreamName
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cost: float

    def __str__(self) -> str:
        return f"{self.direction}{self.microbatch}.{self.layer}.{self.name}"

    @property
    def communicates(self) -> bool:
        return self.stream == "comm"


@dataclass(frozen=True)
class Variant:
    """``weights_apart``: steps whose weight gradients are operations of their own. ``again``: steps that are repeated
    for them, because their outputs were not saved, and the repeated step that each follows. ``chunks``: of the tokens
    of a microbatch."""

    weights_apart: tuple[str, ...] = ()
    again: Mapping[str, str | None] | None = None
    chunks: int = 1


PLAIN = Variant()


def forward_operations(
    microbatch: int, layer: int, costs: Mapping[str, float], variant: Variant = PLAIN
) -> Iterator[Operation]:
    for step in steps_of(variant.chunks):
        reads = tuple(_value(microbatch, layer, name) for name in step.reads)
        writes = tuple(_value(microbatch, layer, name) for name in step.writes)
        saved = (_saved(microbatch, layer, step.name),)
        yield Operation("F", microbatch, layer, step.name, step.stream, reads, writes + saved, costs[step.name])


def backward_operations(
    microbatch: int, layer: int, costs: Mapping[str, float], variant: Variant = PLAIN
) -> Iterator[Operation]:
    """In the reverse order of the forward; what is apart or repeated follows."""
    where, steps = (microbatch, layer), steps_of(variant.chunks)
    named = {step.name: step for step in steps}
    for step in reversed(steps):
        if not step.has_backward:
            continue
        reads = tuple(grad for name in step.writes for grad in _gradients(*where, name, steps))
        writes = tuple(f"d.{_value(*where, name)}@{layer}.{step.name}" for name in step.reads)
        apart = step.name in variant.weights_apart
        # A matmul's gradients are two matmuls.
        cost = costs[step.name] * (2 if step.has_weights and not apart else 1)
        outputs = (*writes, _to_weights(*where, step.name))
        yield Operation("B", *where, step.name, step.stream, (*reads, _saved(*where, step.name)), outputs, cost)
    again = variant.again or {}
    for name, source in again.items():
        inputs = () if source is None else (_again(*where, source),)
        yield Operation("R", *where, name, named[name].stream, inputs, (_again(*where, name),), costs[name])
    for name in variant.weights_apart:
        repeated = tuple(_again(*where, made) for made in again if _feeds(named[made], named[name]))
        yield Operation("W", *where, name, "compute", (_to_weights(*where, name), *repeated), (), costs[name])


def _feeds(made: Step, reader: Step) -> bool:
    return bool(set(made.writes) & set(reader.reads))


def _gradients(microbatch: int, layer: int, name: str, steps: Sequence[Step]) -> Iterator[str]:
    """What the backwards of all readers of a value write; of a layer's output, those of the layer after it."""
    readers, where = (layer, name), layer
    if name == "out":
        readers, where = (layer + 1, "in"), layer + 1
    for step in steps:
        if readers[1] in step.reads and step.has_backward:
            yield f"d.{_value(microbatch, layer, name)}@{where}.{step.name}"


def _value(microbatch: int, layer: int, name: str) -> str:
    return f"{microbatch}.{layer - 1}.out" if name == "in" else f"{microbatch}.{layer}.{name}"


def _saved(microbatch: int, layer: int, step: str) -> str:
    return f"saved.{microbatch}.{layer}.{step}"


def _to_weights(microbatch: int, layer: int, step: str) -> str:
    return f"dw.{microbatch}.{layer}.{step}"


def _again(microbatch: int, layer: int, step: str) -> str:
    return f"again.{microbatch}.{layer}.{step}"


def check_order(operations: Sequence[Operation], ranks: Sequence[Sequence[Operation]]) -> None:
    """OrderError unless every rank issues each of ``operations`` once, after those whose values it reads, and all ranks
    issue their collectives in the same sequence.

    Values that none of the operations writes are there from the beginning.
    """
    made_by = {value: operation for operation in operations for value in operation.outputs}
    for rank, order in enumerate(ranks):
        _check_rank(rank, order, operations, made_by)
    first = [operation for operation in ranks[0] if operation.communicates]
    for rank, order in enumerate(ranks):
        issued = [operation for operation in order if operation.communicates]
        for place, (one, other) in enumerate(zip(first, issued, strict=True)):
            if one != other:
                raise OrderError(
                    f"rank {rank} issues {other} as collective {place}, where rank 0 issues {one}: they would wait for "
                    f"each other forever; give all ranks one order of communication"
                )


def _check_rank(
    rank: int, order: Sequence[Operation], operations: Sequence[Operation], made_by: Mapping[str, Operation]
) -> None:
    wanted, issued = set(operations), set[Operation]()
    for place, operation in enumerate(order):
        if operation in issued:
            raise OrderError(f"rank {rank}, place {place}: {operation} a second time; each operation runs once")
        if operation not in wanted:
            raise OrderError(f"rank {rank}, place {place}: {operation} is not an operation of this layer")
        for value in operation.inputs:
            maker = made_by.get(value)
            if maker is not None and maker not in issued:
                raise OrderError(
                    f"rank {rank}, place {place}: {operation} reads {value} before {maker} has written it; put {maker} "
                    f"first"
                )
        issued.add(operation)
    missing = [operation for operation in operations if operation not in issued]
    if missing:
        raise OrderError(f"rank {rank}: {len(missing)} operations are missing: {', '.join(map(str, missing[:4]))}")


@dataclass(frozen=True)
class LayerTimeline:
    """When each operation of an order runs: (start, stop)."""

    name: str
    order: tuple[Operation, ...]
    spans: tuple[tuple[float, float], ...]

    @property
    def finish(self) -> float:
        return max((stop for _, stop in self.spans), default=0.0)

    def busy(self, stream: StreamName) -> float:
        spans = zip(self.order, self.spans, strict=True)
        return sum(stop - start for operation, (start, stop) in spans if operation.stream == stream)

    @property
    def exposed(self) -> float:
        """Time in which nothing computes."""
        return self.finish - self.busy("compute")

    @property
    def bound(self) -> float:
        """No order of these operations on two streams is shorter."""
        return max(self.busy(stream) for stream in STREAMS)


def simulate_order(name: str, order: Sequence[Operation]) -> LayerTimeline:
    """Both streams in the sequence of ``order``."""
    free, made = dict.fromkeys(STREAMS, 0.0), dict[str, float]()
    spans = []
    for operation in order:
        start = max([free[operation.stream], *(made.get(value, 0.0) for value in operation.inputs)])
        stop = start + operation.cost
        free[operation.stream] = stop
        made.update(dict.fromkeys(operation.outputs, stop))
        spans.append((start, stop))
    return LayerTimeline(name, tuple(order), tuple(spans))
