"""What each memory-saving option would free on the fullest rank, one at a time.

Savings do not add up: two options may drop the same tensor, and another rank may become the fullest. So each is the
difference of two whole predictions, with the option and without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moefold.blueprint.model_shape import Attention, Dense, MoE
from moefold.config.memory import Recomputed
from moefold.config.precision import NarrowFormat
from moefold.plan.memory.peak import predict_memory
from moefold.plan.memory.saved_activations import OPERAND_BYTES
from moefold.plan.memory.saving_steps import conflicts, inside_phases, offered, saving, savings_of
from moefold.plan.workload import Workload, changed

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
    if not workload.weighted_inside and workload.model.is_moe and moe is not None:
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
        yield "hold optimizer states in the host's memory", changed(workload, memory={"optimizer": "host"})
    if workload.moments_bytes > 4:
        yield "hold moments in 16 bits", changed(workload, precision={"moments": "bfloat16"})
    if workload.cluster.gpu.fp8_tflops and OPERAND_BYTES[workload.format] == 2:
        kept = {name: getattr(run.precision, name) or run.precision.params for name in ("gradients", "moments")}
        narrow: NarrowFormat = "mxfp8" if workload.cluster.gpu.fp4_tflops else "fp8_tensor"
        yield f"compute in {narrow}", changed(workload, precision={"compute": narrow, "params": "float8", **kept})


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
        "core_attention": not workload.framework.flash,
    }
    for kind in _OWN if workload.is_own else _PARTS:
        if has.get(kind, True) and kind not in workload.recompute:
            yield kind
