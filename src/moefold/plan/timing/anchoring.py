"""Predictions that are rescaled by one measured run: what the planner got wrong there, as far as it is shared.

log(measured / predicted) of a run is a sum of two parts: one that it has in common with runs near it (clocks, the
network as it really is, a release, kernels at a model's sizes), and one of its own layout. How large both are is
measured on published runs, over pairs of different layouts (`plan/published/anchor_error.py`), by how near two runs
are: whether the same people measured both with the same release, and what else is the same. From the anchor's error
the best linear guess of another layout's is

    log(factor) = weight * log(measured / predicted of the anchor),    weight = common / (common + own)

and what remains has the variance (common + own) * (1 - weight ** 2), so the interval shrinks, in logarithms, by the
root of the last factor. An anchor that shares nothing has weight 0 and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Literal

from moefold.blueprint.model_shape import ModelShape
from moefold.blueprint.param_counts import layer_counts
from moefold.plan.timing.fitted import ANCHORS
from moefold.plan.timing.step_time import interval_of, step_time
from moefold.plan.workload import Rescaling, Workload

# Whose the anchor is: the planned run's people measured it, on that cluster and with that release; or anybody else.
Owner = Literal["own", "published"]
# What it has in common with the planned run.
Nearness = Literal["model", "framework", "gpu", "none"]
NEARNESS: Mapping[Nearness, str] = {
    "model": "the same model, GPU and framework",
    "framework": "the same GPU and framework, but another model",
    "gpu": "the same GPU, but another framework",
    "none": "another GPU",
}
# Sources count parameters of a model with and without this or that; layers and sizes of another model differ by more.
_SAME_SIZE = 0.02
# An anchor whose error is beyond so many times the 80 % interval, in logarithms, is more likely stated wrong.
_FAR = 2.0


@dataclass(frozen=True)
class Shares:
    """Variances of log(measured / predicted): what two runs have in common, and what each has of its own."""

    common: float = 0.0
    own: float = 1.0

    @property
    def weight(self) -> float:
        return max(0.0, self.common) / (self.common + self.own)

    @property
    def shrink(self) -> float:
        """The interval's width over the usual one, in logarithms."""
        return sqrt(1 - self.weight**2)


@dataclass(frozen=True)
class Anchor:
    """A run whose seconds per step were measured."""

    name: str
    workload: Workload
    seconds: float
    owner: Owner = "own"


@dataclass(frozen=True)
class Anchored:
    """What an anchor says about predictions of one question."""

    anchor: Anchor
    # Of the anchor's step, by the fitted constants.
    predicted: float
    nearness: Nearness
    weight: float
    # Measured over predicted, 80 % of runs: without the anchor, and with it over the rescaled prediction.
    before: tuple[float, float]
    rescaling: Rescaling

    @property
    def words(self) -> str:
        """For a report."""
        anchor, found = self.anchor, self.rescaling
        whose = "" if anchor.owner == "own" else " (somebody else's measurement)"
        said = (
            f"Anchored by {anchor.name}{whose}: a step took {anchor.seconds:.4g} s and is predicted to take "
            f"{self.predicted:.4g} s. It has {NEARNESS[self.nearness]}. "
        )
        if not self.weight:
            return f"{said}Errors of such runs have nothing in common in what was published, so nothing is rescaled."
        low, high = self.before
        words = (
            f"{said}{self.weight:.0%} of the error of such a run was common to other layouts in what was published, so "
            f"all predicted times are multiplied by {found.factor:.3f}, and the 80 % interval of {low:.2f} to "
            f"{high:.2f} times the prediction becomes {found.low:.2f} to {found.high:.2f}. That is for layouts other "
            "than the anchor's own, which was measured."
        )
        error = log(anchor.seconds / self.predicted)
        if not _FAR * log(low) <= error <= _FAR * log(high):
            words += " Predictions are rarely so far off: check that the anchor states what ran."
        return words


def anchored(anchor: Anchor, planned: Workload) -> Anchored:
    """What the anchor says about layouts of the planned run: of all of them alike, so that it ranks none of them."""
    kind = "moe" if planned.model.is_moe else "dense"
    predicted = step_time(anchor.workload).total
    found = nearness(anchor.workload, planned)
    shares = shares_of(kind, anchor.owner, found)
    usual = interval_of(planned)
    low, high = (exp(shares.shrink * log(bound)) for bound in usual)
    factor = exp(shares.weight * log(anchor.seconds / predicted))
    rescaling = Rescaling(factor, low, high)
    return Anchored(anchor, predicted, found, shares.weight, usual, rescaling)


def shares_of(kind: str, owner: Owner, found: Nearness) -> Shares:
    """As measured; where too few pairs of published runs are of that kind, nothing is taken to be in common."""
    return Shares(*ANCHORS.get(f"{kind} {owner} {found}", (0.0, 1.0)))


def nearness(one: Workload, other: Workload) -> Nearness:
    if one.cluster.gpu.name != other.cluster.gpu.name:
        return "none"
    if one.framework.name != other.framework.name:
        return "gpu"
    return "model" if same_model(one.model, other.model) else "framework"


def same_model(one: ModelShape, other: ModelShape) -> bool:
    """Of the same layers, whatever the vocabulary, MTP modules and vectors, which sources count differently."""
    if len(one.layers) != len(other.layers) or one.dim != other.dim:
        return False
    pairs = zip(model_sizes(one), model_sizes(other))
    return all(abs(a - b) <= _SAME_SIZE * max(a, b) for a, b in pairs)


def model_sizes(model: ModelShape) -> tuple[float, float]:
    """Entries of the matrices of all layers: outside of experts, and in experts."""
    counts = [layer_counts(layer, model.dim) for layer in model.layers]
    return sum(each.sharded + each.replicated for each in counts), sum(each.experts for each in counts)
