"""Rules about the batch: whole microbatches, the same number on every data-parallel rank, and tokens to fill them."""

from __future__ import annotations

from math import isfinite, isnan

from moefold.checks.sizes import divides, divisors
from moefold.config.run import RunConfig
from moefold.errors import Problem
from moefold.topology.folded_layout import FoldedLayout


def microbatches_fill_the_batch(run: RunConfig) -> Problem | None:
    data = run.data
    if data.packing == "bin_packed" or divides(data.micro_batch, data.global_batch):
        return None
    return Problem(
        "data.micro_batch",
        f"{data.global_batch} sequences of a step do not divide into microbatches of {data.micro_batch}",
        f"use {divisors(data.global_batch)}",
    )


def every_rank_gets_as_many_microbatches(run: RunConfig, layout: FoldedLayout) -> Problem | None:
    data, dp = run.data, layout.size("dp")
    one_round = data.micro_batch * dp
    if data.packing == "bin_packed":
        return None
    if divides(one_round, data.global_batch) or not divides(data.micro_batch, data.global_batch):
        return None
    return Problem(
        "data.global_batch",
        f"{data.global_batch} sequences do not divide over micro_batch * dp = {data.micro_batch} * {dp} = {one_round}",
        f"use a multiple of {one_round}, such as {-(-data.global_batch // one_round) * one_round}",
    )


def weights_make_a_mixture(run: RunConfig) -> list[Problem]:
    found: list[Problem] = []
    for number, source in enumerate(run.data.mixture):
        if not isfinite(source.weight) or source.weight < 0:
            path = f"data.mixture.{number}.weight"
            found.append(Problem(path, f"is {source.weight:g}", "use 0 or a positive number"))
    if run.data.mixture and not any(source.weight > 0 or isnan(source.weight) for source in run.data.mixture):
        found.append(Problem("data.mixture", "no source has a positive weight", "give at least one"))
    return found


def training_has_tokens(run: RunConfig) -> Problem | None:
    if run.data.sources:
        return None
    return Problem(
        "data.train",
        "names no tokens to train on",
        "use --data.train FOLDER, made by `moefold tokenize FILES --out FOLDER`; `builtin` is a toy corpus of bytes",
    )


RULES = (microbatches_fill_the_batch, weights_make_a_mixture)
# Of what only training needs: a run without tokens can be planned, rehearsed and proved.
RULES_TO_TRAIN = (training_has_tokens,)
RULES_WITH_LAYOUT = (every_rank_gets_as_many_microbatches,)
