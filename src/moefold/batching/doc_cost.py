"""What a document costs a run's model: the coefficients of `Cost`, from its sizes and from the pace of a rank.

Work is counted as `plan/flops.py` counts it. Every weight matrix that a token meets is a multiplication and an addition
per entry; attention adds, per layer, scores and a weighted sum over the l/2 positions that a token of l sees on
average. Through a window the number of positions does not grow with the document, so those layers are linear.

    forward of a document    2 M l  +  2 H (d + v) (l/2) l per layer         M entries that a token meets

Forward and backward take three times that. Around a ring, keys and values travel in the forward pass and again in the
backward pass, and their gradients come back in float32: three messages per layer and visit. Other ways to attend across
ranks send less the more ranks there are, so for them this is an upper bound.

Tensor and pipeline parallelism divide work and bytes alike, so only what has a fixed price depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from moefold.batching.step_plan import Cost
from moefold.blueprint.param_counts import count_parameters
from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.run import RunConfig

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
_MESSAGES_PER_VISIT = 3
_FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class Pace:
    """How fast a rank is, sustained and not at its peak; only the proportions matter.

    The defaults are of the size that an H100 has. Ranks must agree on a plan, so it is not measured where it runs.
    """

    flops: float = 400e12
    link_bytes: float = 200e9
    # Seconds before a message moves, and before a layer of a microbatch computes, there and back.
    message: float = 25e-6
    layer: float = 500e-6


@lru_cache(maxsize=8)
def cost_of(run: RunConfig, pace: Pace | None = None) -> Cost:
    """The same on every rank, for it follows from the configuration alone."""
    pace = pace or Pace()
    model, layers = run.model, run.model.num_layers + run.model.num_mtp
    flops = _FORWARD_AND_BACKWARD * token_flops(model, run.data.seq_len)
    # Of a rank's part of a token, on all pipeline stages together: a stage has its share of everything here.
    seconds = flops / pace.flops / run.parallel.tp
    travelling = layers * _key_and_value_entries(model) / run.parallel.tp
    bytes_per_entry = 2 * _BYTES[run.precision.compute] + max(_BYTES["float32"], _BYTES[run.precision.compute])
    return Cost(
        token=1.0,
        attention=_FORWARD_AND_BACKWARD * pair_flops(model, run.data.seq_len) / flops,
        exchange=travelling * bytes_per_entry / pace.link_bytes / seconds,
        visit=layers * _MESSAGES_PER_VISIT * pace.message / seconds,
        wave=layers * pace.layer / seconds,
    )


def token_flops(model: ModelConfig, longest: int) -> float:
    """Forward FLOPs of a token whatever its document's length: all matrices it meets, and attention through windows."""
    counts = count_parameters(model)
    # The embedding is looked up; the head is a product, once for every token that is predicted.
    head = model.dim * model.vocab_size
    stored = counts.by_kind["embedding"] + counts.by_kind.get("head", 0)
    matrices = counts.active_matrices - stored + (1 + model.num_mtp) * head
    return 2 * matrices + _narrow_layers(model, longest) * _flops_per_position(model) * _window(model, longest)


def pair_flops(model: ModelConfig, longest: int) -> float:
    """Forward FLOPs per l * l of a document of l tokens: half of them are pairs that see each other."""
    full = model.num_layers + model.num_mtp - _narrow_layers(model, longest)
    return full * _flops_per_position(model) / 2


def _flops_per_position(model: ModelConfig) -> float:
    """Of one layer, for a token and one of the positions that it sees: all heads' scores and weighted values."""
    attention = model.attention
    if isinstance(attention, MLAConfig):
        return 2 * attention.num_heads * (attention.nope_dim + attention.rope_dim + attention.value_dim)
    return 2 * attention.num_heads * 2 * attention.head_dim


def _narrow_layers(model: ModelConfig, longest: int) -> int:
    """How many layers have a window that is shorter than the longest document."""
    attention = model.attention
    if isinstance(attention, MLAConfig) or _window(model, longest) == longest:
        return 0
    return len(range(0, model.num_layers + model.num_mtp, attention.window_every))


def _window(model: ModelConfig, longest: int) -> int:
    attention = model.attention
    window = attention.window if isinstance(attention, GQAConfig) else None
    return longest if window is None else min(window, longest)


def _key_and_value_entries(model: ModelConfig) -> int:
    """What one layer sends of a token: latent attention has rebuilt its keys and values for all heads by then."""
    attention = model.attention
    if isinstance(attention, MLAConfig):
        return attention.num_heads * (attention.nope_dim + attention.rope_dim + attention.value_dim)
    return attention.num_kv_heads * 2 * attention.head_dim
