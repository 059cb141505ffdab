"""Savings of memory: those of our own framework and of Megatron-LM as data, and what each would free on the fullest
rank.

A saving is a set of `path=value` entries. Some compute a step of a block again, some let its result wait in the host's
memory, some keep optimizer states in fewer bytes or elsewhere. All but the last kind give the same numbers. A search
switches them on where a layout would not fit, the cheapest first (`plan/search/cheapest_savings.py`). Of ours only what
the trainer has is offered: `checks/planned_only.py` says what that is. What Megatron-LM recomputes is a choice of its
own, and comes before these.

Savings do not add up: two options may drop the same tensor, and another rank may become the fullest. So what one frees
is the difference of two whole predictions, with the option and without it (`savings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType

from moefold.blueprint.model_shape import Attention, Dense, Layer, MoE
from moefold.checks.planned_only import PLANNED_ONLY
from moefold.checks.retained_steps import STEPS_OF_PHASE
from moefold.config.memory import MemoryConfig, Recomputed
from moefold.config.parallel import Sharding
from moefold.config.precision import PrecisionConfig
from moefold.config.precision_recipes import NarrowRecipe
from moefold.config.run import RunConfig
from moefold.plan.memory.peak import predict_memory
from moefold.plan.workload import Workload, changed

# Entries `path=value` in which a run differs from one without savings.
Savings = frozenset[str]
NONE: Savings = frozenset()


@dataclass(frozen=True)
class SavingStep:
    """One saving. `suits` says whether a workload has what it saves; `exact`, whether all numbers stay the same."""

    name: str
    words: str
    entries: Savings
    suits: Callable[[Workload], bool]
    exact: bool = True


def _has(is_it: Callable[[Layer], bool]) -> Callable[[Workload], bool]:
    return lambda workload: any(is_it(layer) for layer in workload.model.layers)


def _retain(how: str, *steps: str) -> Savings:
    return frozenset(f"memory.retain.{step}={how}" for step in steps)


def _is_latent(layer: Layer) -> bool:
    return isinstance(layer.mixer, Attention) and layer.mixer.is_latent


def _is_moe(layer: Layer) -> bool:
    return isinstance(layer.feed, MoE)


def _is_dense(layer: Layer) -> bool:
    return isinstance(layer.feed, Dense)


def _has_shared(layer: Layer) -> bool:
    return isinstance(layer.feed, MoE) and layer.feed.shared_hidden_dim > 0


def _has_attention(layer: Layer) -> bool:
    return layer.mixer is not None


def _has_masters(workload: Workload) -> bool:
    """Sharded main weights of float32 beside weights of bfloat16, which Adam updates and QK-clip does not scale."""
    narrowed = workload.is_flat and workload.master_bytes == 4 and workload.gather_bytes == 2
    return narrowed and _is_adam(workload) and workload.run.optim.qk_clip is None


def _is_adam(workload: Workload) -> bool:
    """Muon's momentum is kept in the format of the weights."""
    optim = workload.run.optim
    return "muon" not in {optim.algorithm, *(group.algorithm for group in optim.groups)}


def _takes_rows_as_they_are(workload: Workload) -> bool:
    """Probs that multiply the experts' input make other rows of them, which are kept."""
    moe = workload.run.model.moe
    return _has(_is_moe)(workload) and (moe is None or moe.weight_at != "input")


_NORMS = ("attention_norm", "feed_norm")
STEPS: tuple[SavingStep, ...] = (
    SavingStep("activation", "recompute the experts' activation", _retain("discard", "activation"), _has(_is_moe)),
    SavingStep("norms", "recompute norms", _retain("discard", *_NORMS), _has(_has_attention)),
    SavingStep("latent_norm", "recompute norms of latents", _retain("discard", "latent_norm"), _has(_is_latent)),
    SavingStep(
        "mla_up",
        "recompute queries, keys and values from their latents",
        _retain("discard", "mla_up"),
        _has(_is_latent),
    ),
    SavingStep("shared", "recompute the shared expert", _retain("discard", "shared"), _has(_has_shared)),
    SavingStep("dense", "recompute dense feed-forwards", _retain("discard", "dense"), _has(_is_dense)),
    SavingStep("gate_up", "recompute the experts' first GEMM", _retain("discard", "gate_up"), _has(_is_moe)),
    SavingStep("core", "recompute attention's output", _retain("discard", "core"), _has(_has_attention)),
    SavingStep("rows_away", "offload rows that experts received", _retain("offload", "rows"), _takes_rows_as_they_are),
    SavingStep("core_away", "offload attention's output", _retain("offload", "core"), _has(_has_attention)),
    SavingStep("gate_up_away", "offload the experts' first GEMM", _retain("offload", "gate_up"), _has(_is_moe)),
    SavingStep(
        "remainder",
        "main weights as 16 bits beside the bfloat16 weights",
        frozenset({"precision.master=remainder"}),
        _has_masters,
    ),
    SavingStep(
        "optimizer_host",
        "optimizer states in the host's memory",
        frozenset({"memory.optimizer=host"}),
        lambda workload: True,
    ),
    SavingStep(
        "moments_bf16",
        "moments in bfloat16, rounded stochastically",
        frozenset({"precision.moments=bfloat16", "precision.moments_rounding=stochastic"}),
        lambda workload: workload.moment_bytes > 2 and _is_adam(workload),
        exact=False,
    ),
)
# `--optimizer-cpu-offload` and `--use-precision-aware-optimizer`, of the distributed optimizer; moments are rounded to
# nearest.
MEGATRON_STEPS = (
    SavingStep(
        "optimizer_cpu",
        "optimizer states in the host's memory, updated there",
        frozenset({"memory.optimizer=cpu"}),
        lambda workload: True,
    ),
    SavingStep(
        "moments_bf16",
        "moments in bfloat16",
        frozenset({"precision.moments=bfloat16"}),
        lambda workload: workload.moment_bytes > 2,
        exact=False,
    ),
)
MEGATRON_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {"memory.optimizer": "device", "precision.moments": "float32"}
)
# Keys that savings set, in a fixed order, with the value of a run that saves nothing.
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        path: attrgetter(path.partition(".")[2])(MemoryConfig() if path.startswith("memory.") else PrecisionConfig())
        for path in sorted({entry.partition("=")[0] for step in STEPS for entry in step.entries})
    }
)
_TRAINED = {row.path: row.trained for row in PLANNED_ONLY}


