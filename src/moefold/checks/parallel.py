"""Rules about cutting a model over ranks: what must divide, what must fold."""

from __future__ import annotations

from moefold.checks.sizes import divides, divisors
from moefold.config.attention import GQAConfig
from moefold.config.run import RunConfig
from moefold.errors import LayoutError, Problem
from moefold.topology.folded_layout import FoldedLayout, fold


def heads_divide_over_tp(run: RunConfig) -> Problem | None:
    return _divides_over_tp(run, run.model.attention.num_heads, "heads", "model.attention.num_heads")


def kv_heads_divide_over_tp(run: RunConfig) -> Problem | None:
    attention = run.model.attention
    if not isinstance(attention, GQAConfig):
        return None
    return _divides_over_tp(run, attention.num_kv_heads, "key/value heads", "model.attention.num_kv_heads")


def vocabulary_divides_over_tp(run: RunConfig) -> Problem | None:
    return _divides_over_tp(run, run.model.vocab_size, "vocabulary rows", "model.vocab_size")


def dense_width_divides_over_tp(run: RunConfig) -> Problem | None:
    if run.model.moe is not None and run.model.num_dense_layers == 0:
        return None
    return _divides_over_tp(run, run.model.dense_hidden_dim, "columns of the dense layers", "model.dense_hidden_dim")


def shared_width_divides_over_tp(run: RunConfig) -> Problem | None:
    if run.model.moe is None:
        return None
    return _divides_over_tp(
        run, run.model.moe.shared_hidden_dim, "columns of the shared expert", "model.moe.shared_hidden_dim"
    )


def experts_divide_over_ep(run: RunConfig) -> Problem | None:
    moe, ep = run.model.moe, run.parallel.ep
    if moe is None or divides(ep, moe.num_experts):
        return None
    return Problem(
        "parallel.ep", f"{moe.num_experts} experts do not divide over ep={ep}", f"use {divisors(moe.num_experts)}"
    )


def expert_width_divides_over_etp(run: RunConfig) -> Problem | None:
    moe, etp = run.model.moe, run.parallel.etp
    if moe is None or divides(etp, moe.expert_hidden_dim):
        return None
    return Problem(
        "parallel.etp",
        f"{moe.expert_hidden_dim} columns of an expert do not divide over etp={etp}",
        f"use {divisors(moe.expert_hidden_dim)}",
    )


def expert_axes_have_experts(run: RunConfig) -> Problem | None:
    ep, etp = run.parallel.ep, run.parallel.etp
    if run.model.moe is not None or ep * etp <= 1:
        return None
    path = "parallel.ep" if ep > 1 else "parallel.etp"
    return Problem(path, f"ep={ep}, etp={etp}, but the model has no experts (model.moe is null)", "use ep 1 and etp 1")


RULES = (
    heads_divide_over_tp,
    kv_heads_divide_over_tp,
    vocabulary_divides_over_tp,
    dense_width_divides_over_tp,
    shared_width_divides_over_tp,
    experts_divide_over_ep,
    expert_width_divides_over_etp,
    expert_axes_have_experts,
)


def layout_or_problems(run: RunConfig, world: int) -> tuple[FoldedLayout | None, list[Problem]]:
    """Both grids over this many ranks, or why not."""
    try:
        return fold(run.parallel, world), []
    except LayoutError as error:
        return None, list(error.problems)


def _divides_over_tp(run: RunConfig, whole: int, what: str, path: str) -> Problem | None:
    tp = run.parallel.tp
    if divides(tp, whole):
        return None
    return Problem("parallel.tp", f"{whole} {what} ({path}) do not divide over tp={tp}", f"use {divisors(whole)}")
