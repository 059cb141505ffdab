"""Candidates of a search: one value for every option, which of them are legal, and the workload of each.

Legality is divisibility, by the rules of `checks` applied to shapes instead of runs: heads over tp, experts over ep,
experts' hidden dims over etp, the batch over microbatches and data-parallel ranks, the two grids over the same ranks,
and a schedule that exists; and what a framework's own validator refuses (`plan/framework_rules.py`), for which a
candidate is written in that framework's words (`plan/launch_command.py`). `why_illegal` gives the rule in words, so
that a search that finds nothing can say why. It is the one gate: every candidate passes it again before it is timed,
however it was made.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import get_args

from moefold.config.memory import MemoryConfig, Recomputed
from moefold.config.parallel import EchoConfig, Overlap, ParallelConfig, RankOrderConfig, Sharding
from moefold.config.precision import Graphs, KernelsConfig
from moefold.plan.echo_cost import least_rows
from moefold.plan.framework_rules import refusal
from moefold.plan.launch_command import GRAPHED, settings_of
from moefold.plan.memory.saving_steps import NONE, savings_of, why_no_savings, with_savings
from moefold.plan.search.space import LayoutChoice, Limits, Recompute, Space, limits_of
from moefold.plan.timing.throughput import SATURATING_SMS
from moefold.plan.traffic import reach_along
from moefold.plan.workload import Framework, Workload, in_format
from moefold.schedule.names import SCHEDULES
from moefold.topology.folded_layout import DENSE_ORDERS, EXPERT_ORDERS, fold, ranks_inside

# Where several orders would do, the first of these is meant.
_ORDERS = tuple(dict.fromkeys(("1f1b", "interleaved", "1f1b_overlapped", "interleaved_overlapped", *SCHEDULES)))
# Grouped GEMMs read rows in pieces of this many elements of two bytes.
_ROW = 8


def why_illegal(choice: LayoutChoice, limits: Limits, space: Space) -> str | None:
    """The first rule that this candidate breaks, or None."""
    return why_no_grid(choice, limits) or _why_no_batch(choice, limits) or _why_no_framework(choice, limits, space)


def why_no_grid(choice: LayoutChoice, limits: Limits) -> str | None:
    """The first that its degrees break, whatever its options are."""
    stage = limits.world // choice.pp
    model = choice.tp * choice.cp * choice.pp
    if limits.world % model:
        return f"tp*cp*pp does not divide {limits.world} ranks"
    if choice.tp > limits.domain:
        return "tp leaves the domain of fast links"
    for size, what in limits.over_tp:
        if size % choice.tp:
            return f"{size} {what} do not divide over tp"
    if limits.seq_len % (2 * choice.cp if choice.cp > 1 else 1):
        return f"sequences of {limits.seq_len} tokens do not divide over cp"
    if limits.linear and choice.cp > 1:
        return "linear attention has whole documents, which cp would cut"
    if limits.experts % choice.ep:
        return f"{limits.experts} experts do not divide over ep"
    if stage % (choice.ep * choice.etp):
        return "ep*etp does not divide the ranks of a stage"
    if any(dim % choice.etp or (limits.ours and dim // choice.etp % _ROW) for dim in limits.expert_hidden_dims):
        return "experts' columns do not divide over etp"
    if choice.pp * choice.vpp > limits.depth + 2:
        return f"more than {limits.depth + 2} stages for {limits.depth} layers, an embedding and a head"
    if choice.pp == 1 < choice.vpp:
        return "virtual stages need a pipeline"
    return None


def _why_no_batch(choice: LayoutChoice, limits: Limits) -> str | None:
    dp = limits.world // (choice.tp * choice.cp * choice.pp)
    if limits.sequences % (choice.sequences * dp):
        return f"a batch of {limits.sequences} sequences does not divide over sequences*dp"
    return None if divides_copies(choice, limits) else "replicate does not divide dp and edp"


def divides_copies(choice: LayoutChoice, limits: Limits) -> bool:
    stage = limits.world // choice.pp
    dp, edp = stage // (choice.tp * choice.cp), stage // (choice.ep * choice.etp)
    return dp % choice.replicate == 0 and (edp <= 1 or edp % choice.replicate == 0)


def _why_no_framework(choice: LayoutChoice, limits: Limits, space: Space) -> str | None:
    """What frameworks do not combine."""
    if (choice.dispatcher == "local") != (choice.ep * choice.etp == 1):
        return "only experts on the same rank need no dispatcher"
    if choice.replicate > 1 and choice.sharding not in ("fsdp", "flat"):
        return "copies are of what is sharded"
    if reason := why_no_savings(choice.savings, choice.sharding, choice.recompute, choice.cp, limits.ours):
        return reason
    if not limits.ours:
        if choice.ep_overlap and choice.pp > 1 and choice.vpp == 1:
            return "overlapping dispatch in a pipeline needs virtual stages"
        if choice.delay_wgrad and not choice.ep_overlap:
            return "weight gradients are deferred to fill what overlapped dispatch leaves"
        if choice.sharding == "fsdp" and choice.pp > 1 and not limits.shards:
            return "fsdp with a pipeline gathers weights for every microbatch"
        if choice.vpp > 1 and (reason := _why_no_rounds(choice, limits)):
            return reason
        if reason := _why_refused(_told_apart(choice, limits), limits):
            return reason
    if choice.ep_overlap and choice.ep * choice.etp == 1:
        return "there is no dispatch to overlap"
    if choice.clones and (reason := _why_no_clones(choice, limits)):
        return reason
    return None if order_of_choice(choice, limits, space) else "no order of microbatches does this"


def _why_no_rounds(choice: LayoutChoice, limits: Limits) -> str | None:
    microbatches = microbatches_of(choice, limits)
    if limits.framework == "megatron":
        grouped = microbatch_group(choice.pp, microbatches) is not None
        return None if grouped else "interleaved stages take microbatches in groups of pp or more, the last group too"
    return "interleaved stages take microbatches in rounds of pp" if microbatches % choice.pp else None


def microbatch_group(pp: int, microbatches: int) -> int | None:
    """Megatron's microbatch_group_size_per_vp_stage for the most rounds there can be; None if it refuses that.

    Rounds are groups of at least pp, here as even as can be, which is how memory in flight is predicted. Megatron makes
    all of them but the last the same, and refuses a last one of fewer than pp.
    """
    if microbatches < pp:
        return None
    group = -(-microbatches // (microbatches // pp))
    rest = microbatches % group
    return group if rest == 0 or rest >= pp else None


@lru_cache(maxsize=65536)
def _why_refused(choice: LayoutChoice, limits: Limits) -> str | None:
    return refusal(limits.framework, settings_of(choice, limits), limits.release)


def _told_apart(choice: LayoutChoice, limits: Limits) -> LayoutChoice:
    """Without what no rule asks for, so that few are judged: Megatron's only ask which sizes are more than one."""
    if limits.framework != "megatron":
        return choice._replace(sequences=1, savings=NONE)
    pp, vpp, ep = min(choice.pp, 2), min(choice.vpp, 2), min(choice.ep, 2)
    sharding: Sharding = "fsdp" if choice.sharding == "fsdp" else "zero1"
    return choice._replace(
        tp=1, cp=1, pp=pp, vpp=vpp, ep=ep, etp=1, sequences=1, replicate=1, sharding=sharding, savings=NONE
    )


