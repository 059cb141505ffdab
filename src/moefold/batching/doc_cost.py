"""The time of a document in a run's model: the coefficients of `Cost`, from its sizes and the speed of a rank.

Work is counted by `blueprint/flops.py`. Every weight matrix that a token meets is a multiplication and an addition
per entry; attention adds, per layer, scores and a weighted sum over the l/2 positions that a token of l sees on
average. Through a window the number of positions does not grow with the document, so those layers are linear.

    forward of a document    2 M l  +  2 H (d + v) (l/2) l per layer         M entries of active matrices

Forward and backward take three times that. In ring attention, keys and values are sent in the forward pass and again in
the backward pass, and their gradients come back in float32: three messages per layer and ring step. Other kinds of
context parallelism send less the more ranks there are, so for them this is an upper bound.

Tensor and pipeline parallelism divide work and bytes alike, so only fixed costs depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from moefold.batching.wave_packing import Cost
from moefold.blueprint.flops import core_flops, flops_per_position, forward_flops_per_token
from moefold.blueprint.model_shape import Attention, Recurrence, shape_of
from moefold.config.attention import MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.precision import BYTES
from moefold.config.run import RunConfig

_MESSAGES_PER_RING_STEP = 3
_FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class RankSpeed:
    """How fast a rank is, sustained and not at its peak; only the proportions matter.

    The defaults are about an H100's. Ranks must agree on a plan, so the speed is not measured where it runs.
    """

    flops: float = 400e12
    link_bytes: float = 200e9
    # Latency of a message, and fixed time of a layer per microbatch, forward and backward, in seconds.
    message: float = 25e-6
    layer: float = 500e-6


@lru_cache(maxsize=8)
def cost_of(run: RunConfig, speed: RankSpeed | None = None) -> Cost:
    """The same on every rank, because it follows from the configuration alone."""
    speed = speed or RankSpeed()
    model, layers = run.model, run.model.num_layers + run.model.num_mtp
    flops = _FORWARD_AND_BACKWARD * token_flops(model, run.data.seq_len)
    # Per token on one tp rank, over all pipeline stages: every term here divides by pp alike.
    seconds = flops / speed.flops / run.parallel.tp
    kv_entries = layers * _key_and_value_entries(model) / run.parallel.tp
    bytes_per_entry = 2 * BYTES[run.precision.compute] + max(BYTES["float32"], BYTES[run.precision.compute])
    return Cost(
        token=1.0,
        attention=_FORWARD_AND_BACKWARD * pair_flops(model, run.data.seq_len) / flops,
        kv_transfer=kv_entries * bytes_per_entry / speed.link_bytes / seconds,
        ring_step=layers * _MESSAGES_PER_RING_STEP * speed.message / seconds,
        wave=layers * speed.layer / seconds,
    )


def token_flops(model: ModelConfig, longest: int) -> float:
    """Forward FLOPs of a token whatever its document's length: all matmuls, windows, linear attention."""
    matmuls = replace(forward_flops_per_token(model, longest), attention_core=0.0)
    # A chunk is a triangle: half of its positions on average.
    windowed = sum(
        flops_per_position(a) * (a.window or a.chunk / 2) for a in _attentions(model) if _is_narrow(a, longest)
    )
    layers = shape_of(model).layers
    recurrent = sum(core_flops(layer, longest) for layer in layers if isinstance(layer.mixer, Recurrence))
    return matmuls.total + windowed + recurrent


def pair_flops(model: ModelConfig, longest: int) -> float:
    """Forward FLOPs per l * l of a document of l tokens: half of them are pairs that see each other."""
    return sum(flops_per_position(a) for a in _attentions(model) if not _is_narrow(a, longest)) / 2


def _attentions(model: ModelConfig) -> Iterator[Attention]:
    """Of every block that has softmax attention, those of MTP modules too."""
    shape = shape_of(model)
    for layer in (*shape.layers, *shape.mtp_layers):
        if isinstance(layer.mixer, Attention):
            yield layer.mixer


def _is_narrow(attention: Attention, longest: int) -> bool:
    """Whether it has a window or chunks that are shorter than the longest document."""
    return 0 < (attention.window or attention.chunk) < longest


def _key_and_value_entries(model: ModelConfig) -> int:
    """Keys and values of a token that one layer sends: MLA has expanded them to all heads by then."""
    attention = model.attention
    if isinstance(attention, MLAConfig):
        return attention.num_heads * (attention.nope_dim + attention.rope_dim + attention.value_dim)
    return attention.num_kv_heads * 2 * attention.head_dim
