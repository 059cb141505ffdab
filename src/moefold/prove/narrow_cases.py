"""Precision recipes in proofs: which are proved, and sizes that let a small model be cut where a large one is.

The reference makes the calls that ranks make (`call_rows.py`), so quantities are compared as without a recipe, and
codes of weights bit by bit. What that takes is refused where it is missing, with the reason.

Of `precision`, a proof has its own formats (``--dtype``). What a recipe adds to them is that of the run; the rest of
what the run asks for is named (``left_out``).
"""

from __future__ import annotations

from dataclasses import fields, replace

from moefold.blueprint.narrow_matmuls import matmuls, sharded_operands
from moefold.config.attention import MLAConfig
from moefold.config.precision import Format, PrecisionConfig
from moefold.config.precision_recipes import PRECISION_RECIPES, PrecisionRecipe, RecipeName
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, Problem


def unproved_reason(recipe: PrecisionRecipe) -> str:
    """Why the reference cannot narrow as ranks do; empty if it can."""
    casts = [cast for _, cast in recipe.casts.items() if cast is not None]
    if any(cast.delayed for cast in casts):
        return "scales are those of earlier steps, and a proof has one"
    return ""


# Those without a proof leave a drawn case without a recipe, so that a proof of them changes no other case.
DRAWN_RECIPES: tuple[RecipeName, ...] = ("bf16", "fp8_tensor", "fp8_blockwise", "mxfp8", "nvfp4")
PROVED_RECIPES: tuple[RecipeName, ...] = tuple(
    name for name in DRAWN_RECIPES if not unproved_reason(PRECISION_RECIPES[name])
)


# Of `precision`, what a proof has as the run asks for it. Of `gather`, narrow alone: formats are the proof's.
CARRIED = ("recipe", "down_input", "wide", "dispatch")


def carry_recipe(formats: PrecisionConfig, asked: PrecisionConfig) -> PrecisionConfig:
    """The formats of a proof with the recipe of a run."""
    carried = {name: getattr(asked, name) for name in CARRIED}
    return replace(formats, **carried, gather="narrow" if asked.gather == "narrow" else formats.gather)


def left_out(run: RunConfig, proved: PrecisionConfig) -> tuple[str, ...]:
    """Keys of `precision` that the run sets and its proof has otherwise, such as formats of sums between ranks."""
    asked, default = run.precision, PrecisionConfig()
    names = [field.name for field in fields(PrecisionConfig) if field.name not in ("params", "compute")]
    return tuple(
        f"precision.{name} {getattr(asked, name)}"
        for name in names
        if getattr(asked, name) not in (getattr(proved, name), getattr(default, name))
    )


def shares_amaxes_of_shares(run: RunConfig) -> str:
    """The first weight that is whole on every tensor-parallel rank, where ranks compare the amax of their tokens and
    narrow each its own: scales of a matrix and of blocks along tokens at once. The reference narrows the tokens of all
    ranks as one call, or each rank's by its own amax; empty if there is none."""
    if run.parallel.tp == 1:
        return ""
    for weight, casts in matmuls(run):
        two_level = casts is not None and any(
            cast is not None and cast.scale == "two_level" for _, cast in casts.items()
        )
        if two_level and sharded_operands(weight) == ("tp", ("x", "dy")):
            return weight.name
    return ""


def refuse_unproved(run: RunConfig, dtype: Format) -> None:
    recipe, moe = run.precision.recipe, run.model.moe
    if run.precision.dispatch is not None and dtype != "float64":
        message = f"a proof in {dtype} would not tell the rounding of {run.precision.dispatch} from that of {dtype}"
        raise ConfigError(Problem("precision.dispatch", message, "prove it with --dtype float64, or use null"))
    if recipe is None:
        return
    if reason := unproved_reason(PRECISION_RECIPES[recipe]):
        proved = ", ".join(PROVED_RECIPES)
        raise ConfigError(
            Problem("precision.recipe", f"no proof of {recipe}: {reason}", f"use null or one of {proved}")
        )
    if whole := shares_amaxes_of_shares(run):
        message = (
            f"{run.parallel.tp} ranks compare the amax of what enters {whole}; for {recipe} the reference does not"
        )
        raise ConfigError(Problem("parallel.tp", message, "use 1, name the module in precision.wide, or use mxfp8"))
    if dtype != "float64":
        message = f"a proof in {dtype} would not tell the rounding of {recipe} from that of {dtype}"
        raise ConfigError(Problem("precision.recipe", message, "prove it with --dtype float64, or use null"))
    if moe is not None and moe.capacity is not None and moe.capacity.pad:
        message = f"padding lies between rows that {recipe} narrows together, and the reference has none"
        raise ConfigError(Problem("model.moe.capacity.pad", message, "use false, or precision.recipe null"))


def fit_blocks(run: RunConfig) -> RunConfig:
    """The same with dims that tensor parallelism cuts between the blocks of its recipe.

    Rows of linear attention's decay are two per head, which are fewer than a block here: that matmul stays wide.
    """
    recipe, model = run.precision.recipe, run.model
    if recipe is None:
        return run
    casts = PRECISION_RECIPES[recipe].casts
    block = max((max(cast.block) for _, cast in casts.items() if cast is not None and cast.block), default=1)
    tp, etp, moe, attention, linear = (
        run.parallel.tp,
        run.parallel.etp,
        model.moe,
        model.attention,
        model.linear_attention,
    )
    if moe is not None and etp > 1 and moe.expert_hidden_dim % (block * etp):
        moe = replace(moe, expert_hidden_dim=block * etp)
    if tp == 1 or block == 1:
        return replace(run, model=replace(model, moe=moe))
    if moe is not None and moe.shared_hidden_dim:
        moe = replace(moe, shared_hidden_dim=block * tp)
    if isinstance(attention, MLAConfig):
        attention = replace(attention, nope_dim=block, rope_dim=block, value_dim=block)
    else:
        attention = replace(attention, head_dim=block)
    precision = run.precision
    if linear is not None:
        linear = replace(linear, key_dim=block, value_dim=block)
        precision = replace(precision, wide=(*precision.wide, "*.attention.ba"))
    model = replace(model, moe=moe, attention=attention, linear_attention=linear, dense_hidden_dim=block * tp)
    return replace(run, model=model, precision=precision)
