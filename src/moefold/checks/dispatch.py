"""Rules about how tokens travel to experts on other ranks."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite

from moefold.checks.sizes import divides, divisors
from moefold.config.run import RunConfig
from moefold.errors import Problem

# They learn how many rows travel from the routing of each microbatch.
COUNT_ROWS = ("deduplicated", "two_level")


def padded_slots_have_known_counts(run: RunConfig) -> Problem | None:
    """Which ranks a token meets is not known before it is routed, however many slots experts have."""
    moe, name = run.model.moe, run.parallel.dispatcher
    if moe is None or moe.capacity is None or not moe.capacity.pad or name not in COUNT_ROWS:
        return None
    return Problem(
        "parallel.dispatcher",
        f"{name} counts the rows of every microbatch, but model.moe.capacity.pad is true so that nothing is counted",
        "use all_to_all or all_gather, or set model.moe.capacity.pad to false",
    )


def hosts_divide_ep(run: RunConfig) -> Problem | None:
    parallel = run.parallel
    if parallel.dispatcher != "two_level" or divides(parallel.ep_inner, parallel.ep):
        return None
    return Problem(
        "parallel.ep_inner",
        f"ep={parallel.ep} does not divide into hosts of {parallel.ep_inner}",
        f"use {divisors(parallel.ep)}",
    )


def hosts_are_used(run: RunConfig) -> Problem | None:
    parallel = run.parallel
    if parallel.ep_inner <= 1 or parallel.dispatcher == "two_level":
        return None
    return Problem(
        "parallel.ep_inner",
        f"is {parallel.ep_inner}, but the {parallel.dispatcher} dispatcher does not look at hosts",
        "use 1, or set parallel.dispatcher to two_level",
    )


def links_have_rates(run: RunConfig) -> list[Problem]:
    """A message may cost nothing; bytes may not."""
    found = []
    for name, value in asdict(run.parallel.link).items():
        if not (isfinite(value) and (value > 0 or (name.endswith("_us") and value == 0))):
            found.append(Problem(f"parallel.link.{name}", f"is {value:g}", "use a positive number"))
    return found


RULES = (padded_slots_have_known_counts, hosts_divide_ep, hosts_are_used, links_have_rates)
