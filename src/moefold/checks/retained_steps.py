"""Rules about what is kept of the steps of a block (`memory.retain`, `memory.preset`).

A preset is meant for many models and skips steps that a model does not have; a step that is named must be there. A
step inside a recomputed phase is recomputed with it, so it cannot have a choice of its own. What a collective gave
cannot be discarded: no collective runs twice.
"""

from __future__ import annotations

from math import isfinite
from typing import get_args

from moefold.blueprint.narrow_matmuls import input_step, keeps_narrow, matmuls
from moefold.blueprint.row_bounds import bounds_rows
from moefold.config.attention import MLAConfig
from moefold.config.memory import MemoryConfig, RecomputedPhase, RetainedStep
from moefold.config.run import RunConfig
from moefold.errors import Problem

STEPS_OF_PHASE: dict[RecomputedPhase, tuple[RetainedStep, ...]] = {
    "attention": ("attention_norm", "latent_norm", "mla_up", "core"),
    "feed_forward": ("dense",),
    "experts": ("rows", "gate_up", "activation", "shared"),
}

# What experts compute row by row.
PAGED_STEPS: tuple[RetainedStep, ...] = ("rows", "gate_up", "activation")


def named_steps_exist(run: RunConfig) -> list[Problem]:
    model, moe = run.model, run.model.moe
    lacking: dict[RetainedStep, str] = {}
    if not isinstance(model.attention, MLAConfig):
        lacking |= dict.fromkeys(("latent_norm", "mla_up"), "latent attention (model.attention is not MLA)")
    if moe is None:
        lacking |= dict.fromkeys(("rows", "gate_up", "activation"), "experts (model.moe is null)")
    if moe is None or not moe.shared_hidden_dim:
        lacking["shared"] = "a shared expert (model.moe.shared_hidden_dim is 0)"
    if not model.has_dense_layers:
        lacking["dense"] = "dense layers"
    return [
        Problem(f"memory.retain.{step}", f"{choice}, but this model has no {what}", "leave it out, or use keep")
        for step, what in lacking.items()
        if (choice := getattr(run.memory.retain, step)) not in (None, "keep")
    ]


def steps_are_not_in_recomputed_phases(run: RunConfig) -> list[Problem]:
    retained, found = run.memory.retained(), []
    for phase in get_args(RecomputedPhase):
        if phase not in run.memory.recompute:
            continue
        steps = STEPS_OF_PHASE[phase]
        # The norm of a dense layer is part of its phase; that of an MoE layer is part of routing.
        if phase == "feed_forward":
            steps = (*steps, "feed_norm")
        for step in steps:
            if retained[step] != "keep":
                found.append(
                    Problem(
                        _path(run, step),
                        f"{step} is to be {said(retained[step])}, but memory.recompute has {phase}, and so this step",
                        f"use memory.retain.{step} keep, or take {phase} out of memory.recompute",
                    )
                )
    return found


def collectives_run_once(run: RunConfig) -> list[Problem]:
    retained, parallel, found = run.memory.retained(), run.parallel, []
    if retained["rows"] == "discard" and parallel.ep * parallel.etp > 1:
        sizes = f"ep={parallel.ep} and etp={parallel.etp}"
        found.append(
            Problem(
                _path(run, "rows"),
                f"rows that other ranks sent ({sizes}) cannot be made again without sending them again",
                "use offload or keep",
            )
        )
    if retained["core"] == "discard" and (parallel.cp > 1 or parallel.dynamic_cp):
        found.append(
            Problem(
                _path(run, "core"),
                f"attention over cp={parallel.cp} ranks exchanges keys or heads, and would have to do so again",
                "use offload or keep",
            )
        )
    return found


def rows_are_permuted_by_us(run: RunConfig) -> Problem | None:
    if run.memory.retained()["rows"] != "discard" or run.kernels.permute == "backend":
        return None
    return Problem(
        _path(run, "rows"),
        f"the permutation of kernels.permute {run.kernels.permute} is not repeated",
        "use kernels.permute backend, or offload",
    )


def rows_are_what_experts_multiply(run: RunConfig) -> Problem | None:
    moe, how = run.model.moe, run.memory.retained()["rows"]
    if moe is None or moe.weight_at != "input" or how == "keep":
        return None
    return Problem(
        _path(run, "rows"),
        f"rows are to be {said(how)}, but with model.moe.weight_at input they are multiplied by probs before the GEMM",
        "use keep, or recompute experts",
    )


def compiled_regions_keep(run: RunConfig) -> Problem | None:
    """A compiled region decides itself what it saves."""
    chosen = {step: how for step, how in run.memory.retained().items() if how != "keep"}
    if run.kernels.compile == "none" or not chosen:
        return None
    step, how = next(iter(chosen.items()))
    return Problem(
        _path(run, step),
        f"{step} is to be {said(how)}, but kernels.compile is {run.kernels.compile}",
        "use compile none",
    )


