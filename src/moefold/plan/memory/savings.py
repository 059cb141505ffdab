"""What each memory-saving option would free on the fullest rank, one at a time.

Savings do not add up: two options may drop the same tensor, and another rank may become the fullest. So each is the
difference of two whole predictions, with the option and without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moefold.blueprint.model_shape import Attention, Dense, MoE
from moefold.plan.memory.peak import predict_memory
from moefold.plan.memory.saved_activations import OPERAND_BYTES
from moefold.plan.workload import Format, Options, Recomputed, Workload

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
    options, own = workload.options, workload.options.framework == "moefold"
    for kind in _recomputed(workload):
        yield _NAMES[kind], _with(workload, recompute=options.recompute | {kind})
    if not options.weighted_inside and workload.model.is_moe:
        yield "weigh inside the experts' activation", _with(workload, weighted_inside=True)
    if own:
        return
    for name, what in _AWAY.items():
        if workload.model.is_moe and name not in options.offloaded:
            yield f"offload {what}", _with(workload, offloaded=options.offloaded | {name})
    if not options.optimizer_on_host:
        yield "hold optimizer states in the host's memory", _with(workload, optimizer_on_host=True)
    if workload.dtypes.moments_bytes > 4:
        yield "hold moments in 16 bits", replace(workload, dtypes=replace(workload.dtypes, moments_bytes=4.0))
    if workload.cluster.gpu.fp8_tflops and OPERAND_BYTES[workload.dtypes.format] == 2:
        narrow: Format = "mxfp8" if workload.cluster.gpu.fp4_tflops else "fp8_tensor"
        yield (
            f"compute in {narrow}",
            replace(workload, dtypes=replace(workload.dtypes, format=narrow, weight_bytes=1.0)),
        )


def _with(workload: Workload, **changes: object) -> Workload:
    options: Options = replace(workload.options, **changes)  # type: ignore[arg-type]
    return replace(workload, options=options)


def _recomputed(workload: Workload) -> Iterator[Recomputed]:
    """Kinds that this framework has, this model has something of, and this workload does not recompute already."""
    options, layers = workload.options, workload.model.layers
    if "full" in options.recompute:
        return
    has_moe = any(isinstance(layer.feed, MoE) for layer in layers)
    has: dict[Recomputed, bool] = {
        "feed_forward": any(isinstance(layer.feed, Dense) for layer in layers),
        "experts": has_moe,
        "activation": has_moe,
        "mla_up": any(isinstance(layer.mixer, Attention) and layer.mixer.is_latent for layer in layers),
        "core_attention": not options.flash,
    }
    for kind in _OWN if options.framework == "moefold" else _PARTS:
        if has.get(kind, True) and kind not in options.recompute:
            yield kind