def why_not_started(workload: Workload) -> str | None:
    """The rule of its framework that this workload breaks, whoever made it; None if there is none."""
    framework, limits = workload.framework, limits_of(workload)
    return refusal(framework.name, settings_of(choice_of_workload(workload), limits), framework.release)


def _why_no_clones(choice: LayoutChoice, limits: Limits) -> str | None:
    """The rules of `checks/messages.py`."""
    if not limits.ours or choice.ep == 1:
        return "experts are cloned on other ranks of their ep group"
    if choice.ep_overlap:
        return "clones travel on the stream that overlapped dispatch would use"
    return None if choice.format in ("bfloat16", "float16", "float32") else "clones are sent wide"


def microbatches_of(choice: LayoutChoice, limits: Limits) -> int:
    dp = limits.world // (choice.tp * choice.cp * choice.pp)
    return limits.sequences // (choice.sequences * dp)


def order_of_choice(choice: LayoutChoice, limits: Limits, space: Space) -> str | None:
    if not limits.ours:
        name = "1f1b" if choice.vpp == 1 else "interleaved"
        return name if name in space.schedule else None
    wanted = (choice.ep_overlap, choice.delay_wgrad)
    microbatches = microbatches_of(choice, limits)
    for name in _ORDERS:
        order = SCHEDULES[name]
        traits = (order.overlaps, order.splits_backward) == wanted and order.virtual in (None, choice.vpp)
        enough = microbatches >= order.microbatches_per_stage * choice.pp * choice.vpp
        if traits and enough and name in space.schedule:
            return name
    return None


