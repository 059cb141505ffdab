"""Rules about context parallelism: what each attention mode needs, and what dynamic_cp needs."""

from __future__ import annotations

from moefold.checks.sizes import divides, divisors
from moefold.config.attention import GQAConfig
from moefold.config.parallel import ContextMode
from moefold.config.run import RunConfig
from moefold.errors import Problem
from moefold.topology.folded_layout import DENSE_ORDERS, FoldedLayout


def modes_in_use(run: RunConfig) -> dict[str, ContextMode]:
    """The context mode of each type of layer that the model has, by its key."""
    attention, context = run.model.attention, run.parallel.context
    if not isinstance(attention, GQAConfig):
        return {"full": context.full}
    every = max(attention.window_every, attention.nope_every or 1)
    # Layers repeat after these; MTP modules go on counting.
    kinds = {
        attention.window_of(layer) is not None or attention.chunk_of(layer) is not None
        for layer in range(min(run.model.num_layers, max(every, 1)))
    }
    modes: dict[str, ContextMode] = {"windowed": context.windowed} if True in kinds else {}
    return modes | ({"full": context.full} if False in kinds else {})


def heads_divide_over_the_all_to_all(run: RunConfig) -> list[Problem]:
    """all_to_all gives each of cp ranks some of the heads; key/value heads are repeated if there are fewer than cp."""
    return _all_to_all_problems(run, run.parallel.cp, f"cp={run.parallel.cp}")


def heads_divide_over_every_all_to_all(run: RunConfig, layout: FoldedLayout) -> list[Problem]:
    """When the size changes by microbatch, the largest is dp * cp."""
    if not run.parallel.dynamic_cp:
        return []
    largest = max(layout.context_sizes(dynamic=True))
    if _all_to_all_problems(run, run.parallel.cp, ""):
        return []
    return _all_to_all_problems(run, largest, f"the {largest} ranks that dynamic_cp may use")


def inner_divides_cp(run: RunConfig) -> Problem | None:
    parallel = run.parallel
    inner, cp = parallel.context.inner, parallel.cp
    if "hierarchical" not in modes_in_use(run).values() or divides(inner, cp):
        return None
    return Problem("parallel.context.inner", f"cp={cp} does not divide into sets of {inner}", f"use {divisors(cp)}")


def inner_is_used(run: RunConfig) -> Problem | None:
    context = run.parallel.context
    if context.inner <= 1 or "hierarchical" in (context.full, context.windowed):
        return None
    return Problem(
        "parallel.context.inner",
        f"is {context.inner}, but no layer type is hierarchical (full={context.full}, windowed={context.windowed})",
        "use 1, or set parallel.context.full to hierarchical",
    )


def dynamic_cp_has_bin_packed_documents(run: RunConfig) -> Problem | None:
    packing = run.data.packing
    if not run.parallel.dynamic_cp or packing == "bin_packed":
        return None
    return Problem(
        "parallel.dynamic_cp",
        f"chooses ranks by the length of documents, but data.packing is {packing}",
        "set data.packing to bin_packed, or parallel.dynamic_cp to false",
    )


def dynamic_cp_has_neighbours(run: RunConfig) -> Problem | None:
    """Groups of any size are runs of ranks along cp and then dp, numbered as process groups are: by rank."""
    order = run.parallel.rank_order.dense
    names = order.split("-")
    if not run.parallel.dynamic_cp or order not in DENSE_ORDERS or names.index("cp") < names.index("dp"):
        return None
    fitting = ", ".join(each for each in DENSE_ORDERS if each.index("cp") < each.index("dp"))
    return Problem(
        "parallel.rank_order.dense",
        f"{order} has dp inside of cp, and parallel.dynamic_cp makes groups of neighbours along cp first",
        f"use one of {fitting}, or parallel.dynamic_cp false",
    )


def dynamic_cp_halves_evenly(run: RunConfig, layout: FoldedLayout) -> Problem | None:
    dp, cp = layout.size("dp"), layout.size("cp")
    if not run.parallel.dynamic_cp or _is_power_of_two(dp * cp):
        return None
    return Problem(
        "parallel.dynamic_cp",
        f"cuts dp * cp = {dp} * {cp} = {dp * cp} ranks into groups of 1, 2, 4, ...",
        "use a world in which dp * cp is a power of two",
    )


def dynamic_cp_has_an_even_inner(run: RunConfig) -> Problem | None:
    inner = run.parallel.context.inner
    hierarchical = "hierarchical" in modes_in_use(run).values()
    if not (run.parallel.dynamic_cp and hierarchical) or inner < 1 or _is_power_of_two(inner):
        return None
    return Problem("parallel.context.inner", f"groups of 1, 2, 4, ... have no sets of {inner}", "use a power of two")


def linear_attention_has_whole_documents(run: RunConfig) -> list[Problem]:
    """A document's state passes from token to token: a rank needs all tokens before its own, one after the other."""
    parallel = run.parallel
    if run.model.linear_attention is None:
        return []
    why = "linear attention (model.linear_attention) carries a state along the whole document, on one rank"
    found = []
    if parallel.cp > 1:
        fix = "use cp 1, and tp or recomputation (memory.recompute attention) for long documents"
        found.append(Problem("parallel.cp", f"cp={parallel.cp} cuts documents, but {why}", fix))
    if parallel.dynamic_cp:
        found.append(Problem("parallel.dynamic_cp", f"cuts long documents, but {why}", "use dynamic_cp false"))
    return found


RULES = (
    linear_attention_has_whole_documents,
    heads_divide_over_the_all_to_all,
    inner_divides_cp,
    inner_is_used,
    dynamic_cp_has_bin_packed_documents,
    dynamic_cp_has_neighbours,
    dynamic_cp_has_an_even_inner,
)
RULES_WITH_LAYOUT = (heads_divide_over_every_all_to_all, dynamic_cp_halves_evenly)


def _all_to_all_problems(run: RunConfig, cp: int, ranks: str) -> list[Problem]:
    """Whether the heads of a tp rank divide over the ranks that exchange them."""
    parallel, heads = run.parallel, run.model.attention.num_heads
    if parallel.tp < 1 or cp <= 1 or heads < 1 or heads % parallel.tp:
        return []
    own = heads // parallel.tp
    problems = []
    for kind, mode in modes_in_use(run).items():
        if mode == "all_to_all" and own % cp:
            message = f"{own} heads of a tp rank do not divide over {ranks}"
            fix = f"use ring, or {divisors(own)} ranks"
            problems.append(Problem(f"parallel.context.{kind}", message, fix))
    inner = parallel.context.inner
    if "hierarchical" in modes_in_use(run).values() and not divides(inner, own):
        message = f"{own} heads of a tp rank do not divide over inner={inner}"
        problems.append(Problem("parallel.context.inner", message, f"use {divisors(own)}"))
    return problems


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
