"""Which activations wait in the host's memory, in which order they come back, and whether they come in time.

A **chunk** is one stage's forward of one microbatch; its activations are copied out block by block (a group each) while
the forward runs. An order of actions says which chunk goes backward when, so the order of reloads is known before the
step begins: chunks as their backwards come, and the blocks of a chunk from last to first. The last block of a chunk
whose backward is the next computation after its own forward stays: nothing would hide its copies.

When the backward reaches a group, the next ``ahead`` groups are asked for; when a forward begins, the first groups of
the chunk that goes backward next. The pipeline's runtime follows these rules (``nn/offload.py``), and
``simulate_offload`` says for given bytes, link and durations how often and how long the backward waits (a **stall**).
Copies out and copies back have a direction of the link each, as PCIe and NVLink-C2C do, and are served in order. A
wait delays the later actions of its own rank as far as these were not idle; other ranks are not delayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moefold.schedule.actions import PRODUCES_GRADIENT, TRANSFERS, Action, Kind, Order
from moefold.schedule.simulate import Durations, simulate

# (stage, microbatch)
Chunk = tuple[int, int]


@dataclass(frozen=True)
class OffloadOrder:
    """Of one rank: chunks in the order of their backwards, and those whose last block is not offloaded."""

    backward: tuple[Chunk, ...]
    stays: frozenset[Chunk]


def offload_order(actions: Sequence[Action]) -> OffloadOrder:
    computed = [
        action for action in actions if action.kind not in TRANSFERS and action.kind is not Kind.BACKWARD_WEIGHT
    ]
    forwards = [{_chunk(part) for part in action.parts if part.kind is Kind.FORWARD} for action in computed]
    backwards = [[_chunk(part) for part in action.parts if part.kind in PRODUCES_GRADIENT] for action in computed]
    stays = {chunk for before, after in zip(forwards, backwards[1:]) for chunk in after if chunk in before}
    return OffloadOrder(tuple(chunk for chunks in backwards for chunk in chunks), frozenset(stays))


def _chunk(action: Action) -> Chunk:
    return action.stage, action.microbatch


@dataclass(frozen=True)
class OffloadTimeline:
    """Of one rank: how often each chunk's backward waited for a reload, how long all of them waited, the last stop, and
    the most bytes in the host's memory."""

    stalls: dict[Chunk, int]
    waited: float
    finish: float
    host_bytes: float

    @property
    def most_stalls(self) -> int:
        return max(self.stalls.values(), default=0)


def simulate_offload(
    order: Order,
    rank: int,
    group_bytes: Sequence[float],
    bytes_per_second: float,
    durations: Durations,
    ahead: int = 1,
    reloads: Sequence[Chunk] | None = None,
) -> OffloadTimeline:
    """``group_bytes``: of each block of a stage, first to last, the same for all stages of the rank; ``durations`` in
    seconds. ``reloads`` replaces the order in which chunks are asked for, to see what a wrong one costs."""
    found = offload_order(order.actions[rank])
    state = _Simulation(list(group_bytes), bytes_per_second, ahead, tuple(reloads or found.backward), found.stays)
    spans = simulate(order, durations).spans[rank]
    clock = 0.0
    for action, (start, stop) in zip(order.actions[rank], spans, strict=True):
        if action.kind in TRANSFERS:
            clock = max(clock, start)
            continue
        clock = state.run(action, max(clock, start), stop - start)
    return OffloadTimeline(dict(state.stalls), state.waited, clock, state.host_peak)


class _Simulation:
    """Groups by chunk and block: when their copy out ends, and when their copy back does, once asked for."""

    def __init__(
        self, group_bytes: list[float], rate: float, ahead: int, order: tuple[Chunk, ...], stays: frozenset[Chunk]
    ) -> None:
        self.sizes, self.rate, self.ahead, self.order, self.stays = group_bytes, rate, ahead, order, stays
        self.out_done: dict[tuple[Chunk, int], float] = {}
        self.back_done: dict[tuple[Chunk, int], float] = {}
        self.link_out = self.link_back = self.waited = self.host = self.host_peak = 0.0
        self.stalls: Counter[Chunk] = Counter()
        self.num_backwards = 0

    def run(self, action: Action, start: float, duration: float) -> float:
        """The action's stop. The two halves of an overlapped pair advance side by side."""
        share, late = duration / len(self.sizes), 0.0
        kinds = {part.kind: _chunk(part) for part in action.parts}
        forward = kinds.get(Kind.FORWARD)
        backward = next((chunk for kind, chunk in kinds.items() if kind in PRODUCES_GRADIENT), None)
        if forward is not None:
            self.ask_for_next(start)
        for block in range(len(self.sizes)):
            if backward is not None:
                late += self.reach(backward, len(self.sizes) - 1 - block, start + block * share + late)
            is_last = block == len(self.sizes) - 1
            if forward is not None and not (is_last and forward in self.stays):
                self.send(forward, block, start + (block + 1) * share + late)
        if backward is not None:
            self.num_backwards += 1
        return start + duration + late

    def send(self, chunk: Chunk, block: int, now: float) -> None:
        self.link_out = max(self.link_out, now) + self.sizes[block] / self.rate
        self.out_done[chunk, block] = self.link_out
        self.host += self.sizes[block]
        self.host_peak = max(self.host_peak, self.host)

    def ask(self, chunk: Chunk, block: int, now: float) -> None:
        if (chunk, block) in self.out_done and (chunk, block) not in self.back_done:
            # Its own copy out comes first.
            begin = max(self.link_back, now, self.out_done[chunk, block])
            self.link_back = self.back_done[chunk, block] = begin + self.sizes[block] / self.rate
            self.host -= self.sizes[block]

    def ask_for_next(self, now: float) -> None:
        for chunk in self.order[self.num_backwards : self.num_backwards + 1]:
            for block in range(len(self.sizes))[: -self.ahead - 1 : -1]:
                self.ask(chunk, block, now)

    def reach(self, chunk: Chunk, block: int, now: float) -> float:
        """How long the backward waits for this group."""
        if (chunk, block) not in self.out_done:
            self.ask_following(chunk, block, now)
            return 0.0
        self.ask(chunk, block, now)
        wait = max(0.0, self.back_done[chunk, block] - now)
        if wait:
            self.stalls[chunk] += 1
            self.waited += wait
        self.ask_following(chunk, block, now + wait)
        return wait

    def ask_following(self, chunk: Chunk, block: int, now: float) -> None:
        for count, following in enumerate(self.following(chunk, block)):
            if count == self.ahead:
                return
            self.ask(*following, now)

    def following(self, chunk: Chunk, block: int) -> Iterator[tuple[Chunk, int]]:
        """Groups that are away, in the order of reloads, after this one."""
        at = self.order.index(chunk)
        for each in self.order[at:]:
            first = block if each == chunk else len(self.sizes)
            yield from ((each, number) for number in reversed(range(first)) if (each, number) in self.out_done)
