"""What is captured as CUDA graphs: which phases of a block, how many graphs, and which microbatch uses which.

A CUDA graph is a sequence of kernels that is launched as one, with the addresses it had when it was captured. So what
it reads, writes and saves for the backward has memory of its own, and a graph can serve one microbatch at a time: from
its forward until its backward is done. A rank holds several microbatches of a stage in this time; each takes a **slot**
of the stage, the lowest that is free, and every slot has graphs of its own. The order of actions says how many slots
there are, before a process starts.

`kernels.graph_scope` names phases by Megatron's words. Captured phases that follow each other are one **region**, and
a region has two graphs: forward and backward. Collectives are never inside: ranks, timeouts and records of hangs see
each of them. So

    graphs of a rank = sum over its stages of  slots * 2 * (regions of the stage's layers)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from moefold.config.precision import GraphScope
from moefold.schedule.actions import PRODUCES_GRADIENT, Action, Kind

# (stage, microbatch)
Key = tuple[int, int]

# In order; those of the communication stream are in no scope.
DENSE_PHASES = ("attention", "feed_forward")
MOE_PHASES = (
    "attention",
    "route",
    "dispatch_counts",
    "dispatch_prepare",
    "dispatch_exchange",
    "dispatch_finish",
    "experts",
    "combine_prepare",
    "combine_exchange",
    "combine_finish",
    "output",
)
# The phases of each scope that this trainer captures.
SCOPE_PHASES: Mapping[GraphScope, tuple[str, ...]] = {
    "attn": ("attention",),
    "mlp": ("feed_forward",),
    "moe_router": ("route",),
    "moe": ("dispatch_prepare", "dispatch_finish", "experts", "combine_prepare", "combine_finish", "output"),
}


def captured_phases(scope: Collection[GraphScope]) -> frozenset[str]:
    return frozenset(phase for name in scope for phase in SCOPE_PHASES.get(name, ()))


def regions(phases: Sequence[str], captured: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Runs of captured phases, each as long as it can be."""
    found: list[list[str]] = []
    before = False
    for phase in phases:
        if phase in captured:
            if not before:
                found.append([])
            found[-1].append(phase)
        before = phase in captured
    return tuple(map(tuple, found))


def graph_slots(actions: Sequence[Action]) -> dict[Key, int]:
    """The slot of each microbatch in each stage of a rank: the lowest that is free when its forward starts."""
    taken: dict[int, set[int]] = {}
    slots: dict[Key, int] = {}
    for action in actions:
        # Of a pair, the forward starts before the backward has ended.
        for part in sorted(action.parts, key=lambda part: part.kind is not Kind.FORWARD):
            key = part.stage, part.microbatch
            in_use = taken.setdefault(part.stage, set())
            if part.kind is Kind.FORWARD:
                slots[key] = next(number for number in range(len(in_use) + 1) if number not in in_use)
                in_use.add(slots[key])
            elif part.kind in PRODUCES_GRADIENT:
                in_use.discard(slots[key])
    return slots


def slots_by_stage(actions: Sequence[Action]) -> dict[int, int]:
    """How many slots each stage of a rank needs."""
    found: dict[int, int] = {}
    for (stage, _), slot in graph_slots(actions).items():
        found[stage] = max(found.get(stage, 0), slot + 1)
    return found


def num_graphs(slots: Mapping[int, int], regions_of_stage: Mapping[int, int]) -> int:
    """Of a rank: forward and backward of every region in every slot."""
    return sum(2 * count * regions_of_stage[stage] for stage, count in slots.items())
