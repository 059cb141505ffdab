"""All problems of a run at once: those that planning and proving need solved, and those that only training needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moefold.checks import (
    context,
    engine_limits,
    finetune,
    graphs,
    kernels,
    messages,
    model,
    narrow_recipes,
    parallel,
    planned_only,
    precision,
    retained_steps,
    train,
)
from moefold.checks.sizes import sizes_are_bounded, sizes_are_positive
from moefold.config.run import RunConfig
from moefold.errors import Problem

Found = Problem | list[Problem] | None
Rule = Callable[[RunConfig], Found]

RULES: tuple[Rule, ...] = (
    *model.RULES,
    *parallel.RULES,
    *context.RULES,
    *kernels.RULES,
    *graphs.RULES,
    *engine_limits.RULES,
    *train.RULES,
    *finetune.RULES,
    *precision.RULES,
    *narrow_recipes.RULES,
    *messages.RULES,
    *retained_steps.RULES,
    *planned_only.RULES,
)
RULES_TO_TRAIN: tuple[Rule, ...] = train.RULES_TO_TRAIN
RULES_WITH_LAYOUT = (
    *train.RULES_WITH_LAYOUT,
    *parallel.RULES_WITH_LAYOUT,
    *messages.RULES_WITH_LAYOUT,
    *context.RULES_WITH_LAYOUT,
)


def problems(run: RunConfig, world: int | None = None) -> list[Problem]:
    """Everything wrong with the run; with a world size also whether its grids fold and its batch divides."""
    unbounded = sizes_are_bounded(run, world)
    if unbounded:
        return unbounded
    sizes = sizes_are_positive(run)
    found = sizes + _flat(rule(run) for rule in RULES)
    # `fold` would report degrees below one again.
    if world is None or any(problem.path.startswith("parallel.") for problem in sizes):
        return found
    layout, unfolded = parallel.layout_or_problems(run, world)
    if layout is None:
        # Orders of ranks are looked at without a world too.
        return found + [problem for problem in unfolded if problem not in found]
    return found + _flat(rule(run, layout) for rule in RULES_WITH_LAYOUT)


def problems_to_train(run: RunConfig, world: int | None = None) -> list[Problem]:
    """The same, and what only training needs: tokens."""
    return problems(run, world) + _flat(rule(run) for rule in RULES_TO_TRAIN)


def _flat(results: Iterable[Found]) -> list[Problem]:
    flat: list[Problem] = []
    for found in results:
        flat += found if isinstance(found, list) else [found] if found is not None else []
    return flat