def workload_of_choice(choice: LayoutChoice, template: Workload, limits: Limits, space: Space) -> Workload:
    """The template with this candidate's degrees, batch, format and options.

    A search makes tens of thousands: sections of the run are replaced, and nothing is validated again.
    """
    run, schedule = template.run, order_of_choice(choice, limits, space) or "1f1b"
    edp = limits.world // choice.pp // (choice.ep * choice.etp)
    parallel = replace(
        run.parallel,
        tp=choice.tp,
        cp=choice.cp,
        pp=choice.pp,
        vpp=choice.vpp,
        ep=choice.ep,
        etp=choice.etp,
        schedule=schedule,
        overlap=() if limits.ours else _overlap(choice),
        stages=None,
        sharding=choice.sharding,
        dp_replicate=choice.replicate,
        # Where no two ranks hold the same experts there is nothing to copy.
        edp_replicate=choice.replicate if edp > 1 else 1,
        dispatcher=run.parallel.dispatcher if choice.dispatcher == "local" else choice.dispatcher,
        ep_inner=_inner(choice, run.parallel.ep_inner, limits),
        dispatch_sms=run.parallel.dispatch_sms if choice.dispatcher in SATURATING_SMS else None,
        echo=EchoConfig(slots=choice.clones) if choice.clones else None,
        rank_order=_rank_order(choice.dense_order, choice.expert_order),
    )
    parallel = _synced(parallel, limits.world)
    precision = run.precision if choice.format == template.format else in_format(run.precision, choice.format)
    memory = _recomputing(run.memory, choice.recompute)
    memory, precision = with_savings(memory, precision, choice.savings, limits.ours)
    made = Workload(
        run=replace(
            run,
            parallel=parallel,
            data=replace(run.data, micro_batch=choice.sequences, global_batch=limits.sequences),
            precision=precision,
            memory=memory,
            kernels=_launched(run.kernels, choice.graphs),
        ),
        cluster=template.cluster,
        framework=_launching(template.framework, choice.graphs, template.model.is_moe),
        imbalance=template.imbalance,
        shape=template.shape,
        rescaling=template.rescaling,
    )
    return _from_break_even(made) if choice.clones else made


def _from_break_even(workload: Workload) -> Workload:
    """No clone for fewer rows than take as long as sending it."""
    echo = workload.parallel.echo
    assert echo is not None
    parallel = replace(workload.parallel, echo=replace(echo, min_rows=least_rows(workload)))
    return replace(workload, run=replace(workload.run, parallel=parallel))


def _synced(parallel: ParallelConfig, world: int) -> ParallelConfig:
    """In four steps where the given run is and this layout can be."""
    if parallel.param_sync == "direct":
        return parallel
    if parallel.sharding == "flat":
        layout = fold(parallel, world)
        names = ("dense_shard", "expert_shard")
        each = [(ranks_inside(layout, name, parallel.ranks_per_host), layout.size(name)) for name in names]
        if all(inside for inside, _ in each) and any(1 < (inside or 1) < size for inside, size in each):
            return parallel
    return replace(parallel, param_sync="direct", ranks_per_host=1)


