"""Rules about adapters and frozen parameters: patterns that match nothing, and what cannot be combined with them."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from moefold.blueprint.lora_adapters import can_have_adapter, is_adapter
from moefold.blueprint.param_groups import is_trained, matching_group
from moefold.blueprint.parameters import ParameterSpec, parameters
from moefold.config.run import RunConfig
from moefold.errors import Problem


def adapters_have_weights(run: RunConfig) -> list[Problem]:
    """A target that matches nothing is a typing error, which training would not show."""
    lora = run.model.lora
    if lora is None:
        return []
    names = [spec.name for spec in parameters(run.model) if can_have_adapter(spec.name, spec.kind)]
    fix = f"use names of matrices or experts, such as {names[0]}, with * for any part" if names else ""
    if not lora.targets:
        return [Problem("model.lora.targets", "is empty: no weight has an adapter", fix)]
    return [
        Problem(f"model.lora.targets.{number}", f"{pattern!r} matches no weight that can have an adapter", fix)
        for number, pattern in enumerate(lora.targets)
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def frozen_patterns_have_parameters(run: RunConfig) -> list[Problem]:
    if not run.optim.frozen:
        return []
    names = [spec.name for spec in parameters(run.model)]
    return [
        Problem(
            f"optim.frozen.{number}",
            f"{pattern!r} matches no parameter",
            f"use names such as {names[1]}, with * for any part",
        )
        for number, pattern in enumerate(run.optim.frozen)
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def something_is_trained(run: RunConfig) -> Problem | None:
    optim = run.optim
    if optim.trained == "all" and not optim.frozen:
        return None
    if any(is_trained(spec.name, optim) for spec in parameters(run.model)):
        return None
    if optim.trained == "adapters" and run.model.lora is None:
        fix = "set model.lora.rank, or optim.trained all"
        return Problem("optim.trained", "adapters alone would be trained, and model.lora is null: there are none", fix)
    return Problem("optim.frozen", "no parameter is left to train", "freeze fewer")


def adapters_are_updated_by_adamw(run: RunConfig) -> list[Problem]:
    groups = run.optim.groups
    if run.model.lora is None or all(group.algorithm != "muon" for group in groups):
        return []
    taken = {matching_group(spec.name, groups) for spec in parameters(run.model) if is_adapter(spec.name)}
    return [
        Problem(
            f"optim.groups.{number}.algorithm",
            f"{group.match!r} matches adapters, and Muon is for weights, not for their low-rank factors",
            "use adamw for *lora_a and *lora_b, in a group before it",
        )
        for number, group in enumerate(groups)
        if group.algorithm == "muon" and group in taken
    ]


def clipped_heads_are_trained(run: RunConfig) -> Problem | None:
    """QK-clip scales the weights of queries and keys; where adapters add to them, scaling one part is not enough."""
    if run.optim.qk_clip is None or not any(_in_attention(run)):
        return None
    return Problem(
        "optim.qk_clip",
        "scales queries' and keys' weights, of which some are frozen or have adapters",
        "use null",
    )


def _in_attention(run: RunConfig) -> Iterator[ParameterSpec]:
    return (
        spec
        for spec in parameters(run.model)
        if ".attention." in spec.name and (is_adapter(spec.name) or not is_trained(spec.name, run.optim))
    )


# ---- DPO ----


def preferences_are_whole_documents(run: RunConfig) -> Problem | None:
    if run.train.dpo is None or run.data.packing in ("padded", "bin_packed"):
        return None
    return Problem("data.packing", f"train.dpo compares answers, and {run.data.packing} cuts them", "use bin_packed")


def a_step_has_whole_pairs(run: RunConfig) -> Problem | None:
    if run.train.dpo is None or run.data.global_batch % 2 == 0:
        return None
    message = f"is {run.data.global_batch}: the two answers of a pair are two samples"
    return Problem("data.global_batch", message, f"use an even number, such as {run.data.global_batch + 1}")


def preferences_have_a_reference(run: RunConfig) -> Problem | None:
    dpo = run.train.dpo
    if dpo is None or dpo.reference is not None:
        return None
    if run.model.lora is not None and run.optim.trained == "adapters":
        return None
    fix = "name a checkpoint, or use model.lora with optim.trained adapters"
    return Problem("train.dpo.reference", "is null: the model without adapters, but other weights are trained too", fix)


def preferences_are_learned_alone(run: RunConfig) -> list[Problem]:
    """Losses of MTP modules would learn rejected answers; a validation loss and observed logits are of one forward."""
    if run.train.dpo is None:
        return []
    refused = {
        "model.num_mtp": (bool(run.model.num_mtp), "losses of MTP modules would learn rejected answers too", "use 0"),
        "data.validation": (run.data.validation is not None, "train.dpo has no validation", "use null"),
        "optim.qk_clip": (
            run.optim.qk_clip is not None,
            "logits of three forwards are observed with train.dpo",
            "use null",
        ),
    }
    return [Problem(path, message, fix) for path, (found, message, fix) in refused.items() if found]


RULES = (
    preferences_are_whole_documents,
    a_step_has_whole_pairs,
    preferences_have_a_reference,
    preferences_are_learned_alone,
    adapters_have_weights,
    frozen_patterns_have_parameters,
    something_is_trained,
    adapters_are_updated_by_adamw,
    clipped_heads_are_trained,
)
