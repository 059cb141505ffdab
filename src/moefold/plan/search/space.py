"""The search space as data: for every option the values it may take, and a candidate, which has one of each.

`usual_space` says what is worth trying for a framework, a GPU and a model; `narrowed` keeps what the user pinned:
`tp=1,ep=32,64,recompute=mla_up+norms` leaves one value of tp, two of ep and one set of recomputed parts. Values stand
in the order in which they are tried, the fastest or most usual first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple, get_args

from moefold.blueprint.model_shape import Attention, DeltaNet, Dense, ModelShape, MoE
from moefold.checks.parallel import COUNT_ROWS
from moefold.config.memory import Recomputed, RecomputedPhase
from moefold.config.parallel import Sharding
from moefold.config.precision import Graphs
from moefold.config.renamed_keys import renamed_value
from moefold.errors import ConfigError, Problem, did_you_mean
from moefold.plan.dispatch_choice import OwnDispatcher
from moefold.plan.framework_rules import FrameworkName, refusal
from moefold.plan.memory.saving_steps import DEFAULTS, NONE, Savings, is_trained, offered, savings_of
from moefold.plan.workload import Dispatcher, PlannedFormat, Workload, changed
from moefold.schedule.names import SCHEDULES
from moefold.topology.folded_layout import DENSE_ORDERS, EXPERT_ORDERS

Recompute = frozenset[Recomputed]
# How expensive it is to recompute each part, in any unit: the order in which sets are tried.
_RECOMPUTE_COST: Mapping[Recomputed, int] = {
    "norms": 1,
    "activation": 1,
    "mla_up": 3,
    "core_attention": 6,
    "feed_forward": 5,
    "attention": 10,
    "experts": 12,
    "full": 40,
}
# GPUs whose frameworks hold operands in eight or four bits, by architecture.
_FORMATS: Mapping[str, tuple[PlannedFormat, ...]] = {
    "sm90": ("fp8_tensor", "fp8_blockwise"),
    "sm100": ("mxfp8", "fp8_tensor"),
    "sm103": ("mxfp8", "fp8_tensor"),
    "cdna3": ("fp8_tensor",),
    "cdna4": ("mxfp8", "fp8_tensor"),
}
# Tried only where recipes are searched: their losses differ more from bfloat16's (docs/precision.md).
_FOUR_BITS: Mapping[str, tuple[PlannedFormat, ...]] = {"sm100": ("nvfp4",), "sm103": ("nvfp4",)}
# Choices whose values are those of a configuration key.
_KEYS = {"format": ("precision.recipe", "precision.compute"), "sharding": ("parallel.sharding",)}
_LARGEST_TP, _MOST_SEQUENCES, _SHORTEST_SHARE = 8, 8, 1024


@dataclass(frozen=True)
class Space:
    """Each field lists the values of one choice of a `LayoutChoice`."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    pp: tuple[int, ...]
    vpp: tuple[int, ...]
    ep: tuple[int, ...]
    etp: tuple[int, ...]
    # Of a microbatch.
    sequences: tuple[int, ...]
    format: tuple[PlannedFormat, ...]
    dispatcher: tuple[Dispatcher, ...]
    ep_overlap: tuple[bool, ...]
    delay_wgrad: tuple[bool, ...]
    recompute: tuple[Recompute, ...]
    graphs: tuple[Graphs, ...]
    sharding: tuple[Sharding, ...]
    replicate: tuple[int, ...]
    # Our own framework: what is always on first, then steps that may be switched on beside it.
    savings: tuple[Savings, ...]
    # Our own framework: spare slots of each rank for clones of hot experts; 0 is none.
    clones: tuple[int, ...] = (0,)
    # Our own framework: which axes have neighbouring ranks (`parallel.rank_order`).
    dense_order: tuple[str, ...] = DENSE_ORDERS[:1]
    expert_order: tuple[str, ...] = EXPERT_ORDERS[:1]
    # Orders of microbatches follow from the other choices; this only says which may come out.
    schedule: tuple[str, ...] = tuple(SCHEDULES)


CHOICES = tuple(field.name for field in fields(Space))


