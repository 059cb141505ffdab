"""Rules about single numbers: sizes are positive, coefficients finite and not negative, nothing is absurdly large.

One walk over the whole configuration, so that a new field is checked without a new rule. Also even division, which most
other rules are about, and the divisors that a problem suggests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from math import isfinite, isqrt
from typing import Any

from moefold.config.run import RunConfig
from moefold.errors import Problem

LARGEST = 2**48
MOST_LAYERS = 10_000

# Integers that may be zero, and floats that may not.
MAY_BE_ZERO = frozenset(
    {
        "data.prefetch",
        "memory.offload_layers",
        "model.num_dense_layers",
        "model.num_mtp",
        "model.moe.shared_hidden_dim",
        "optim.lr_schedule.warmup",
        "optim.lr_schedule.decay",
        "seed",
        "train.corruption.every",
        "train.saving.every",
        "train.saving.keep_every",
        "train.saving.max_failures",
        "train.saving.memory_every",
        "train.saving.retries",
        "train.steps",
        "train.stragglers.window",
        "train.profile.every",
        "train.routing_trace.steps",
        "train.validate_every",
    }
)
MUST_BE_POSITIVE = frozenset(
    {
        "model.rope.theta",
        "model.rope.yarn.factor",
        "model.rope.yarn.beta_fast",
        "model.rope.yarn.beta_slow",
        "model.rope.llama3.factor",
        "model.norm_eps",
        "model.lora.alpha",
        "model.moe.capacity.factor",
        "model.moe.router.scale",
        "optim.eps",
        "precision.loss_scale.initial",
        "precision.loss_scale.min",
        "precision.loss_scale.scale",
        "train.dpo.beta",
        "train.stragglers.ratio",
        "optim.clip_norm",
        "optim.muon.rms",
        "optim.qk_clip",
    }
)


def sizes_are_positive(run: RunConfig) -> list[Problem]:
    return [found for path, value in leaves(run) if (found := _problem(path, value)) is not None]


def sizes_are_bounded(run: RunConfig, world: int | None) -> list[Problem]:
    """Checked first and alone: other rules compute with these numbers and print them."""
    bounds = {"model.num_layers": MOST_LAYERS, "model.num_mtp": MOST_LAYERS}
    return [
        Problem(path, f"is beyond {bounds.get(path, LARGEST):,}", "use a smaller number")
        for path, value in (("world", world), *leaves(run))
        if isinstance(value, int) and abs(value) > bounds.get(path, LARGEST)
    ]


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of the configuration with its dotted path."""
    for field in fields(node):
        value, inner = getattr(node, field.name), f"{path}.{field.name}" if path else field.name
        if is_dataclass(value):
            yield from leaves(value, inner)
        else:
            yield inner, value


def _problem(path: str, value: object) -> Problem | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        smallest = 0 if path in MAY_BE_ZERO else 1
        return None if value >= smallest else Problem(path, f"is {value}", f"use {smallest} or more")
    if isinstance(value, float):
        positive = path in MUST_BE_POSITIVE
        if isfinite(value) and (value > 0 or (value == 0 and not positive)):
            return None
        return Problem(path, f"is {value:g}", "use a positive number" if positive else "use 0 or a positive number")
    return None


_FEW = 8
# The search takes a step per candidate; beyond this, no divisors are suggested.
_SEARCHED = 10**12


def divides(parts: int, whole: int) -> bool:
    """Whether `whole` divides into `parts` equal pieces; sizes below one are reported by `sizes_are_positive`."""
    return parts < 1 or whole % parts == 0


def divisors(*wholes: int) -> str:
    """The numbers that divide every one of `wholes`, for the fix of a problem: "1, 2, 3 or 6"."""
    smallest = min(wholes)
    if not 1 <= smallest <= _SEARCHED:
        return "a divisor"
    small = [n for n in range(1, min(isqrt(smallest), 10**6) + 1) if smallest % n == 0]
    found = sorted({*small, *(smallest // n for n in small)})
    found = [n for n in found if all(whole % n == 0 for whole in wholes)]
    if len(found) > _FEW:
        return f"a divisor of {' and '.join(map(str, wholes))}, such as {', '.join(map(str, found[:_FEW]))}"
    return " or ".join(filter(None, (", ".join(map(str, found[:-1])), str(found[-1]))))