def offered(workload: Workload) -> tuple[SavingStep, ...]:
    """Those that the trainer has and that this workload has something for."""
    return tuple(step for step in steps_of(workload) if step.suits(workload))


def steps_of(workload: Workload) -> tuple[SavingStep, ...]:
    """All of the framework's."""
    if workload.is_own:
        return tuple(step for step in STEPS if is_trained(step.entries))
    return MEGATRON_STEPS if workload.framework.name == "megatron" else ()


def is_trained(entries: Savings) -> bool:
    parts = (entry.partition("=") for entry in entries)
    return all(path not in _TRAINED or value in _TRAINED[path] for path, _, value in parts)


def is_retained(entries: Savings) -> bool:
    """Whether some of them retain steps of a block."""
    return any(entry.startswith("memory.retain.") for entry in entries)


def is_on_host(entries: Savings) -> bool:
    """Whether some of them use the host's memory instead."""
    return any(entry.rpartition("=")[2] in ("offload", "host", "cpu") for entry in entries)


def inside_phases(recompute: frozenset[Recomputed], savings: Savings) -> bool:
    """Whether a retained step lies in a phase that is recomputed whole."""
    steps = {entry.partition("=")[0].rpartition(".")[2] for entry in savings if entry.startswith("memory.retain.")}
    # The norm of a dense layer is part of its phase.
    also = {"feed_norm"} if "feed_forward" in recompute else set()
    inside = {step for phase in recompute if phase in STEPS_OF_PHASE for step in STEPS_OF_PHASE[phase]}
    return not steps.isdisjoint(inside | also)


def savings_of(run: RunConfig, ours: bool = True) -> Savings:
    """The entries of all keys that are not as in a run without savings; of Megatron-LM those that are savings."""
    if not ours:
        on = set().union(*(step.entries for step in MEGATRON_STEPS))
        return frozenset(f"{path}={attrgetter(path)(run)}" for path in MEGATRON_DEFAULTS) & on
    found = ((path, attrgetter(path)(run)) for path in DEFAULTS)
    return frozenset(f"{path}={value}" for path, value in found if value != DEFAULTS[path])


@lru_cache(maxsize=10_000)
def with_savings(
    memory: MemoryConfig, precision: PrecisionConfig, savings: Savings, ours: bool = True
) -> tuple[MemoryConfig, PrecisionConfig]:
    """The two sections with exactly these savings."""
    if not ours:
        return _of_megatron(memory, precision, savings)
    values = dict(DEFAULTS) | {path: value for path, _, value in (entry.partition("=") for entry in savings)}
    retain = {path.rpartition(".")[2]: value for path, value in values.items() if path.startswith("memory.retain.")}
    places = {
        path.rpartition(".")[2]: value
        for path, value in values.items()
        if path.startswith("memory.") and not path.startswith("memory.retain.")
    }
    formats = {path.rpartition(".")[2]: value for path, value in values.items() if path.startswith("precision.")}
    changed = replace(memory, retain=replace(memory.retain, **retain), **places)  # type: ignore[arg-type]
    return changed, replace(precision, **formats)  # type: ignore[arg-type]


def _of_megatron(
    memory: MemoryConfig, precision: PrecisionConfig, savings: Savings
) -> tuple[MemoryConfig, PrecisionConfig]:
    """The two sections with exactly these of its savings; what else they say stays."""
    on = set().union(*(step.entries for step in MEGATRON_STEPS))
    values = {"memory": memory, "precision": precision}
    made: dict[str, dict[str, object]] = {"memory": {}, "precision": {}}
    for entry in sorted(on - savings) + sorted(savings):
        path, _, value = entry.partition("=")
        section, _, key = path.partition(".")
        if entry in savings:
            made[section][key] = value
        elif str(getattr(values[section], key)) == value:
            made[section][key] = MEGATRON_DEFAULTS[path]
    return replace(memory, **made["memory"]), replace(precision, **made["precision"])  # type: ignore[arg-type]


