"""Which layers each (virtual) stage of a job's pipeline holds, for shapes of any kind.

A stage string is obeyed. Without one, layers that divide evenly are dealt evenly, as programs do, with the embedding
and the head in place of a layer each if that makes it even; others are dealt so that the dearest stage is as cheap as
can be, counted in parameters that a token uses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from moefold.blueprint.partition import balance
from moefold.blueprint.stages import parse_stages
from moefold.plan.shape import Layer, Mixture, ModelShape
from moefold.plan.shape_params import layer_parameters
from moefold.plan.workload import Workload

# Stands for a stage string: as moefold deals layers where it is given none.
BALANCED = "balanced"


@dataclass(frozen=True)
class Contents:
    """One stage: layers by kind with their number, and what stands at the pipeline's ends."""

    layers: tuple[tuple[Layer, int], ...]
    embedding: bool = False
    mtp: int = 0
    head: bool = False


@dataclass(frozen=True)
class Stages:
    """Every stage's contents. Most stages are alike, so different ones are listed once and pointed at."""

    different: tuple[Contents, ...]
    which: tuple[int, ...]


@lru_cache(maxsize=4096)
def stages_of_shape(model: ModelShape, stages: int, written: str | None) -> Stages:
    contents = contents_of(model, stages, written)
    different = tuple(dict.fromkeys(contents))
    index = {each: number for number, each in enumerate(different)}
    return Stages(different, tuple(index[each] for each in contents))


def contents_of(model: ModelShape, stages: int, written: str | None) -> tuple[Contents, ...]:
    """One entry per stage, in the model's order."""
    if stages == 1:
        return (Contents(_count(model.layers), True, model.mtp, True),)
    if written == BALANCED:
        written = _balanced(model, stages)
    if written is not None:
        parsed = parse_stages(written, len(model.layers), model.mtp)
        if len(parsed) == stages:
            return tuple(
                Contents(
                    _count(model.layers[spec.layers.start : spec.layers.stop]),
                    spec.embedding,
                    len(spec.mtp),
                    spec.loss,
                )
                for spec in parsed
            )
    edges = _edges(model, stages)
    last = stages - 1
    return tuple(
        Contents(_count(model.layers[start:stop]), index == 0, model.mtp * (index == last), index == last)
        for index, (start, stop) in enumerate(pairwise(edges))
    )


def written_stages(workload: Workload) -> str | None:
    """The job's stage string; moefold, where there is none, balances embedding, layers, modules ahead and loss."""
    return (
        BALANCED
        if workload.degrees.stages is None and workload.options.framework == "moefold"
        else workload.degrees.stages
    )


def _balanced(model: ModelShape, stages: int) -> str:
    """As `blueprint/stages.py` does, from shapes: the dearest stage is as cheap as possible."""
    letters = "E" + "t" * len(model.layers) + "m" * model.mtp + "L"
    layers = [_active(layer, model.dim) for layer in model.layers]
    ahead = [layers[-1] + 2.0 * model.dim**2] * model.mtp
    loss = float((1 + model.mtp) * model.vocab * model.dim)
    edges = (0, *balance([float(model.dim), *layers, *ahead, loss], stages), len(letters))
    return "|".join(letters[start:stop] for start, stop in pairwise(edges))


def _edges(model: ModelShape, stages: int) -> list[int]:
    number = len(model.layers)
    if number % stages == 0:
        return [number // stages * index for index in range(stages + 1)]
    if (number + 2) % stages == 0:
        # The embedding and the head take the place of a layer each.
        each = (number + 2) // stages
        return [0, *(each * index - 1 for index in range(1, stages)), number]
    costs = [_active(layer, model.dim) for layer in model.layers]
    ends = model.dim * model.vocab * (1 + model.mtp) + model.mtp * costs[-1]
    # The embedding costs a token nothing; the head and the modules before it stand at the end of the row.
    degrees = balance([0.0, *costs, float(ends)], stages)
    return [0, *(min(number, max(0, cut - 1)) for cut in degrees), number]


def _active(layer: Layer, dim: int) -> float:
    held = layer_parameters(layer, dim)
    feed = layer.feed
    share = feed.top_k / feed.experts if isinstance(feed, Mixture) else 0.0
    return held.dense + held.whole + held.experts * share


def _count(layers: tuple[Layer, ...]) -> tuple[tuple[Layer, int], ...]:
    return tuple(Counter(layers).items())