class LayoutChoice(NamedTuple):
    """One value for every choice of a `Space`; the order of microbatches follows from them."""

    tp: int
    cp: int
    pp: int
    vpp: int
    ep: int
    etp: int
    sequences: int
    format: PlannedFormat
    dispatcher: Dispatcher
    ep_overlap: bool
    delay_wgrad: bool
    recompute: Recompute
    graphs: Graphs
    sharding: Sharding
    replicate: int
    savings: Savings = NONE
    # Spare slots of `parallel.echo`; 0: no clones.
    clones: int = 0
    # Of `parallel.rank_order`.
    dense_order: str = DENSE_ORDERS[0]
    expert_order: str = EXPERT_ORDERS[0]


@dataclass(frozen=True)
class Limits:
    """What candidates of one question must divide."""

    world: int
    sequences: int
    seq_len: int
    depth: int
    # Every size that tensor parallelism cuts, with its name.
    over_tp: tuple[tuple[int, str], ...]
    experts: int
    expert_hidden_dims: tuple[int, ...]
    # moefold's own rules, on top of those of every framework.
    ours: bool
    # Attention has latents, from which queries, keys and values can be made again.
    latent: bool
    # Linear attention, whose documents are not cut.
    linear: bool
    # The framework shards parameters as a matter of course.
    shards: bool
    domain: int
    framework: FrameworkName
    release: str
    # Numbers of MTP modules; whether head and embedding are one; tokens over capacity dropped; experts at all.
    mtp: int
    tied: bool
    drops: bool
    moe: bool


def limits_of(workload: Workload) -> Limits:
    model = workload.model
    mixers = {layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)}
    feeds = {layer.feed for layer in model.layers}
    ours = workload.is_own
    sizes = {(mixer.heads, "heads") for mixer in mixers}
    sizes |= {(mixer.kv_heads, "key/value heads") for mixer in mixers if not mixer.is_latent}
    linear = {layer.mixer for layer in model.layers if isinstance(layer.mixer, DeltaNet)}
    sizes |= {(mixer.groups, "key heads of linear attention") for mixer in linear}
    sizes |= {(feed.dim, "columns of dense layers") for feed in feeds if isinstance(feed, Dense)}
    moe_parts = [feed for feed in feeds if isinstance(feed, MoE)]
    sizes |= {(feed.shared_hidden_dim, "columns of the shared expert") for feed in moe_parts}
    # Other frameworks fill the vocabulary up to a multiple.
    sizes |= {(model.vocab, "rows of the vocabulary")} if ours else set()
    return Limits(
        world=workload.cluster.num_gpus,
        sequences=sequences_of(workload),
        seq_len=workload.run.data.seq_len,
        depth=len(model.layers) + model.mtp,
        over_tp=tuple(sorted(sizes)),
        experts=min((feed.experts for feed in moe_parts), default=1),
        expert_hidden_dims=tuple(sorted({feed.dim for feed in moe_parts})),
        ours=ours,
        latent=any(mixer.is_latent for mixer in mixers),
        linear=bool(linear),
        shards=workload.framework.name in ("moefold", "fsdp2", "jax"),
        domain=workload.cluster.usable_domain,
        framework=workload.framework.name,
        release=workload.framework.release,
        mtp=model.mtp,
        tied=model.tied,
        drops=workload.drops,
        moe=model.is_moe,
    )


