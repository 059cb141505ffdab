"""The catalog of pipeline schedules: name, the sizes each accepts, and the function that builds its order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moefold.config.parallel import ParallelConfig
from moefold.errors import ConfigError, Problem, UnknownNameError
from moefold.schedule.actions import Order, Placement
from moefold.schedule.one_f_one_b import gpipe, interleaved, interleaved_overlapped, one_f_one_b, one_f_one_b_overlapped
from moefold.schedule.zero_bubble import dualpipe_v, zb_h1, zb_v


@dataclass(frozen=True)
class Schedule:
    """A named pipeline schedule."""

    name: str
    summary: str
    # (ranks, virtual stages per rank, microbatches) -> an order without transfers.
    make: Callable[[int, int, int], Order]
    # The only number of virtual stages that it accepts; None accepts any.
    virtual: int | None = 1
    placement: Placement = "loop"
    splits_backward: bool = False
    overlaps: bool = False
    # At least so many microbatches per stage.
    microbatches_per_stage: int = 0

    def problems(self, ranks: int, virtual: int, microbatches: int) -> tuple[Problem, ...]:
        """Why it has no order of these sizes; empty if it has one."""
        sizes = {"parallel.pp": ranks, "parallel.vpp": virtual, "microbatches": microbatches}
        found = [
            Problem(path, f"must be positive, not {size}", "use 1 or more") for path, size in sizes.items() if size < 1
        ]
        if self.virtual not in (None, virtual):
            others = [other for other, schedule in SCHEDULES.items() if schedule.virtual in (None, virtual)]
            fix = f"set parallel.vpp to {self.virtual}, or parallel.schedule to one of {', '.join(others)}"
            found.append(Problem("parallel.vpp", f"{self.name} has {self.virtual} stages per rank, not {virtual}", fix))
        fewest = self.microbatches_per_stage * ranks * virtual
        if not found and microbatches < fewest:
            message = (
                f"{self.name} over {ranks * virtual} stages needs at least {fewest} microbatches, not {microbatches}"
            )
            found.append(Problem("microbatches", message, "use more microbatches, fewer ranks, or zb_v"))
        return tuple(found)

    def build(self, ranks: int, virtual: int, microbatches: int) -> Order:
        """The computations of every rank; ConfigError if there is no such order."""
        found = self.problems(ranks, virtual, microbatches)
        if found:
            raise ConfigError(*found)
        return self.make(ranks, virtual, microbatches)


def reshard_per_step(num_stages: int, *, overlaps: bool, splits_backward: bool) -> bool:
    """Whether sharded parameters are unsharded once per step and stay so, instead of once per layer and pass.

    With several stages every microbatch would unshard all of them again; where phases of a layer run outside of its
    module's forward and backward, FSDP's hooks do not fire. The trainer and the planner both ask here.
    """
    return num_stages > 1 or overlaps or splits_backward


def run_reshards_per_step(parallel: ParallelConfig) -> bool:
    schedule = schedule_named(parallel.schedule)
    return reshard_per_step(
        parallel.pp * parallel.vpp,
        # Experts that run once per chunk would be gathered, and their gradients reduced, as often.
        overlaps=schedule.overlaps or parallel.exchange_chunks > 1,
        splits_backward=schedule.splits_backward,
    )


def schedule_named(name: str) -> Schedule:
    if name not in SCHEDULES:
        raise UnknownNameError("schedule", name, SCHEDULES)
    return SCHEDULES[name]


_ALL = (
    Schedule(
        "gpipe",
        "all forwards, then all backwards",
        lambda ranks, virtual, microbatches: gpipe(ranks, microbatches),
    ),
    Schedule(
        "1f1b",
        "one forward, one backward, alternating",
        lambda ranks, virtual, microbatches: one_f_one_b(ranks, microbatches),
    ),
    Schedule(
        "1f1b_overlapped",
        "1f1b with longer warm-ups, so that each forward runs beside a backward",
        lambda ranks, virtual, microbatches: one_f_one_b_overlapped(ranks, microbatches),
        overlaps=True,
    ),
    Schedule(
        "interleaved",
        "1f1b with several stages per rank",
        interleaved,
        virtual=None,
    ),
    Schedule(
        "interleaved_overlapped",
        "interleaved with one more warm-up microbatch, so that each forward runs beside a backward",
        interleaved_overlapped,
        virtual=None,
        overlaps=True,
    ),
    Schedule(
        "zb_h1",
        "1f1b with weight gradients deferred into the bubble",
        lambda ranks, virtual, microbatches: zb_h1(ranks, microbatches),
        splits_backward=True,
    ),
    Schedule(
        "zb_v",
        "two stages per rank in a V, weight gradients fill the bubble",
        lambda ranks, virtual, microbatches: zb_v(ranks, microbatches),
        virtual=2,
        placement="v",
        splits_backward=True,
    ),
    Schedule(
        "dualpipe_v",
        "two stages per rank in a V, each forward beside the backward of the other stage",
        lambda ranks, virtual, microbatches: dualpipe_v(ranks, microbatches),
        virtual=2,
        placement="v",
        splits_backward=True,
        overlaps=True,
        microbatches_per_stage=1,
    ),
)
SCHEDULES: Mapping[str, Schedule] = MappingProxyType({schedule.name: schedule for schedule in _ALL})
