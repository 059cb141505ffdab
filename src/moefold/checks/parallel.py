"""Rules about sharding a model over ranks, about dispatch and about pipelines.

What must divide, which options fit together, that every layer has a stage, and that the schedule takes these sizes.
"""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import get_args

from moefold.blueprint.row_bounds import bounds_rows
from moefold.blueprint.stages import stage_size_problems, stages_of
from moefold.checks.sizes import divides, divisors
from moefold.config.attention import GQAConfig
from moefold.config.parallel import NamedDispatcher, ParallelConfig
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, LayoutError, Problem, did_you_mean
from moefold.schedule.names import SCHEDULES
from moefold.topology.folded_layout import FoldedLayout, fold, order_problems

# Backends of experts that leave out rows past those of the last expert. grouped reads no count on the host; sequential
# and fused do, which costs nothing on a CPU.
BOUNDED_EXPERTS = ("auto", "grouped", "sequential", "fused")
# Dispatchers that count the rows of every microbatch.
COUNT_ROWS = ("deduplicated", "two_level", "deepep", "deepep_elastic")


def heads_divide_over_tp(run: RunConfig) -> Problem | None:
    return _divides_over_tp(run, run.model.attention.num_heads, "heads", "model.attention.num_heads")


def kv_heads_divide_over_tp(run: RunConfig) -> Problem | None:
    attention = run.model.attention
    if not isinstance(attention, GQAConfig):
        return None
    return _divides_over_tp(run, attention.num_kv_heads, "key/value heads", "model.attention.num_kv_heads")


def linear_heads_divide_over_tp(run: RunConfig) -> Problem | None:
    linear = run.model.linear_attention
    if linear is None:
        return None
    path = "model.linear_attention.num_key_heads"
    return _divides_over_tp(run, linear.num_key_heads, "key heads of linear attention", path)


def vocabulary_divides_over_tp(run: RunConfig) -> Problem | None:
    return _divides_over_tp(run, run.model.vocab_size, "vocabulary rows", "model.vocab_size")


def dense_hidden_dim_divides_over_tp(run: RunConfig) -> Problem | None:
    if not run.model.has_dense_layers:
        return None
    return _divides_over_tp(run, run.model.dense_hidden_dim, "columns of the dense layers", "model.dense_hidden_dim")


def shared_hidden_dim_divides_over_tp(run: RunConfig) -> Problem | None:
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


def expert_hidden_dim_divides_over_etp(run: RunConfig) -> Problem | None:
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


def padded_capacity_has_fixed_row_counts(run: RunConfig) -> Problem | None:
    """How many ranks a token is sent to depends on its routing, even where every expert has a fixed number of rows."""
    moe, name = run.model.moe, run.parallel.dispatcher
    if moe is None or moe.capacity is None or not moe.capacity.pad or name not in COUNT_ROWS:
        return None
    return Problem(
        "parallel.dispatcher",
        f"{name} counts the rows of every microbatch, but model.moe.capacity.pad asks for fixed row counts",
        "use all_to_all or all_gather, or set model.moe.capacity.pad to false",
    )


def ep_inner_divides_ep(run: RunConfig) -> Problem | None:
    parallel = run.parallel
    if parallel.dispatcher != "two_level" or divides(parallel.ep_inner, parallel.ep):
        return None
    return Problem(
        "parallel.ep_inner",
        f"ep={parallel.ep} does not divide into hosts of {parallel.ep_inner}",
        f"use {divisors(parallel.ep)}",
    )


def ep_inner_is_used(run: RunConfig) -> Problem | None:
    parallel = run.parallel
    if parallel.ep_inner <= 1 or parallel.dispatcher == "two_level":
        return None
    return Problem(
        "parallel.ep_inner",
        f"is {parallel.ep_inner}, but the {parallel.dispatcher} dispatcher does not distinguish hosts",
        "use 1, or set parallel.dispatcher to two_level",
    )


def row_bounds_hold_an_even_routing(run: RunConfig) -> list[Problem]:
    """Rows of one pair of ranks stray further from their mean than those of a rank, so a pair has the larger bound."""
    if not bounds_rows(run):
        return []
    row, pair = run.parallel.row_bound, run.parallel.pair_bound
    found = []
    if not (isfinite(row) and row >= 1):
        words = f"is {row:g}: with even routing a rank computes 1 times the mean, so every step would be run twice"
        found.append(Problem("parallel.row_bound", words, "use 1 or more, such as 1.25"))
    elif not (isfinite(pair) and pair >= row):
        words = f"is {pair:g}, below row_bound {row:g}: rows of one pair of ranks vary more than those of a whole rank"
        found.append(Problem("parallel.pair_bound", words, f"use more than {row:g}, such as {row * 1.2:.3g}"))
    return found


def row_bounds_are_used(run: RunConfig) -> list[Problem]:
    if bounds_rows(run):
        return []
    default, parallel = ParallelConfig(), run.parallel
    return [
        Problem(
            f"parallel.{name}",
            f"is {getattr(parallel, name):g}, but the {parallel.dispatcher} dispatcher has no such bound",
            f"use {getattr(default, name):g}, or set parallel.dispatcher to all_to_all_bounded",
        )
        for name in ("row_bound", "pair_bound")
        if getattr(parallel, name) != getattr(default, name)
    ]


