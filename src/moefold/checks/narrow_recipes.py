"""Rules about precision recipes: what they can surround, and blocks that a layout must not cut."""

from __future__ import annotations

from typing import get_args

from moefold.blueprint.narrow_matmuls import keeps_narrow, matmuls, module_of, stays_wide
from moefold.blueprint.parameters import is_expert, parameters
from moefold.blueprint.sharding import cuts
from moefold.config.casts import ELEMENT_BITS
from moefold.config.parallel import EngineDispatcher
from moefold.config.precision import PrecisionConfig
from moefold.config.precision_recipes import PRECISION_RECIPES, LinearCasts
from moefold.config.run import RunConfig
from moefold.errors import Problem
from moefold.schedule.names import schedule_named


def narrow_matmuls_are_torchs(run: RunConfig) -> list[Problem]:
    """Casts surround torch's matmuls. Adapters are matmuls of few rows, for which no recipe was tried."""
    recipe = run.precision.recipe
    if recipe is None:
        return []
    refused = {
        "kernels.linear": (run.kernels.linear != "torch", f"{run.kernels.linear} matmuls", "use torch"),
        "model.lora": (run.model.lora is not None, "adapters", "use null"),
    }
    return [
        Problem(path, f"precision.recipe {recipe} was not made for {what}", f"{fix}, or precision.recipe null")
        for path, (asked, what, fix) in refused.items()
        if asked
    ]


def casts_are_known_on_this_device(run: RunConfig) -> Problem | None:
    """`kernels.backend: triton` is refused where there is no GPU, and so casts by Triton are too."""
    casts, backend = run.kernels.casts, run.kernels.backend
    if casts == "native" and backend == "triton":
        return Problem(
            "kernels.casts", "native casts run on CPUs, and kernels.backend triton on GPUs", "use torch or triton"
        )
    if casts == "triton" and backend != "triton":
        words = f"triton casts run on GPUs with Triton's kernels, and kernels.backend is {backend}"
        return Problem("kernels.casts", words, "use torch, or kernels.backend triton")
    if casts == "triton":
        used = {cast for matmul in matmuls(run) if matmul.casts is not None for _, cast in matmul.casts.items()}
        rows = sorted(str(cast) for cast in used if cast is not None and cast.block is not None and not cast.block[1])
        if rows:
            words = f"{rows[0]} has a scale per row, and no tile of a triton kernel holds a whole row"
            return Problem("kernels.casts", words, "use torch")
    return None


def down_inputs_are_of_fp8(run: RunConfig) -> Problem | None:
    """A scale per token is for E4M3: bf16 has no scales, and FP4 is multiplied by FP4."""
    recipe, chosen = run.precision.recipe, run.precision.down_input
    if chosen == "recipe" or recipe not in (None, "bf16", "nvfp4"):
        return None
    said = "null" if recipe is None else recipe
    message = f"{chosen} is a cast to FP8, but precision.recipe is {said}"
    return Problem("precision.down_input", message, "use recipe, or a precision.recipe such as fp8_tensor")


def rows_can_be_padded(run: RunConfig) -> Problem | None:
    """Rows of zeros are for a recipe that wants a multiple, and must stay zeros up to the second matmul."""
    chosen, moe, recipe = run.kernels.row_padding, run.model.moe, run.precision.recipe
    if chosen == "wgrad":
        return None
    align = 1 if recipe is None else PRECISION_RECIPES[recipe].align
    engine = chosen == "routing_map" and run.parallel.dispatcher in get_args(EngineDispatcher)
    refused = {
        "there are no experts (model.moe is null)": moe is None,
        f"precision.recipe {recipe or 'null'} needs no multiple of rows": align == 1,
        "biases of experts would be added to rows of zeros": moe is not None and moe.expert_mlp_bias,
        "capacities are padded already": moe is not None and moe.capacity is not None and moe.capacity.pad,
        f"kernels.permute {run.kernels.permute} does not pad": chosen == "permute" and run.kernels.permute != "backend",
        f"parallel.dispatcher {run.parallel.dispatcher} has buffers for this rank's own tokens": engine,
    }
    for why, applies in refused.items():
        if applies:
            return Problem("kernels.row_padding", f"{chosen}: {why}", "use wgrad")
    return None


def rows_of_zeros_stay_zeros(run: RunConfig) -> Problem | None:
    """A bias of the first matmul makes a row of zeros another one, which would decide scales of the second one's input;
    a prob of zero at the activation makes it zeros again."""
    moe, recipe, parallel = run.model.moe, run.precision.recipe, run.parallel
    if moe is None or recipe is None or not moe.expert_mlp_bias or moe.weight_at == "activation":
        return None
    received = parallel.dispatcher == "all_to_all_aligned" and parallel.ep * parallel.etp > 1
    refused = {
        "model.moe.capacity.pad": (moe.capacity is not None and moe.capacity.pad, "use false"),
        "parallel.dispatcher": (received and parallel.row_multiple > 1, "use all_to_all"),
    }
    for path, (applies, fix) in refused.items():
        if applies and PRECISION_RECIPES[recipe].align > 1:
            message = f"rows of zeros get biases of experts, and would decide scales of precision.recipe {recipe}"
            return Problem(path, message, f"{fix}, or model.moe.weight_at activation")
    return None


