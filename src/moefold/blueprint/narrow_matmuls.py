"""Which matmuls a precision recipe narrows, by the names of their weights.

Weights of attention, feed-forward layers and experts are multiplied in narrow formats. Routers, the embedding, the
head, norms and attention itself stay as `precision.compute` has them, and so do modules that `precision.wide` names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

from moefold.blueprint.param_groups import is_trained
from moefold.blueprint.parameters import ParameterSpec, is_expert, parameters
from moefold.blueprint.sharding import cuts, grid_of, local_shape
from moefold.config.casts import ELEMENT_BITS, Cast
from moefold.config.memory import RetainedStep
from moefold.config.precision_recipes import DOWN_INPUTS, PRECISION_RECIPES, LinearCasts, Operand
from moefold.config.run import RunConfig
from moefold.topology.folded_layout import FoldedLayout, GridName

# What the name of a weight is followed by, in that of the module with its amaxes of earlier steps.
AMAX_SUFFIX = "_amax"
NARROWED_KINDS = ("matrix", "expert")
# The step of a block (`memory.retain`) whose output a weight multiplies, by the end of its name. Others multiply what
# is kept wide in any case: attention keeps its own output, and the router the input of an MoE layer's shared expert.
INPUT_STEPS: dict[str, RetainedStep] = {
    **dict.fromkeys((f".attention.{name}.weight" for name in ("q", "k", "v", "qkvz", "ba")), "attention_norm"),
    **dict.fromkeys((f".attention.{name}.weight" for name in ("q_down", "kv_down")), "attention_norm"),
    **dict.fromkeys((f".attention.{name}.weight" for name in ("q_up", "kv_up")), "latent_norm"),
    ".feed_forward.gate_up": "feed_norm",
    ".feed_forward.down": "dense",
    ".feed_forward.shared.down": "shared",
    ".feed_forward.experts.gate_up": "rows",
    ".feed_forward.experts.down": "activation",
}


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
        NarrowMatmul(
            spec, None if stays_wide(module_of(spec.name), run.precision.wide) else _casts_of(spec, casts, run)
        )
        for spec in parameters(run.model)
        if spec.kind in NARROWED_KINDS
    ]


def _casts_of(spec: ParameterSpec, casts: LinearCasts | None, run: RunConfig) -> LinearCasts | None:
    down_input = DOWN_INPUTS.get(run.precision.down_input)
    if casts is None or down_input is None or not spec.name.endswith(".down"):
        return casts
    return replace(casts, x_fprop=down_input)


def input_step(weight: str) -> RetainedStep | None:
    """The step whose output enters the matmul of this weight, if ``memory.retain`` can say how it is kept."""
    return next((step for end, step in INPUT_STEPS.items() if weight.endswith(end)), None)


def keeps_narrow(matmul: NarrowMatmul, run: RunConfig) -> bool:
    """Whether the input is kept for the backward pass as ``x_wgrad`` narrows it (``memory.retain.STEP: quantize``)."""
    step = input_step(matmul.weight.name)
    return matmul.casts is not None and step is not None and run.memory.retained()[step] == "quantize"


def gather_casts(run: RunConfig) -> dict[str, Cast]:
    """Weights that data-parallel ranks gather as codes (`precision.gather: narrow`), by name, with the cast of both of
    their matmuls (`narrow_gather_has_one_copy`). Frozen weights are gathered once per run, and stay wide."""
    if run.precision.gather != "narrow":
        return {}
    return {
        weight.name: casts.w_fprop
        for weight, casts in matmuls(run)
        if casts is not None and casts.w_fprop is not None and is_trained(weight.name, run.optim)
    }


def scales_by_grid(casts: Mapping[str, Cast], held: Iterable[ParameterSpec], layout: FoldedLayout) -> Counter[GridName]:
    """How many blocks the weights have that are gathered as codes, of what tensor and expert parallelism leave."""
    found: Counter[GridName] = Counter()
    for spec in held:
        if spec.name in casts:
            found[grid_of(spec.name)] += prod(casts[spec.name].scale_shape(local_shape(spec, layout)))
    return found


def code_bytes(cast: Cast | None, word: int) -> int:
    """Of one gathered value; ``word``: of one that is not gathered as codes."""
    return word if cast is None else ELEMENT_BITS[cast.element] // 8


def stays_wide(module: str, patterns: tuple[str, ...]) -> bool:
    """``precision.wide``: shell patterns, in which * also stands for dots."""
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def sharded_operands(weight: ParameterSpec) -> tuple[str, tuple[Operand, ...]]:
    """The axis of tensor parallelism, and the operands of which its ranks hold different parts.

    A weight that is cut by rows has a gradient of its output with columns on several ranks; one that is cut by columns
    such an input; one that is not cut sees each rank's share of the tokens.
    """
    axis = "etp" if is_expert(weight.name) else "tp"
    cut = next((cut for cut in cuts(weight) if cut.axis == axis), None)
    if cut is None:
        return axis, ("x", "dy")
    return axis, ("w", "x" if cut.dim == len(weight.shape) - 1 else "dy")


def delayed_weights(run: RunConfig) -> list[ParameterSpec]:
    """Weights whose matmuls are narrowed by amaxes of earlier steps, in the order of the forward pass."""
    return [
        weight
        for weight, casts in matmuls(run)
        if casts is not None and any(cast is not None and cast.delayed for _, cast in casts.items())
    ]


def amax_histories(run: RunConfig) -> tuple[ParameterSpec, ...]:
    """Saved but not trained: of every operand of such a weight, amaxes of `precision.amax_history_len` steps."""
    rows = run.precision.amax_history_len
    return tuple(
        ParameterSpec(f"{weight.name}{AMAX_SUFFIX}.{operand}", (rows, *stack), "bias")
        for weight in delayed_weights(run)
        for operand, stack in (("x", ()), ("w", weight.shape[:-2]), ("dy", ()))
    )
