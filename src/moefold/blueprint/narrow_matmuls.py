"""Which matmuls a precision recipe narrows, by the names of their weights.

Weights of attention, feed-forward layers and experts are multiplied in narrow formats. Routers, the embedding, the
head, norms and attention itself stay as `precision.compute` has them, and so do modules that `precision.wide` names.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from moefold.blueprint.parameters import ParameterSpec, parameters
from moefold.config.precision_recipes import PRECISION_RECIPES, LinearCasts
from moefold.config.run import RunConfig

NARROWED_KINDS = ("matrix", "expert")


class NarrowMatmul(NamedTuple):
    """A weight with its casts; None: its matmuls stay wide."""

    weight: ParameterSpec
    casts: LinearCasts | None


def module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def matmuls(run: RunConfig) -> list[NarrowMatmul]:
    """Every weight that a recipe could narrow, in the order of the forward pass."""
    recipe = run.precision.recipe
    casts = None if recipe is None else PRECISION_RECIPES[recipe].casts
    return [
        NarrowMatmul(spec, None if stays_wide(module_of(spec.name), run.precision.wide) else casts)
        for spec in parameters(run.model)
        if spec.kind in NARROWED_KINDS
    ]


def stays_wide(module: str, patterns: tuple[str, ...]) -> bool:
    """``precision.wide``: shell patterns, in which * also stands for dots."""
    return any(fnmatchcase(module, pattern) for pattern in patterns)