def wide_modules_exist(run: RunConfig) -> list[Problem]:
    """A pattern that fits no module would narrow what was meant to stay wide. The default may fit none."""
    default = PrecisionConfig().wide
    modules = {module_of(spec.name) for spec in parameters(run.model)}
    return [
        Problem("precision.wide", f"{pattern!r} fits no module", "use names as in `moefold check RUN --casts`")
        for pattern in run.precision.wide
        if pattern not in default and not any(stays_wide(module, (pattern,)) for module in modules)
    ]


def blocks_are_those_of_whole_matrices(run: RunConfig) -> list[Problem]:
    """A rank that holds a part of a matrix has other blocks, unless its part ends where a block does."""
    sizes = {"tp": run.parallel.tp, "etp": run.parallel.etp}
    found: dict[str, Problem] = {}
    for weight, casts in matmuls(run):
        if casts is None:
            continue
        for cut in cuts(weight):
            ways, size = sizes.get(cut.axis, 1), weight.shape[cut.dim]
            if ways == 1:
                continue
            inner = cut.dim == len(weight.shape) - 1
            if problem := _block_problem(casts, size // ways, inner):
                name = weight.name.removesuffix(".weight")
                fix = f"use parallel.{cut.axis} 1, or precision.recipe null"
                message = f"{name} has {size} {'columns' if inner else 'rows'} over {ways} ranks: {problem}"
                found.setdefault(cut.axis, Problem(f"parallel.{cut.axis}", message, fix))
    return list(found.values())


def _block_problem(casts: LinearCasts, part: int, inner: bool) -> str:
    """Of operands whose blocks lie along the sharded dim: columns are summed in fprop, rows in dgrad."""
    used = (casts.x_fprop, casts.w_fprop, casts.w_dgrad) if inner else (casts.w_fprop, casts.dy_dgrad, casts.w_dgrad)
    for cast in used:
        if cast is None:
            continue
        # Of a scale per tensor, ranks agree on the amax.
        if cast.block is None:
            continue
        if cast.scale == "two_level":
            return f"with two scales, parts were not found to round as the whole does ({cast})"
        if not cast.block[1]:
            return f"a scale per row would be one per rank ({cast})"
        if part % max(cast.block):
            return f"{part} are no multiple of {max(cast.block)} ({cast})"
    return ""


def narrow_gather_has_one_copy(run: RunConfig) -> Problem | None:
    """Ranks gather one code per value, with scales that follow from the weight as it is. So a weight must have one cast
    for both of its matmuls, of 8 bits, and blocks that serve both directions."""
    precision, recipe = run.precision, run.precision.recipe
    if precision.gather != "narrow":
        return None
    fitting = " or ".join(name for name, each in PRECISION_RECIPES.items() if _gather_problem(each.casts) is None)
    if recipe is None:
        return Problem("precision.gather", "narrow, but no recipe narrows weights", f"use precision.recipe {fitting}")
    if problem := _gather_problem(PRECISION_RECIPES[recipe].casts):
        return Problem(
            "precision.gather",
            f"narrow with precision.recipe {recipe}: {problem}",
            f"use null or bfloat16, or precision.recipe {fitting}",
        )
    if run.parallel.sharding not in ("flat", "fsdp"):
        return Problem("precision.gather", f"narrow with parallel.sharding {run.parallel.sharding}", "use flat or fsdp")
    cast, ways = PRECISION_RECIPES[recipe].casts.w_fprop, max(run.parallel.tp, run.parallel.etp)
    if cast is not None and cast.scales_whole_matrix and ways > 1:
        return Problem("precision.gather", f"narrow, with scales of matrices over {ways} ranks ({cast})", "use null")
    return None


def _gather_problem(casts: LinearCasts) -> str | None:
    cast = casts.w_fprop
    if cast is None or cast.element == "bf16":
        return "its weights are bfloat16"
    if cast != casts.w_dgrad or not cast.is_square:
        copies = 2 * cast.bytes_per_value
        return f"weights have a copy for each of their matmuls ({cast}), {copies:.4g} bytes per value, bfloat16 has 2"
    if cast.delayed:
        return f"scales come from other steps ({cast})"
    if cast.scale == "two_level" or ELEMENT_BITS[cast.element] != 8:
        return f"only casts to 8 bits with one scale per block are gathered ({cast})"
    return None


def histories_have_a_step(run: RunConfig) -> Problem | None:
    if (length := run.precision.amax_history_len) >= 1:
        return None
    return Problem("precision.amax_history_len", f"{length} steps", "use 1 or more")


def kept_inputs_have_scales_of_their_own(run: RunConfig) -> Problem | None:
    """Inputs that are kept narrow are narrowed before it is known whose amax decides."""
    axes = max(run.parallel.tp, run.parallel.etp)
    for matmul in matmuls(run):
        cast = None if matmul.casts is None else matmul.casts.x_wgrad
        if cast is None or not cast.scales_whole_matrix or not keeps_narrow(matmul, run):
            continue
        if cast.delayed or axes > 1:
            why = "scales of earlier steps" if cast.delayed else f"scales of tensors over {axes} ranks"
            message = f"quantize keeps inputs narrow by scales of their own, and {run.precision.recipe} has {why}"
            return Problem("memory.retain", message, "use keep, or precision.recipe mxfp8")
    return None


def experts_agree_on_amaxes_alone(run: RunConfig) -> Problem | None:
    """Parts of an expert agree on an amax over etp, whose collectives belong to another thread where a schedule
    overlaps dispatch with computing."""
    if run.parallel.etp == 1 or not schedule_named(run.parallel.schedule).overlaps:
        return None
    if not any(is_expert(weight.name) and _has_scales_per_tensor(casts) for weight, casts in matmuls(run)):
        return None
    message = f"{run.precision.recipe} has scales per tensor, on which ranks agree inside of the experts"
    return Problem("parallel.etp", f"{message}, while {run.parallel.schedule} dispatches beside them", "use 1")


def _has_scales_per_tensor(casts: LinearCasts | None) -> bool:
    return casts is not None and any(cast is not None and cast.scales_whole_matrix for _, cast in casts.items())


# ---- GEMMs that take codes (`kernels.narrow_gemm`) ----


def narrow_gemms_get_codes(run: RunConfig) -> Problem | None:
    """Both operands of each of the three matmuls have to be narrow."""
    gemm, recipe = run.kernels.narrow_gemm, run.precision.recipe
    if gemm == "emulated":
        return None
    if recipe is None or recipe == "bf16":
        message = f"{gemm} multiplies codes, and precision.recipe {recipe or 'null'} has none"
        return Problem("kernels.narrow_gemm", message, "use emulated, or a precision.recipe such as mxfp8")
    return None


def narrow_gemms_know_the_scales(run: RunConfig) -> Problem | None:
    """A GEMM has one kind of scale for both of its operands, or two that it was made for."""
    gemm, precision = run.kernels.narrow_gemm, run.precision
    if gemm == "emulated":
        return None
    if precision.down_input != "recipe":
        message = f"{gemm} has no product of scales per token and those of precision.recipe {precision.recipe}"
        return Problem("precision.down_input", message, "use recipe, or kernels.narrow_gemm emulated")
    if gemm == "transformer_engine" and precision.recipe == "fp8_rowwise":
        return Problem("kernels.narrow_gemm", f"{gemm} has no scales per row", "use scaled_mm, or emulated")
    return None


def narrow_gemms_have_a_format_of_products(run: RunConfig) -> Problem | None:
    gemm, compute = run.kernels.narrow_gemm, run.precision.compute
    taken = {"emulated": (compute,), "scaled_mm": ("bfloat16", "float32"), "transformer_engine": ("bfloat16",)}[gemm]
    if compute in taken:
        return None
    message = f"{gemm} writes products in {' or '.join(taken)}, and precision.compute is {compute}"
    return Problem("kernels.narrow_gemm", message, "use emulated, or precision.compute bfloat16")


def narrow_gemms_have_whole_groups(run: RunConfig) -> Problem | None:
    """A grouped GEMM reads each expert's rows as they lie, and tensor cores take them in multiples."""
    gemm = run.kernels.narrow_gemm
    if gemm == "emulated" or run.model.moe is None or run.kernels.row_padding != "wgrad":
        return None
    message = f"wgrad pads rows of experts for weight gradients alone, and {gemm} reads them in all three matmuls"
    return Problem("kernels.row_padding", message, "use permute or routing_map")


RULES = (
    narrow_matmuls_are_torchs,
    casts_are_known_on_this_device,
    down_inputs_are_of_fp8,
    rows_can_be_padded,
    rows_of_zeros_stay_zeros,
    wide_modules_exist,
    blocks_are_those_of_whole_matrices,
    narrow_gather_has_one_copy,
    histories_have_a_step,
    kept_inputs_have_scales_of_their_own,
    experts_agree_on_amaxes_alone,
    narrow_gemms_get_codes,
    narrow_gemms_know_the_scales,
    narrow_gemms_have_a_format_of_products,
    narrow_gemms_have_whole_groups,
)