def quantized_steps_enter_narrow_matmuls(run: RunConfig) -> list[Problem]:
    """What is kept narrow is the input of a matmul, as its weight gradient reads it, so that no bit changes."""
    found, recipe = [], run.precision.recipe
    for step, how in run.memory.retained().items():
        if how != "quantize":
            continue
        if why := _NOT_QUANTIZED.get(step):
            problem, fix = why, "use keep, discard or offload"
        elif recipe is None or recipe == "bf16":
            said = "null" if recipe is None else recipe
            problem, fix = f"precision.recipe {said} has no narrow operands", "use a recipe such as mxfp8, or keep"
        elif not any(keeps_narrow(matmul, run) for matmul in matmuls(run) if input_step(matmul.weight.name) == step):
            problem, fix = "no narrow matmul of this run reads it (`moefold check RUN --casts` lists them)", "use keep"
        else:
            continue
        found.append(Problem(_path(run, step), f"{step} is to be quantized, but {problem}", fix))
    return found


# Steps whose outputs are kept by something else than a matmul.
_NOT_QUANTIZED: dict[RetainedStep, str] = {
    "mla_up": "queries, keys and values are read by attention, which is not narrow",
    "core": "attention keeps its output for its own backward pass, and a narrow copy would be one more",
    "gate_up": "it is read by the activation, which is not narrow",
}


def quantized_steps_are_not_read_again(run: RunConfig) -> list[Problem]:
    """A step that is recomputed reads its input wide, so that this is kept, and a narrow copy would be one more."""
    retained, attention = run.memory.retained(), run.model.attention
    readers: dict[RetainedStep, RetainedStep] = {"latent_norm": "mla_up", "feed_norm": "dense", "rows": "gate_up"}
    if isinstance(attention, MLAConfig) and attention.q_latent is None:
        readers["attention_norm"] = "mla_up"
    return [
        Problem(
            _path(run, step),
            f"{step} is to be quantized, but {reader} is discarded, and recomputing it needs {step} wide",
            f"use memory.retain.{step} keep, discard or offload, or memory.retain.{reader} keep",
        )
        for step, reader in readers.items()
        if retained[step] == "quantize" and retained[reader] == "discard"
    ]


def paged_steps_are_rows_of_a_bound(run: RunConfig) -> list[Problem]:
    """Pages are for buffers of which only the device knows how many rows are there."""
    found, dispatcher = [], run.parallel.dispatcher
    for step, how in run.memory.retained().items():
        if how != "page":
            continue
        if step not in PAGED_STEPS:
            problem, fix = f"it has as many rows as there are tokens; pages are for {_listed(PAGED_STEPS)}", "use keep"
        elif not bounds_rows(run):
            problem = f"buffers of the {dispatcher} dispatcher have just the rows that came"
            fix = "use keep, or parallel.dispatcher all_to_all_bounded"
        else:
            continue
        found.append(Problem(_path(run, step), f"{step} is to be paged, but {problem}", fix))
    return found


def pages_hold_an_even_routing(run: RunConfig) -> list[Problem]:
    memory, default = run.memory, MemoryConfig()
    if "page" not in memory.retained().values():
        return [
            Problem(
                f"memory.{name}",
                f"is {getattr(memory, name):g}, but no step of memory.retain is paged",
                f"use {getattr(default, name):g}, or page one of {_listed(PAGED_STEPS)}",
            )
            for name in ("page_bound", "page_spill", "page_rows")
            if getattr(memory, name) != getattr(default, name)
        ]
    found = []
    if not (isfinite(memory.page_bound) and memory.page_bound >= 1):
        words = f"is {memory.page_bound:g}: an even routing needs 1, so every step would be run twice"
        found.append(Problem("memory.page_bound", words, f"use 1 or more, such as {default.page_bound:g}"))
    if not 0 <= memory.page_spill < 1:
        words = f"is {memory.page_spill:g}, and is the share of pages that are in the host's memory"
        found.append(Problem("memory.page_spill", words, "use 0 or more and less than 1"))
    if memory.page_rows < 1:
        found.append(Problem("memory.page_rows", f"{memory.page_rows} rows hold nothing", "use 1 or more, such as 64"))
    return found


def _listed(steps: tuple[RetainedStep, ...]) -> str:
    return ", ".join(steps)


def host_bound_is_positive(run: RunConfig) -> Problem | None:
    bound = run.memory.host_gib
    if bound is None or bound > 0:
        return None
    return Problem("memory.host_gib", f"{bound} GiB hold nothing", "use a positive number, or null for no bound")


def _path(run: RunConfig, step: RetainedStep) -> str:
    return "memory.preset" if getattr(run.memory.retain, step) is None else f"memory.retain.{step}"


def said(how: str) -> str:
    return {"discard": "discarded", "offload": "offloaded", "quantize": "quantized", "page": "paged"}[how]


RULES = (
    named_steps_exist,
    steps_are_not_in_recomputed_phases,
    collectives_run_once,
    rows_are_permuted_by_us,
    rows_are_what_experts_multiply,
    compiled_regions_keep,
    quantized_steps_enter_narrow_matmuls,
    quantized_steps_are_not_read_again,
    paged_steps_are_rows_of_a_bound,
    pages_hold_an_even_routing,
    host_bound_is_positive,
)