def saving(workload: Workload, savings: Savings) -> Workload:
    """The workload with exactly these savings."""
    memory, precision = with_savings(workload.run.memory, workload.run.precision, savings, workload.is_own)
    return replace(workload, run=replace(workload.run, memory=memory, precision=precision))


def conflicts(savings: Savings) -> bool:
    """Two values of one key."""
    paths = [entry.partition("=")[0] for entry in savings]
    return len(paths) != len(set(paths))


@lru_cache(maxsize=10_000)
def why_no_savings(
    savings: Savings, sharding: Sharding, recompute: frozenset[Recomputed], cp: int, ours: bool = True
) -> str | None:
    """The rule that these savings break beside the choices they depend on, or None."""
    if savings and not ours and sharding != "zero1":
        return "Megatron-LM saves optimizer states in its distributed optimizer alone"
    if conflicts(savings):
        return "a key cannot have two values"
    if sharding != "flat" and "precision.master=remainder" in savings:
        return "remainders are of flat main weights"
    if inside_phases(recompute, savings):
        return "steps of a phase that is recomputed whole are not retained apart"
    if cp > 1 and "memory.retain.core=discard" in savings:
        return "attention over several ranks is not recomputed"
    return None


_OWN: tuple[Recomputed, ...] = ("attention", "feed_forward", "experts")
_PARTS: tuple[Recomputed, ...] = ("norms", "activation", "mla_up", "core_attention", "feed_forward", "experts", "full")
_NAMES: dict[Recomputed, str] = {
    "full": "compute whole layers again",
    "attention": "compute attention again",
    "core_attention": "compute attention scores again",
    "mla_up": "compute keys, values and queries from their latents again",
    "norms": "compute norms again",
    "feed_forward": "compute dense feed-forwards again",
    "experts": "compute experts again",
    "activation": "compute the experts' activation again",
}
_AWAY = {"expert_fc1": "rows that enter experts", "moe_act": "what enters the experts' activation"}


@dataclass(frozen=True)
class Saving:
    """An option that this workload does not use, and the bytes it would free on the fullest rank."""

    name: str
    workload: Workload
    bytes: float


def savings(workload: Workload) -> tuple[Saving, ...]:
    """Those that save anything, the largest first."""
    now = predict_memory(workload).total
    found = [Saving(name, changed, now - predict_memory(changed).total) for name, changed in _choices(workload)]
    return tuple(sorted((one for one in found if one.bytes > 0), key=lambda one: -one.bytes))


def _choices(workload: Workload) -> Iterator[tuple[str, Workload]]:
    run, moe = workload.run, workload.run.model.moe
    for kind in _recomputed(workload):
        yield _NAMES[kind], changed(workload, memory={"recompute": (*run.memory.recompute, kind)})
    if workload.model.is_moe and moe is not None and moe.weight_at == "output":
        inside = changed(workload, model={"moe": replace(moe, weight_at="activation")})
        yield "weigh inside the experts' activation", inside
    if workload.is_own:
        now = savings_of(run)
        for step in offered(workload):
            if not conflicts(now | step.entries) and not inside_phases(workload.recompute, step.entries):
                yield step.words, saving(workload, now | step.entries)
        return
    for name, what in _AWAY.items():
        if workload.model.is_moe and name not in run.memory.offload:
            yield f"offload {what}", changed(workload, memory={"offload": (*run.memory.offload, name)})
    if run.memory.optimizer == "device":
        yield "hold and update optimizer states in the host's memory", changed(workload, memory={"optimizer": "cpu"})
    if workload.moments_bytes > 4:
        yield "hold moments in 16 bits", changed(workload, precision={"moments": "bfloat16"})
    if workload.cluster.gpu.fp8_tflops and workload.format in ("bfloat16", "float16"):
        kept = {name: getattr(run.precision, name) or run.precision.params for name in ("gradients", "moments")}
        narrow: NarrowRecipe = "mxfp8" if workload.cluster.gpu.fp4_tflops else "fp8_tensor"
        yield f"compute in {narrow}", changed(workload, precision={"recipe": narrow, "params": "float8", **kept})


def _recomputed(workload: Workload) -> Iterator[Recomputed]:
    """Kinds that this framework has, this model has something of, and this workload does not recompute already."""
    layers = workload.model.layers
    if "full" in workload.recompute:
        return
    has_moe = any(isinstance(layer.feed, MoE) for layer in layers)
    has: dict[Recomputed, bool] = {
        "feed_forward": any(isinstance(layer.feed, Dense) for layer in layers),
        "experts": has_moe,
        "activation": has_moe,
        "mla_up": any(isinstance(layer.mixer, Attention) and layer.mixer.is_latent for layer in layers),
        "core_attention": workload.framework.attention == "unfused",
    }
    for kind in _OWN if workload.is_own else _PARTS:
        if has.get(kind, True) and kind not in workload.recompute:
            yield kind
