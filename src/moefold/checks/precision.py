"""Rules about number formats: of messages, of the optimizer's moments and of main weights, and about float16: which
formats need no loss scale, which numbers one may have, and what does not take float16.

What ranks send and sum is no narrower than what they compute with. Moments are not rounded in a way that freezes them.
"""

from __future__ import annotations

from moefold.config.precision import BYTES, FORMATS
from moefold.config.run import RunConfig
from moefold.errors import Problem


def gathered_parameters_lose_no_digits(run: RunConfig) -> Problem | None:
    """A narrower format would change values where a parameter is sharded, and only there."""
    precision = run.precision
    if precision.gather in (None, "narrow", precision.params, precision.compute):
        return None
    return Problem(
        "precision.gather",
        f"{precision.gather} is neither the format of parameters ({precision.params}) nor of matmuls "
        f"({precision.compute})",
        f"use {' or '.join(dict.fromkeys((precision.compute, precision.params)))}",
    )


def sums_are_no_narrower_than_what_they_add(run: RunConfig) -> list[Problem]:
    precision, compute = run.precision, run.precision.compute
    asked = {
        "precision.reduce": None if precision.reduce is None else precision.reduce_format,
        "precision.tp_reduce": None if precision.tp_reduce is None else precision.tp_reduce_format,
    }
    return [
        Problem(
            path,
            f"sums in {named} of what is computed in {compute}",
            f"use {' or '.join(name for name in FORMATS if BYTES[name] >= BYTES[compute])}",
        )
        for path, named in asked.items()
        if named is not None and BYTES[named] < BYTES[compute]
    ]


# Significant bits, hidden one included: nearest rounding drops relative changes below 2**-bits, at the least.
SIGNIFICANT_BITS = {"bfloat16": 8, "float8": 4}


def moments_can_follow_the_gradients(run: RunConfig) -> list[Problem]:
    """A moment m becomes beta * m + (1 - beta) * x. Where gradients vanish it has to shrink by a factor of beta, and
    nearest rounding undoes that if 1 - beta is below half a unit in the last place, which is at most 2**-bits of m."""
    precision, optim = run.precision, run.optim
    format = precision.moments or precision.params
    bits = SIGNIFICANT_BITS.get(format)
    # Parameters in float8 are planned only.
    if bits is None or (precision.moments is None and format == "float8") or precision.moments_rounding == "stochastic":
        return []
    frozen = {name: beta for name, beta in (("beta1", optim.beta1), ("beta2", optim.beta2)) if 1 - beta < 2.0**-bits}
    if not frozen:
        return []
    said = ", ".join(f"1 - optim.{name} = {1 - beta:.2g}" for name, beta in frozen.items())
    return [
        Problem(
            "precision.moments" if precision.moments else "precision.params",
            f"{format} moments rounded to nearest lose changes below 2**-{bits} = {2.0**-bits:.2g}, and {said}: a "
            "moment could not fall when gradients do",
            "use precision.moments_rounding: stochastic, precision.moments: float32, or betas of at most "
            f"{1 - 2.0**-bits:g}",
        )
    ]


def stochastic_rounding_has_something_to_round(run: RunConfig) -> Problem | None:
    format = run.precision.moments or run.precision.params
    if run.precision.moments_rounding == "nearest" or format in SIGNIFICANT_BITS:
        return None
    return Problem(
        "precision.moments_rounding",
        f"stochastic rounding of moments in {format}, which are not rounded",
        "use nearest, or precision.moments: bfloat16 or float8",
    )


def moments_are_rounded_from_float32(run: RunConfig) -> Problem | None:
    """The update is computed in float32, or in float64 throughout."""
    precision = run.precision
    if (precision.moments or precision.params) == precision.params or precision.params != "float64":
        return None
    return Problem(
        "precision.moments",
        f"{precision.moments} moments of float64 parameters",
        "use null, or precision.params: float32",
    )


def remainders_have_weights_beside_them(run: RunConfig) -> Problem | None:
    """The remainder completes bfloat16 weights that live from step to step. FSDP has none: its bfloat16 weights are
    gathered, used and freed."""
    precision = run.precision
    if precision.master != "remainder":
        return None
    sharding, gather = run.parallel.sharding, precision.gather_format
    if sharding == "flat" and precision.params == "float32" and gather == "bfloat16":
        return None
    return Problem(
        "precision.master",
        f"a remainder completes bfloat16 weights that are kept; with parallel.sharding: {sharding}, precision.params: "
        f"{precision.params} and weights computed with in {gather} there are none",
        "use null; or parallel.sharding: flat, precision.params: float32 and precision.compute: bfloat16",
    )


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


FORMAT_RULES = (
    gathered_parameters_lose_no_digits,
    sums_are_no_narrower_than_what_they_add,
    moments_can_follow_the_gradients,
    stochastic_rounding_has_something_to_round,
    moments_are_rounded_from_float32,
    remainders_have_weights_beside_them,
)
FLOAT16_RULES = (
    only_float16_has_a_loss_scale,
    loss_scales_are_numbers_of_float32,
    float16_has_wider_parameters,
    recipes_narrow_wider_formats,
)
RULES = (*FORMAT_RULES, *FLOAT16_RULES)
