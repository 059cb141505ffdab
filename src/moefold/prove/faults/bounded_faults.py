"""Faults of buffers with a fixed number of rows, and of steps that run twice because rows did not fit.

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import moefold.moe.dispatch.all_to_all_bounded as bounded
import moefold.pipeline.step as step
from moefold.comm.process_groups import Groups
from moefold.moe.dispatch.all_to_all_bounded import Places
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.parallelize import LocalModel
from moefold.pipeline.pipeline_state import StepSums
from moefold.prove.faults.parallel_faults import put, wrap

# ---- rows and counts ----


def row_counts_of_the_dispatch_before() -> None:
    def make(places_of: Callable[..., Places]) -> Callable[..., Places]:
        before: list[Tensor] = []

        def stale(rows_from_Se: Tensor, pair: int, rank: int) -> Places:
            before.append(rows_from_Se)
            return places_of(before[max(0, len(before) - 2)], pair, rank)

        return stale

    wrap(bounded, "places_of", make)


def received_rows_of_the_dispatch_before() -> None:
    def make(compact: Callable[[Tensor, Places], Tensor]) -> Callable[[Tensor, Places], Tensor]:
        before: list[Tensor] = []

        def reused(rows_Y: Tensor, places: Places) -> Tensor:
            moved = compact(rows_Y, places)
            if moved.dim() == 1:
                return moved
            before.append(moved.detach())
            # The values of the other dispatch, and the gradient of this one.
            return moved + (before[max(0, len(before) - 2)] - moved.detach())

        return reused

    wrap(bounded, "compact", make)


def rows_in_the_order_of_their_sources() -> None:
    def make(places_of: Callable[..., Places]) -> Callable[..., Places]:
        def by_source(rows_from_Se: Tensor, pair: int, rank: int) -> Places:
            places = places_of(rows_from_Se, pair, rank)
            rows = int(places.rows_per_expert_e.sum())
            slot_R = places.slot_R.clone()
            slot_R[:rows] = slot_R[:rows].sort().values
            return places._replace(slot_R=slot_R)

        return by_source

    wrap(bounded, "places_of", make)


def empty_slots_hold_what_was_in_memory() -> None:
    def spread(rows_R: Tensor, places: Places) -> Tensor:
        is_empty_Y = places.is_empty_Y.view(-1, *(1,) * (rows_R.dim() - 1))
        return rows_R.index_select(0, places.place_Y).masked_fill_(is_empty_Y, 0.01)

    put(bounded, "_spread", spread)


# ---- steps that run twice ----


def overflow_counted_on_the_last_rank_only() -> None:
    def make(over_ranks: Callable[[StepSums, Groups], StepSums]) -> Callable[[StepSums, Groups], StepSums]:
        def of_one_rank(sums: StepSums, groups: Groups) -> StepSums:
            if groups.rank < groups["world"].size - 1 and sums.overflow is not None:
                sums = sums._replace(overflow=torch.zeros_like(sums.overflow))
            return over_ranks(sums, groups)

        return of_one_rank

    wrap(step, "over_ranks", make)


def overflow_is_not_looked_at() -> None:
    def make(over_ranks: Callable[[StepSums, Groups], StepSums]) -> Callable[[StepSums, Groups], StepSums]:
        def nothing(sums: StepSums, groups: Groups) -> StepSums:
            found = over_ranks(sums, groups)
            return found if found.overflow is None else found._replace(overflow=torch.zeros_like(found.overflow))

        return nothing

    wrap(step, "over_ranks", make)


def sums_of_both_runs() -> None:
    """Loss and loads of the run that was discarded are counted as well."""

    def make(run_once: Callable[..., step._Summed]) -> Callable[..., step._Summed]:
        runs: list[StepSums] = []

        def added(*given: object) -> step._Summed:
            found = run_once(*given)
            runs.append(found.sums)
            if len(runs) == 1:
                return found
            first, last = runs[0], found.sums
            both = last._replace(loss=first.loss + last.loss, counts_ME=first.counts_ME + last.counts_ME)
            return found._replace(sums=both)

        return added

    wrap(step, "_run_once", make)


def update_before_the_second_run() -> None:
    """The optimizer is applied to the gradients that are discarded, too."""

    def make(run_once: Callable[..., step._Summed]) -> Callable[..., step._Summed]:
        runs: list[int] = []

        def updated(local_model: LocalModel, optimizer: ModelOptimizer, *given: object) -> step._Summed:
            if runs:
                optimizer.step()
                local_model.weights_changed(trained_only=True)
            runs.append(1)
            return run_once(local_model, optimizer, *given)

        return updated

    wrap(step, "_run_once", make)


def gradients_of_both_runs() -> None:
    def make(run_once: Callable[..., step._Summed]) -> Callable[..., step._Summed]:
        kept: list[dict[str, Tensor]] = []

        def added(*given: object) -> step._Summed:
            found = run_once(*given)
            for before in kept:
                for name, gradient in found.gradients.items():
                    gradient.add_(before[name])
            kept.append({name: gradient.clone() for name, gradient in found.gradients.items()})
            return found

        return added

    wrap(step, "_run_once", make)


# The function, the case it is tried on, and how it happens in real code.
FAULTS = (
    (
        row_counts_of_the_dispatch_before,
        "bounded",
        "counts are read from a buffer that the exchange has not filled yet",
    ),
    (
        received_rows_of_the_dispatch_before,
        "bounded",
        "a receive buffer is used again while its rows are still needed",
    ),
    (
        rows_in_the_order_of_their_sources,
        "bounded",
        "received rows are moved together and not put in the order of the experts",
    ),
    (
        empty_slots_hold_what_was_in_memory,
        "bounded",
        "rows that no token fills are not cleared, and a dropped assignment reads one",
    ),
    (
        overflow_counted_on_the_last_rank_only,
        "bounded, run twice",
        "the number of rows that did not fit is not summed over ranks",
    ),
    (overflow_is_not_looked_at, "bounded, run twice", "rows that do not fit are dropped"),
    (sums_of_both_runs, "bounded, run twice", "sums go on from the run that was discarded"),
    (gradients_of_both_runs, "bounded, run twice", "gradients are not cleared for the second run"),
    (update_before_the_second_run, "bounded, run twice", "the optimizer is applied before the overflow is read"),
)
