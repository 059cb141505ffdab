"""Parameter groups as data: which lr, weight decay and algorithm the optimizer uses for a parameter.

Two tables are read from top to bottom, and the first match counts. ``optim.groups`` matches names of the blueprint
with `fnmatch` patterns, and says what is different for them. ``NO_DECAY_KINDS`` is the rule for what no group decides:
norms, biases, attention sinks and the decays of linear attention have no weight decay, because it would pull scales and
offsets towards zero for no gain. Under `optim.algorithm: muon`, hidden matrices alone are Muon's
(`blueprint/muon_matrices.py`).

What `optim.trained` and `optim.frozen` leave out is frozen, whatever groups say: it has no gradient and no state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from moefold.blueprint.lora_adapters import is_adapter
from moefold.blueprint.muon_matrices import muon_algorithm
from moefold.config.optim import OptimConfig, ParamGroupConfig

# Kinds of `blueprint.parameters` without weight decay.
NO_DECAY_KINDS = frozenset({"norm", "centred_norm", "bias", "sink", "log_decay", "decay_bias"})


@dataclass(frozen=True)
class UpdateRule:
    """How one parameter is updated; parameters with equal rules are updated together."""

    algorithm: Literal["adamw", "muon", "frozen"]
    # Times the lr of the schedule.
    lr_scale: float
    weight_decay: float


FROZEN = UpdateRule("frozen", 0.0, 0.0)


def is_trained(name: str, optim: OptimConfig) -> bool:
    """Whether the parameter has a gradient and is updated."""
    if optim.trained == "adapters" and not is_adapter(name):
        return False
    return not any(fnmatchcase(name, pattern) for pattern in optim.frozen)


def update_rule(name: str, kind: str, optim: OptimConfig) -> UpdateRule:
    """The rule of the parameter ``name`` of ``kind``, both from the blueprint."""
    if not is_trained(name, optim):
        return FROZEN
    group = matching_group(name, optim.groups)
    decay = 0.0 if kind in NO_DECAY_KINDS else optim.weight_decay
    algorithm = muon_algorithm(name, kind) if optim.algorithm == "muon" else optim.algorithm
    if group is None:
        return UpdateRule(algorithm, 1.0, decay)
    return UpdateRule(
        group.algorithm or algorithm,
        group.lr_scale,
        decay if group.weight_decay is None else group.weight_decay,
    )


def matching_group(name: str, groups: Iterable[ParamGroupConfig]) -> ParamGroupConfig | None:
    return next((group for group in groups if fnmatchcase(name, group.match)), None)


def unmatched(groups: tuple[ParamGroupConfig, ...], names: Iterable[str]) -> dict[int, int | None]:
    """Groups that no parameter is in, by number; and the earlier group that has all they match, None if nothing does.

    A group without parameters is a typing error or a wrong order, which training would not show.
    """
    names = tuple(names)
    taken = {name: _first(name, groups) for name in names}
    empty = set(range(len(groups))) - set(taken.values())
    found: dict[int, int | None] = {}
    for number in sorted(empty):
        matched = [taken[name] for name in names if fnmatchcase(name, groups[number].match)]
        found[number] = matched[0] if matched else None
    return found


def _first(name: str, groups: tuple[ParamGroupConfig, ...]) -> int | None:
    return next((number for number, group in enumerate(groups) if fnmatchcase(name, group.match)), None)
