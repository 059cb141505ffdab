"""Named orders of a layer's operations, as data: one microbatch, its halves, or the forward of one beside the backward
of another.

An order of one microbatch is two lists of operations, of a layer's forward and of its backward. An order of two is two
such lists in turn: each goes on up to its next exchange, issues that, and gives way to the other. The counts before a
dispatch are a few numbers and are waited for at once, so that an exchange hides behind computation and not behind them.

`forward_backward`, `shared_experts` and chunks are carried out by the trainer (`pipeline/overlap.py`,
`moe/overlapped_layer.py`). MegaScale-MoE's orders (section 4.1) are read from the paper's text and are for comparison:
its weight gradients and what it computes and sends again are beside the exchanges of the same microbatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moefold.errors import ConfigError, Problem, UnknownNameError
from moefold.schedule.layer_operations import (
    IN_CHUNKS,
    PLAIN,
    STEPS,
    LayerTimeline,
    Operation,
    Variant,
    backward_operations,
    check_order,
    chunk_costs,
    chunk_name,
    forward_operations,
    simulate_order,
    step_and_chunk,
)

# Waited for as soon as they are issued: they do not end a turn.
AT_ONCE = frozenset({"dispatch_counts"})

_DISPATCH = ("dispatch_prepare", "dispatch_exchange")
_EXPERTS = ("experts_up", "activation", "experts_down")
_COMBINE = ("combine_prepare", "combine_exchange")
_SHARED = ("shared_up", "shared_down")
_START = ("attention", "route", "dispatch_counts")


def _forward(
    beside_dispatch: tuple[str, ...] = (), beside_combine: tuple[str, ...] = (), chunks: int = 1
) -> tuple[str, ...]:
    """With these steps of the shared expert beside either exchange; the others are with the experts.

    All chunks leave one after the other; each is computed when it has arrived, while those behind it are on their way,
    and goes back while those behind it are computed.
    """

    def of_chunk(steps: tuple[str, ...], chunk: int) -> list[str]:
        return [chunk_name(step, chunk, chunks) if step in IN_CHUNKS else step for step in steps]

    rest = tuple(step for step in _SHARED if step not in beside_dispatch + beside_combine)
    names = [*_START, *(name for chunk in range(chunks) for name in of_chunk(_DISPATCH, chunk)), *beside_dispatch]
    for chunk in range(chunks):
        names += of_chunk(("dispatch_finish", *(() if chunk else rest), *_EXPERTS, *_COMBINE), chunk)
    names += [*beside_combine, *(chunk_name("combine_finish", chunk, chunks) for chunk in range(chunks)), "output"]
    return tuple(f"F {name}" for name in names)


def mirrored(forward: Sequence[str]) -> tuple[str, ...]:
    """The backward of a forward order: its reverse, in which an exchange is issued as soon as the gradients of what it
    brought are there. So what ran between its issue and its first reader still does."""
    names = [name.removeprefix("F ") for name in reversed(forward)]
    names.remove("dispatch_counts")
    for name in [name for name in names if step_and_chunk(name)[0] in ("dispatch_exchange", "combine_exchange")]:
        names.remove(name)
        names.insert(names.index(name.replace("exchange", "finish")) + 1, name)
    return tuple(f"B {name}" for name in names)


def exchange_order(chunks: int, shared_beside: bool) -> tuple[Operation, ...]:
    """The forward of one layer as the trainer runs it, checked (`moe/overlapped_layer.py`)."""
    names = _forward(("shared_up",), ("shared_down",), chunks) if shared_beside else _forward(chunks=chunks)
    priced = chunk_costs({step.name: step.cost for step in STEPS}, chunks)
    operations = {operation.name: operation for operation in forward_operations(0, 0, priced, Variant(chunks=chunks))}
    order = tuple(operations[name.removeprefix("F ")] for name in names)
    check_order(tuple(operations.values()), [order])
    return order


@dataclass(frozen=True)
class NamedOrder:
    """``lists``: of a layer's operations; each goes through all layers. Of two lists the operations take turns."""

    name: str
    summary: str
    # (microbatch, operations of a layer as "direction step"); a list of backwards goes through the layers in reverse.
    lists: tuple[tuple[int, tuple[str, ...]], ...]
    in_turn: bool = False
    variant: Variant = PLAIN


_SEQUENTIAL = _forward()
_BOTH = _forward(("shared_up",), ("shared_down",))
_MATMULS = ("experts_down", "experts_up")