def bounded_rows_are_counted_on_the_device(run: RunConfig) -> list[Problem]:
    """Only the device knows where an expert's rows end, and rows of zeros follow those of the last one."""
    moe, recipe, experts = run.model.moe, run.precision.recipe, run.kernels.experts
    if moe is None or not bounds_rows(run):
        return []
    found = []
    if moe.capacity is not None and moe.capacity.pad:
        words = "all_to_all_bounded has buffers of a fixed size already; model.moe.capacity.pad would pad them again"
        found.append(Problem("parallel.dispatcher", words, "use all_to_all, or set model.moe.capacity.pad to false"))
    if recipe is not None:
        words = f"precision.recipe {recipe} finds scales and blocks of each expert's rows, whose counts it reads"
        found.append(Problem("parallel.dispatcher", words, "use all_to_all, or precision.recipe null"))
    if run.parallel.echo is not None:
        words = "parallel.echo reads on the host which experts are cloned, and its rows were never bounded"
        found.append(Problem("parallel.dispatcher", words, "use all_to_all, or parallel.echo null"))
    if experts not in BOUNDED_EXPERTS:
        words = f"{experts} reads row counts on the host, which all_to_all_bounded does not have there"
        found.append(Problem("kernels.experts", words, f"use {', '.join(BOUNDED_EXPERTS)}, or dispatcher all_to_all"))
    return found


def link_costs_are_positive(run: RunConfig) -> list[Problem]:
    """A latency may be 0, a bandwidth may not."""
    found = []
    for name, value in asdict(run.parallel.link).items():
        if not (isfinite(value) and (value > 0 or (name.endswith("_us") and value == 0))):
            found.append(Problem(f"parallel.link.{name}", f"is {value:g}", "use a positive number"))
    return found


def shared_experts_have_an_exchange_of_their_own(run: RunConfig) -> list[Problem]:
    """With parallel.overlap shared_experts: there is a shared expert, and nothing else decides when it runs."""
    parallel, moe, path = run.parallel, run.model.moe, "parallel.overlap"
    if "shared_experts" not in parallel.overlap:
        return []
    found = []
    if moe is None or not moe.shared_hidden_dim:
        message = "shared_experts: this model has no shared expert"
        found.append(Problem(path, message, "use [], or set model.moe.shared_hidden_dim"))
    if parallel.schedule in SCHEDULES and SCHEDULES[parallel.schedule].overlaps:
        message = f"shared_experts: {parallel.schedule} runs exchanges beside another microbatch already"
        found.append(Problem(path, message, "use [], or a schedule without pairs, such as 1f1b or zb_h1"))
    if parallel.echo is not None:
        message = "shared_experts: clones of experts (parallel.echo) are sent by the same ranks from another thread"
        found.append(Problem(path, message, "use [], or parallel.echo null"))
    if "experts" in run.memory.recompute:
        message = "shared_experts: memory.recompute experts keeps the shared expert with the experts"
        found.append(Problem(path, message, "use [], or recompute attention only"))
    return found


# Those of this trainer: engines' buffers were never tried with more than one exchange of a layer.
CHUNKED_DISPATCHERS = (*get_args(NamedDispatcher), "adaptive")


def chunks_have_rows_to_exchange(run: RunConfig) -> list[Problem]:
    """With parallel.exchange_chunks: there is an exchange, nothing else runs beside it, and a chunk is computed as the
    whole would be."""
    parallel, moe, path = run.parallel, run.model.moe, "parallel.exchange_chunks"
    if parallel.exchange_chunks < 1:
        return [Problem(path, f"is {parallel.exchange_chunks}", "use 1 or more")]
    if parallel.exchange_chunks == 1:
        return []
    if moe is None or parallel.ep * parallel.etp == 1:
        return [Problem(path, "no rows are sent to experts of other ranks", "use 1, or parallel.ep of 2 or more")]
    found = []
    if parallel.schedule in SCHEDULES and SCHEDULES[parallel.schedule].overlaps:
        message = f"{parallel.schedule} runs exchanges beside another microbatch already"
        found.append(Problem(path, message, "use 1, or a schedule without pairs, such as 1f1b or zb_h1"))
    if parallel.dispatcher not in CHUNKED_DISPATCHERS:
        message = f"{parallel.dispatcher} was never run with more than one exchange of a layer under way"
        found.append(Problem(path, message, f"use 1, or dispatcher {', '.join(CHUNKED_DISPATCHERS)}"))
    if parallel.echo is not None:
        message = "clones of experts (parallel.echo) would be sent once per chunk"
        found.append(Problem(path, message, "use 1, or parallel.echo null"))
    if moe.capacity is not None and moe.capacity.pad:
        message = "model.moe.capacity.pad gives every chunk the padding of a whole microbatch"
        found.append(Problem(path, message, "use 1, or capacity.pad false"))
    if run.precision.recipe is not None:
        message = f"precision.recipe {run.precision.recipe} narrows rows together that chunks separate"
        found.append(Problem(path, message, "use 1, or precision.recipe null"))
    if run.kernels.graphs != "none":
        message = f"kernels.graphs {run.kernels.graphs} was never tried with phases of chunks"
        found.append(Problem(path, message, "use 1, or kernels.graphs none"))
    if "page" in run.memory.retained().values():
        message = "pages (memory.retain) were never tried with more than one exchange of a layer"
        found.append(Problem(path, message, "use 1, or retain nothing in pages"))
    if "experts" in run.memory.recompute:
        message = "memory.recompute experts recomputes the experts of a whole microbatch"
        found.append(Problem(path, message, "use 1, or recompute attention only, or memory.retain"))
    return found


