"""Rules about float16: formats that need no loss scale, numbers that one may have, and what does not take float16."""

from __future__ import annotations

from moefold.config.run import RunConfig
from moefold.errors import Problem

# The largest power of two in float32, in which the loss is multiplied.
LARGEST_SCALE = 2.0**127


def only_float16_has_a_loss_scale(run: RunConfig) -> Problem | None:
    compute = run.precision.compute
    if run.precision.loss_scale is None or compute == "float16":
        return None
    return Problem(
        "precision.loss_scale",
        f"gradients in {compute} need no loss scale: its smallest numbers are those of float32 or smaller",
        "use null, or precision.compute: float16",
    )


def loss_scales_are_numbers_of_float32(run: RunConfig) -> list[Problem]:
    config = run.precision.loss_scale
    if config is None:
        return []
    named = {"scale": config.scale, "initial": config.initial, "min": config.min}
    found = [
        Problem(
            f"precision.loss_scale.{name}", f"{value:g} is beyond float32", f"use at most 2**127, {LARGEST_SCALE:g}"
        )
        for name, value in named.items()
        if isinstance(value, float) and value > LARGEST_SCALE
    ]
    if config.min > config.initial:
        message = f"{config.min:g} is more than precision.loss_scale.initial, {config.initial:g}"
        found.append(
            Problem("precision.loss_scale.min", message, f"use at most {config.initial:g}, or a larger initial")
        )
    return found


def float16_has_wider_parameters(run: RunConfig) -> Problem | None:
    """Where masters are beside them, parameters are planned only."""
    precision = run.precision
    if precision.compute != "float16" or precision.params != "bfloat16" or precision.master == "float32":
        return None
    return Problem(
        "precision.params",
        "bfloat16 weights have the range of float32, which float16 matmuls would cut, and no float32 masters",
        "use float32, or precision.compute: bfloat16",
    )


def recipes_narrow_wider_formats(run: RunConfig) -> Problem | None:
    recipe = run.precision.recipe
    if recipe is None or run.precision.compute != "float16":
        return None
    return Problem(
        "precision.recipe",
        f"{recipe} was not tried between float16 activations",
        "use null, or precision.compute: bfloat16",
    )


RULES = (
    only_float16_has_a_loss_scale,
    loss_scales_are_numbers_of_float32,
    float16_has_wider_parameters,
    recipes_narrow_wider_formats,
)