_ALL = (
    NamedOrder(
        "sequential",
        "one microbatch, one operation after the other: every exchange is exposed",
        ((0, _SEQUENTIAL), (0, mirrored(_SEQUENTIAL))),
    ),
    NamedOrder(
        "shared_beside_dispatch",
        "the shared expert computes while rows travel to the experts",
        ((0, order := _forward(_SHARED)), (0, mirrored(order))),
    ),
    NamedOrder(
        "shared_beside_combine",
        "the shared expert computes while rows travel back",
        ((0, order := _forward((), _SHARED)), (0, mirrored(order))),
    ),
    NamedOrder(
        "shared_experts",
        "its first matmul beside dispatch, its second beside combine (parallel.overlap)",
        ((0, _BOTH), (0, mirrored(_BOTH))),
    ),
    NamedOrder(
        "chunks",
        "two chunks of the tokens: each is on its way while the experts compute the other (parallel.exchange_chunks)",
        ((0, order := _forward(chunks=2)), (0, mirrored(order))),
        variant=Variant(chunks=2),
    ),
    NamedOrder(
        "chunks_shared_experts",
        "the same, and the shared expert beside the first chunk's dispatch and the last one's combine",
        ((0, order := _forward(("shared_up",), ("shared_down",), 2)), (0, mirrored(order))),
        variant=Variant(chunks=2),
    ),
    NamedOrder(
        "forward_backward",
        "the forward of one microbatch and the backward of another, in turn (schedules with pairs)",
        ((0, mirrored(_SEQUENTIAL)), (1, _SEQUENTIAL)),
        in_turn=True,
    ),
    NamedOrder(
        "forward_forward",
        "the forwards of two microbatches, or of two halves of one, in turn",
        ((0, _SEQUENTIAL), (1, _SEQUENTIAL)),
        in_turn=True,
    ),
    NamedOrder(
        "backward_backward",
        "the backwards of two microbatches, or of two halves of one, in turn",
        ((0, mirrored(_SEQUENTIAL)), (1, mirrored(_SEQUENTIAL))),
        in_turn=True,
    ),
    NamedOrder(
        "megascale_operators",
        "MegaScale-MoE, operators reordered: experts' weight gradients beside the backward's exchanges",
        (
            (0, _BOTH),
            (
                0,
                (
                    *("B output", "B combine_finish", "B combine_exchange", "B shared_down", "B combine_prepare"),
                    *("B experts_down", "B activation", "B experts_up", "B dispatch_finish", "B dispatch_exchange"),
                    *("B shared_up", "W experts_down", "W experts_up", "B dispatch_prepare", "B route", "B attention"),
                ),
            ),
        ),
        variant=Variant(_MATMULS),
    ),
    NamedOrder(
        "megascale_holistic",
        "MegaScale-MoE, holistic: activations and dispatched rows made again beside the backward's exchanges",
        (
            (0, _BOTH),
            (
                0,
                (
                    *(
                        "B output",
                        "B combine_finish",
                        "B combine_exchange",
                        "R dispatch_prepare",
                        "R dispatch_exchange",
                    ),
                    *("R activation", "B shared_down", "B combine_prepare", "B experts_down", "B activation"),
                    *("B experts_up", "B dispatch_finish", "B dispatch_exchange", "R dispatch_finish", "B shared_up"),
                    *("W experts_down", "W experts_up", "B dispatch_prepare", "B route", "B attention"),
                ),
            ),
        ),
        variant=Variant(
            _MATMULS,
            {
                "dispatch_prepare": None,
                "dispatch_exchange": "dispatch_prepare",
                "dispatch_finish": "dispatch_exchange",
                "activation": None,
            },
        ),
    ),
)
LAYER_ORDERS: Mapping[str, NamedOrder] = MappingProxyType({order.name: order for order in _ALL})


def take_turns(gives_way: Sequence[Sequence[bool]]) -> tuple[int, ...]:
    """Which list the next operation is taken from, until all are: each goes on until it gives way to the next."""
    left = {number: deque(turns) for number, turns in enumerate(gives_way)}
    taken: list[int] = []
    while any(left.values()):
        for number, turns in left.items():
            while turns:
                taken.append(number)
                if turns.popleft():
                    break
    return tuple(taken)


def layer_order(name: str, layers: int = 1, costs: Mapping[str, float] | None = None) -> LayerTimeline:
    """A named order over so many layers, checked and simulated. ``costs`` replaces those of some steps' forwards."""
    if name not in LAYER_ORDERS:
        raise UnknownNameError("layer order", name, LAYER_ORDERS)
    if layers < 1:
        raise ConfigError(Problem("layers", f"must be positive, not {layers}", "use 1 or more"))
    named = LAYER_ORDERS[name]
    priced = chunk_costs(step_costs(costs or {}), named.variant.chunks)
    operations: list[Operation] = []
    chains = []
    for microbatch, steps in named.lists:
        is_forward = all(step.startswith("F") for step in steps)
        chain: list[Operation] = []
        for layer in range(layers) if is_forward else reversed(range(layers)):
            made = (
                forward_operations(microbatch, layer, priced, named.variant)
                if is_forward
                else backward_operations(microbatch, layer, priced, named.variant)
            )
            found = {f"{operation.direction} {operation.name}": operation for operation in made}
            operations += found.values()
            chain += [found[step] for step in steps]
        chains.append(chain)
    order = _in_turn(chains) if named.in_turn else [operation for chain in chains for operation in chain]
    check_order(operations, [order])
    return simulate_order(name, order)


def _in_turn(chains: Sequence[Sequence[Operation]]) -> list[Operation]:
    turns = [[each.communicates and each.name not in AT_ONCE for each in chain] for chain in chains]
    waiting = [iter(chain) for chain in chains]
    return [next(waiting[number]) for number in take_turns(turns)]


def step_costs(costs: Mapping[str, float]) -> dict[str, float]:
    """Of every step's forward."""
    known = {step.name: step.cost for step in STEPS}
    for name, cost in costs.items():
        if name not in known:
            raise UnknownNameError("operation", name, known)
        if not 0 <= cost < float("inf"):
            raise ConfigError(Problem(f"cost of {name}", f"must be 0 or more, not {cost}", "give a time"))
    return known | dict(costs)