def rank_orders_name_every_axis(run: RunConfig) -> list[Problem]:
    return list(order_problems(run.parallel))


DISPATCH_RULES = (
    padded_capacity_has_fixed_row_counts,
    ep_inner_divides_ep,
    ep_inner_is_used,
    row_bounds_hold_an_even_routing,
    row_bounds_are_used,
    bounded_rows_are_counted_on_the_device,
    link_costs_are_positive,
)


def layout_or_problems(run: RunConfig, world: int) -> tuple[FoldedLayout | None, list[Problem]]:
    """Both grids folded over this many ranks, or why they do not fold."""
    try:
        return fold(run.parallel, world), []
    except LayoutError as error:
        return None, list(error.problems)


def _divides_over_tp(run: RunConfig, whole: int, what: str, path: str) -> Problem | None:
    tp = run.parallel.tp
    if divides(tp, whole):
        return None
    return Problem("parallel.tp", f"{whole} {what} ({path}) do not divide over tp={tp}", f"use {divisors(whole)}")


def stages_hold_every_layer(run: RunConfig) -> list[Problem]:
    """parallel.stages parses, has pp * vpp stages, and places every layer and MTP module; None is balanced by cost."""
    if not _sizes_are_positive(run):
        return []
    if run.parallel.stages is None:
        return stage_size_problems(run.model, run.parallel)
    try:
        stages_of(run.model, run.parallel)
    except ConfigError as error:
        return list(error.problems)
    return []


def schedule_is_known(run: RunConfig) -> Problem | None:
    name = run.parallel.schedule
    if name in SCHEDULES:
        return None
    return Problem(
        "parallel.schedule",
        f"no schedule is called {name[:60]!r}",
        f"{did_you_mean(name, SCHEDULES)}known: {', '.join(SCHEDULES)}",
    )


def virtual_stages_fit_the_schedule(run: RunConfig) -> list[Problem]:
    """Some schedules take one stage per rank, some exactly two. How many microbatches they need is another rule."""
    parallel = run.parallel
    if parallel.schedule not in SCHEDULES or not _sizes_are_positive(run):
        return []
    found = SCHEDULES[parallel.schedule].problems(parallel.pp, parallel.vpp, microbatches=1)
    return [problem for problem in found if problem.path == "parallel.vpp"]


def microbatches_fit_the_schedule(run: RunConfig, layout: FoldedLayout) -> list[Problem]:
    """bin_packed makes as many microbatches as its documents need and adds empty ones up to what the schedule needs."""
    parallel, data = run.parallel, run.data
    one_round = data.micro_batch * layout.size("dp")
    if data.packing == "bin_packed" or data.global_batch < 1 or not divides(one_round, data.global_batch):
        return []
    if parallel.schedule not in SCHEDULES or virtual_stages_fit_the_schedule(run) or not _sizes_are_positive(run):
        return []
    microbatches = data.global_batch // one_round
    schedule = SCHEDULES[parallel.schedule]
    return [
        Problem(
            "data.global_batch",
            f"{problem.message} (global_batch / (micro_batch * dp) = {data.global_batch} / {one_round})",
            problem.fix,
        )
        for problem in schedule.problems(parallel.pp, parallel.vpp, microbatches)
    ]


PIPELINE_RULES = (stages_hold_every_layer, schedule_is_known, virtual_stages_fit_the_schedule)
RULES = (
    rank_orders_name_every_axis,
    heads_divide_over_tp,
    kv_heads_divide_over_tp,
    linear_heads_divide_over_tp,
    vocabulary_divides_over_tp,
    dense_hidden_dim_divides_over_tp,
    shared_hidden_dim_divides_over_tp,
    experts_divide_over_ep,
    expert_hidden_dim_divides_over_etp,
    expert_axes_have_experts,
    shared_experts_have_an_exchange_of_their_own,
    chunks_have_rows_to_exchange,
    *DISPATCH_RULES,
    *PIPELINE_RULES,
)
RULES_WITH_LAYOUT = (microbatches_fit_the_schedule,)


def _sizes_are_positive(run: RunConfig) -> bool:
    """Sizes below one are reported by `sizes_are_positive`."""
    return min(run.parallel.pp, run.parallel.vpp, run.model.num_layers, run.model.num_mtp + 1, run.data.micro_batch) > 0
