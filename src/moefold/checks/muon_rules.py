"""Rules about Muon and QK-clip."""

from __future__ import annotations

from moefold.config.attention import GQAConfig
from moefold.config.run import RunConfig
from moefold.errors import Problem


def momentum_decays(run: RunConfig) -> Problem | None:
    momentum = run.optim.muon.momentum
    if run.optim.algorithm != "muon" or momentum < 1:
        return None
    return Problem("optim.muon.momentum", f"is {momentum:g}: old gradients would never fade", "use 0 to 0.99")


def momentum_is_kept_as_it_is(run: RunConfig) -> list[Problem]:
    """Muon keeps momentum in the format of the weights that it updates, and orthogonalises on the device."""
    if "muon" not in {run.optim.algorithm, *(group.algorithm for group in run.optim.groups)}:
        return []
    precision, found = run.precision, []
    if precision.moments not in (None, precision.params):
        found.append(("precision.moments", str(precision.moments), "null"))
    if precision.master == "remainder":
        found.append(("precision.master", "remainder", "null or float32"))
    if run.memory.optimizer == "cpu":
        found.append(("memory.optimizer", "cpu", "device or host"))
    return [
        Problem(path, f"{value} is not there for Muon's momentum", f"use {good}, or optim.algorithm adamw")
        for path, value, good in found
    ]


def clipped_logits_follow_from_weights(run: RunConfig) -> Problem | None:
    """QK-clip scales projections; a norm behind them would undo it."""
    attention = run.model.attention
    if run.optim.qk_clip is None or not isinstance(attention, GQAConfig) or attention.qk_norm == "none":
        return None
    return Problem(
        "optim.qk_clip",
        f"model.attention.qk_norm: {attention.qk_norm} normalises queries and keys after their projections, so scaling "
        "these changes no logit; the norm bounds logits itself",
        "use null, or model.attention.qk_norm none",
    )


def clipped_weights_are_whole(run: RunConfig) -> Problem | None:
    if run.optim.qk_clip is None or run.precision.master != "remainder":
        return None
    return Problem(
        "optim.qk_clip",
        "scales weights, and with precision.master: remainder half of their digits are in the optimizer",
        "use precision.master null or float32",
    )


RULES = (momentum_decays, momentum_is_kept_as_it_is, clipped_logits_follow_from_weights, clipped_weights_are_whole)