def usual_space(workload: Workload, recipes: bool = False) -> Space:
    """What is worth trying for this workload's framework, GPU, model and batch.

    ``recipes``: precision recipes too, for our own framework as well and with those of four bits.
    """
    model, cluster, seq_len = workload.model, workload.cluster, workload.run.data.seq_len
    ours = workload.is_own
    sharded = workload.framework.name in ("moefold", "fsdp2", "jax")
    depth = len(model.layers) + model.mtp
    share = max(1, seq_len // _SHORTEST_SHARE)
    # Some savings are of flat sharding alone; `why_illegal` says so.
    flat = changed(workload, parallel={"sharding": "flat"}) if ours else workload
    return Space(
        tp=_doubling(min(_LARGEST_TP, cluster.usable_domain)),
        cp=_doubling(share),
        # Ranks with less than two layers leave nothing to balance.
        pp=_divisors(cluster.num_gpus, max(1, (depth + 2) // 2)),
        vpp=tuple(range(1, depth + 3)),
        ep=_divisors(_experts(model), cluster.num_gpus),
        etp=_doubling(min(_LARGEST_TP, cluster.usable_domain)) if model.is_moe else (1,),
        sequences=_doubling(min(_MOST_SEQUENCES, sequences_of(workload))),
        format=_formats(workload, recipes),
        dispatcher=_dispatchers(workload),
        ep_overlap=(True, False) if model.is_moe else (False,),
        delay_wgrad=(False, True),
        recompute=_recompute_sets(model, ours),
        graphs=_graphs(workload),
        sharding=_shardings(workload, sharded),
        replicate=_doubling(cluster.num_gpus) if sharded else (1,),
        savings=(savings_of(workload.run, ours), *(step.entries for step in offered(flat))),
        clones=_clones(workload),
        **_rank_orders(workload),
    )


def sequences_of(workload: Workload) -> int:
    """Of one step. Documents that are packed fill about as many sequences as there are whole microbatches."""
    data = workload.run.data
    packed = data.packing == "bin_packed"
    return data.micro_batch * workload.microbatches * workload.dp if packed else data.global_batch


def narrowed(space: Space, text: str) -> Space:
    """Only the values that `text` names: `tp=1,ep=32,64`. They need not be in the space: the user knows best."""
    changes: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, words in pinned(text):
        if name not in CHOICES:
            problems.append(Problem("fix", f"no choice is called {name[:40]!r}", _known_choices(name)))
            continue
        values = [_value(name, word) for word in words]
        problems += [value for value in values if isinstance(value, Problem)]
        changes[name] = tuple(dict.fromkeys(values))
    if problems:
        raise ConfigError(*problems)
    return replace(space, **changes)


def _known_choices(name: str) -> str:
    return f"{did_you_mean(name, CHOICES)}known: {', '.join(CHOICES)}"


def pinned(text: str) -> Iterator[tuple[str, list[str]]]:
    """Words without `=` are further values of the choice before them."""
    name, words = "", list[str]()
    for word in filter(None, (part.strip() for part in text.split(","))):
        before, equals, after = word.partition("=")
        if not equals:
            words.append(before)
            continue
        if name or words:
            yield name, words
        name, words = before.strip(), [after.strip()]
    if name or words:
        yield name, words


def _value(name: str, word: str) -> object:
    kind = {
        "format": get_args(PlannedFormat),
        "dispatcher": get_args(Dispatcher),
        "graphs": get_args(Graphs),
        "sharding": get_args(Sharding),
        "schedule": tuple(SCHEDULES),
        "dense_order": DENSE_ORDERS,
        "expert_order": EXPERT_ORDERS,
    }.get(name)
    if kind is not None:
        return word if word in kind else _refused(name, word, kind)
    if name in ("ep_overlap", "delay_wgrad"):
        known = {"true": True, "1": True, "false": False, "0": False}
        return known[word.lower()] if word.lower() in known else _refused(name, word, ("true", "false"))
    if name == "recompute":
        parts = frozenset() if word == "none" else frozenset(word.split("+"))
        unknown = sorted(parts - set(get_args(Recomputed)))
        return _refused(name, unknown[0], ("none", *get_args(Recomputed))) if unknown else parts
    if name == "savings":
        entries = frozenset() if word == "none" else frozenset(word.replace(":", "=").split("+"))
        bad = sorted(entry for entry in entries if entry.partition("=")[0] not in DEFAULTS)
        return _refused(name, bad[0], ("none", *(f"{path}:VALUE" for path in DEFAULTS))) if bad else entries
    least = 0 if name == "clones" else 1
    if not (word.isascii() and word.isdigit() and len(word) < 8 and int(word) >= least):
        return Problem(f"fix {name}", f"{word[:40]!r} is not a size", f"use a whole number from {least}")
    return int(word)


def _refused(name: str, word: str, known: Iterable[str]) -> Problem:
    known = tuple(known)
    if (new := next(filter(None, (renamed_value(path, word) for path in _KEYS.get(name, ()))), None)) is not None:
        return Problem(f"fix {name}", f"{word} is called {new} now", f"use {new}")
    return Problem(f"fix {name}", f"cannot be {word[:40]!r}", f"{did_you_mean(word, known)}choose {', '.join(known)}")


# ---- what is worth trying ----


def _experts(model: ModelShape) -> int:
    return next((layer.feed.experts for layer in model.layers if isinstance(layer.feed, MoE)), 1)


def _dispatchers(workload: Workload) -> tuple[Dispatcher, ...]:
    if not workload.model.is_moe:
        return ("local",)
    if workload.is_own:
        # With capacities, slots may be padded, and then counts must be known beforehand.
        return tuple(name for name in get_args(OwnDispatcher) if not (workload.drops and name in COUNT_ROWS))
    if workload.framework.name == "megatron":
        return ("hybridep", "deepep", "all_to_all", "all_gather")
    return ("deepep", "all_to_all")


def _graphs(workload: Workload) -> tuple[Graphs, ...]:
    """Megatron's; rows of experts have places in graphs of a whole step since the release that has pages for them."""
    if workload.framework.name != "megatron":
        return ("none",)
    paged = {
        "num_moe_experts": _experts(workload.model),
        "moe_paged_stash": True,
        "moe_flex_dispatcher_backend": "hybridep",
    }
    whole = not workload.model.is_moe or refusal("megatron", paged, workload.framework.release) is None
    return ("full", "partial", "none") if whole else ("partial", "none")


def _clones(workload: Workload) -> tuple[int, ...]:
    """Where some rank has more rows than the mean; capacities give no rank more."""
    skewed = workload.is_own and workload.model.is_moe and workload.imbalance > 1 and not workload.drops
    return (0, 1, 2) if skewed else (0,)


def _rank_orders(workload: Workload) -> dict[str, tuple[str, ...]]:
    """Any, where ranks are in several domains of fast links; the usual one first. Else the run's own."""
    cluster, parallel = workload.cluster, workload.parallel
    if not workload.is_own or cluster.machine is not None or cluster.num_gpus <= cluster.usable_domain:
        return {"dense_order": (parallel.rank_order.dense,), "expert_order": (parallel.rank_order.expert,)}
    # Groups of a changing size are neighbours along cp, then dp.
    dense = (order for order in DENSE_ORDERS if not parallel.dynamic_cp or order.index("cp") < order.index("dp"))
    return {"dense_order": tuple(dense), "expert_order": EXPERT_ORDERS if workload.model.is_moe else EXPERT_ORDERS[:1]}


def _shardings(workload: Workload, sharded: bool) -> tuple[Sharding, ...]:
    if workload.is_own:
        own: tuple[Sharding, ...] = ("fsdp", "flat")
        return tuple(name for name in own if is_trained(frozenset({f"parallel.sharding={name}"})))
    return ("fsdp",) if sharded else ("zero1", "fsdp")


def _formats(workload: Workload, recipes: bool) -> tuple[PlannedFormat, ...]:
    """Those of the GPU, and the one that was asked for."""
    architecture, asked = workload.cluster.gpu.architecture, workload.format
    usual = _FORMATS.get(architecture, ())
    if usual and workload.framework.name == "fsdp2":
        # torchtitan's: one scale per row.
        usual = ("fp8_rowwise", *usual)
    if recipes and usual:
        usual = (*_FOUR_BITS.get(architecture, ()), *usual)
    if not workload.is_own:
        return tuple(dict.fromkeys((*usual, "bfloat16", asked)))
    trained = (name for name in usual if is_trained(frozenset({f"precision.recipe={name}"})))
    return tuple(dict.fromkeys((asked, *trained))) if recipes else (asked,)


def _recompute_sets(model: ModelShape, ours: bool) -> tuple[Recompute, ...]:
    if ours:
        groups: list[tuple[Recomputed | None, ...]] = [(None, part) for part in get_args(RecomputedPhase)]
    else:
        latent = any(isinstance(layer.mixer, Attention) and layer.mixer.is_latent for layer in model.layers)
        # Computing experts again computes their activation again.
        groups = [(None, "norms"), (None, "activation", "experts"), (None, "feed_forward")]
        groups += [(None, "mla_up")] if latent else []
    made = {frozenset(part for part in parts if part is not None) for parts in product(*groups)}
    if not ours:
        made.add(frozenset({"full"}))
    if not model.is_moe:
        made = {parts for parts in made if "experts" not in parts}
    return tuple(sorted(made, key=lambda parts: (sum(_RECOMPUTE_COST[part] for part in parts), sorted(parts))))


def _doubling(most: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(max(1, most).bit_length()))


def _divisors(number: int, most: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, min(number, most) + 1) if number % n == 0)