def _overlap(choice: LayoutChoice) -> tuple[Overlap, ...]:
    named: tuple[tuple[Overlap, bool], ...] = (("ep", choice.ep_overlap), ("wgrad", choice.delay_wgrad))
    return tuple(name for name, on in named if on)


@lru_cache(maxsize=64)
def _rank_order(dense: str, expert: str) -> RankOrderConfig:
    return RankOrderConfig(dense, expert)


def _inner(choice: LayoutChoice, given: int, limits: Limits) -> int:
    """two_level: ranks of an ep group that share a domain of fast links."""
    if choice.dispatcher == "local":
        return given
    if choice.dispatcher != "two_level":
        return 1
    where = reach_along(("ep",), choice.expert_order, expert_sizes(choice, limits), limits.domain)
    return gcd(choice.ep, where.inside)


def dense_sizes(choice: LayoutChoice, limits: Limits) -> tuple[tuple[str, int], ...]:
    dp = limits.world // (choice.tp * choice.cp * choice.pp)
    return ("tp", choice.tp), ("cp", choice.cp), ("dp", dp)


def expert_sizes(choice: LayoutChoice, limits: Limits) -> tuple[tuple[str, int], ...]:
    edp = limits.world // choice.pp // (choice.ep * choice.etp)
    return ("etp", choice.etp), ("ep", choice.ep), ("edp", edp)


@lru_cache(maxsize=256)
def _recomputing(memory: MemoryConfig, recompute: Recompute) -> MemoryConfig:
    """With parts in the order of `memory.recompute`."""
    return replace(memory, recompute=tuple(part for part in get_args(Recomputed) if part in recompute))


@lru_cache(maxsize=256)
def _launching(framework: Framework, graphs: Graphs, is_moe: bool) -> Framework:
    """Graphs of a whole step need rows of experts in places that do not move."""
    return replace(framework, paged_stash=graphs == "full" and is_moe)


@lru_cache(maxsize=256)
def _launched(kernels: KernelsConfig, graphs: Graphs) -> KernelsConfig:
    return replace(kernels, graphs=graphs, graph_scope=GRAPHED if graphs == "partial" else kernels.graph_scope)


def choice_of_workload(workload: Workload) -> LayoutChoice:
    """The candidate that is this workload, as far as choices describe it."""
    parallel = workload.parallel
    return LayoutChoice(
        parallel.tp,
        parallel.cp,
        parallel.pp,
        parallel.vpp,
        parallel.ep,
        parallel.etp,
        workload.run.data.micro_batch,
        workload.format,
        workload.dispatcher,
        workload.ep_overlap,
        workload.delay_wgrad,
        workload.recompute,
        workload.run.kernels.graphs,
        parallel.sharding,
        parallel.dp_replicate,
        savings_of(workload.run, workload.is_own),
        0 if parallel.echo is None else parallel.echo.slots,
        parallel.rank_order.dense,
        parallel.rank_order.expert,
    )


def described(choice: LayoutChoice) -> str:
    """A candidate in a few words: what it cuts, and the options that are on."""
    axes = ("tp", "cp", "pp", "vpp", "ep", "etp")
    sizes = [f"{axis}{getattr(choice, axis)}" for axis in axes if getattr(choice, axis) > 1] or ["dp only"]
    options = [f"mbs{choice.sequences}", choice.format, choice.dispatcher * (choice.dispatcher != "local")]
    options += [order for order in choice[-2:] if order not in (DENSE_ORDERS[0], EXPERT_ORDERS[0])]
    options += [f"{choice.clones} clones a rank" if choice.clones else ""]
    options += ["overlap" * choice.ep_overlap, "delayed wgrad" * choice.delay_wgrad]
    options += [f"{choice.graphs} graphs" if choice.graphs != "none" else "", choice.sharding]
    options += [f"x{choice.replicate} copies" if choice.replicate > 1 else ""]
    options += [f"recompute {'+'.join(sorted(choice.recompute))}" if choice.recompute else ""]
    options += sorted(entry.removeprefix("memory.").removeprefix("precision.") for entry in choice.savings)
    return " ".join(filter(None, [*sizes, *options]))
