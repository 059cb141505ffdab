"""The search space as data: for every option the values it may take.

`usual_space` says what is worth trying for a framework, a GPU and a model; `narrowed` keeps what the user pinned:
`tp=1,ep=32,64,recompute=mla_up+norms` leaves one value of tp, two of ep and one set of recomputed parts. Values stand
in the order in which they are tried, the fastest or most usual first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, get_args

from moefold.blueprint.model_shape import Attention, ModelShape, MoE
from moefold.checks.parallel import COUNT_ROWS
from moefold.config.memory import Recomputed, RecomputedPhase
from moefold.config.parallel import Sharding
from moefold.config.precision import Graphs
from moefold.config.renamed_keys import renamed_value
from moefold.errors import ConfigError, Problem, did_you_mean
from moefold.plan.dispatch_choice import OwnDispatcher
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
    """Each field lists the values of one choice of `candidates.LayoutChoice`."""

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
        graphs=("full", "partial", "none") if workload.framework.name == "megatron" else ("none",),
        sharding=_shardings(workload, sharded),
        replicate=_doubling(cluster.num_gpus) if sharded else (1,),
        savings=(savings_of(workload.run), *(step.entries for step in offered(flat))) if ours else (NONE,),
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
