"""How much arithmetic a token costs: the number behind every TFLOP/s and MFU that moefold prints.

Two counts are in use, and they differ by tens of percent on small models, so both are here by name. Both add up the
rows of `blueprint/matmuls.py`; what has no weights, the core of attention or of a recurrence, is counted here.

`training_flops_per_token` counts what the model needs, in the convention of published MoE runs (Megatron-Core's):
three times the forward pass; causal attention as half of the square; the head; shared experts. An MTP module is one
more layer, its join of two rows, and the head once more. Not the router, the embedding, norms, or anything recomputed.
A faster implementation of the same model keeps the same count, so MFU says how well the machine was used.

`executed_flops_per_token` counts what moefold's matmuls really do: the whole square of attention, values padded to the
keys' dim, attention's five matmuls backward, the logits a second time, the router. It equals torch's FLOP counter, and
keeps the first count honest.

Both count a multiplication and its addition as two. Numbers are per token, averaged over a sequence of S tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass, fields
from functools import lru_cache

from moefold.blueprint.matmuls import layer_matmuls
from moefold.blueprint.model_shape import Attention, DeltaNet, Layer, ModelShape, Recurrence, shape_of
from moefold.blueprint.parameters import join_parameter
from moefold.config.model import ModelConfig


@dataclass(frozen=True)
class FlopsByPart:
    """FLOPs of one token by part of the model; `router` includes the gate of a shared expert."""

    attention_projections: float = 0.0
    attention_core: float = 0.0
    dense: float = 0.0
    shared: float = 0.0
    routed: float = 0.0
    router: float = 0.0
    head: float = 0.0
    # Of MTP modules; their blocks and heads are in the parts above.
    join: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))

    @property
    def model(self) -> float:
        """Without the router: what the convention counts."""
        return self.total - self.router


def forward_flops_per_token(model: ModelConfig, seq_len: int) -> FlopsByPart:
    """One forward pass, attention counted where tokens may look: S/2 positions, fewer through a window."""
    return forward_flops(shape_of(model), seq_len)


def training_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Forward and backward in the published convention. DeepSeek-V3 at 4,096 tokens: 249.8e9, with its MTP 260.0e9."""
    return training_flops(shape_of(model), seq_len)


def executed_flops_per_token(model: ModelConfig, seq_len: int) -> FlopsByPart:
    """Forward and backward as moefold computes them, without recomputed layers and without dropped tokens."""
    shape = shape_of(model)
    needed = forward_flops(shape, seq_len)
    mixers = [layer.mixer for layer in (*shape.layers, *shape.mtp_layers)]
    core = sum(_core_as_executed(mixer, seq_len) for mixer in mixers if isinstance(mixer, Attention))
    linear = [mixer for mixer in mixers if isinstance(mixer, DeltaNet)]
    rule = sum(_rule_as_executed(mixer, seq_len) for mixer in linear)
    # The convolution is no matmul here.
    convolutions = sum(2.0 * mixer.channels * mixer.conv for mixer in linear)
    thrice = {field.name: 3 * getattr(needed, field.name) for field in fields(needed)}
    # Attention: two matmuls forward, five backward, of which the first repeats the scores. The head's logits are
    # computed in the forward pass, again in the backward pass, and differentiated by two matmuls.
    projections = thrice["attention_projections"] - 3 * convolutions
    executed = {"attention_projections": projections, "attention_core": 3.5 * core + rule, "head": 4 * needed.head}
    return FlopsByPart(**{**thrice, **executed})


# ---- of any shape ----


@lru_cache(maxsize=4096)
def training_flops(model: ModelShape, seq_len: int) -> float:
    return 3 * forward_flops(model, seq_len).model


@lru_cache(maxsize=4096)
def forward_flops(model: ModelShape, seq_len: int) -> FlopsByPart:
    D, found = model.dim, dict.fromkeys((field.name for field in fields(FlopsByPart)), 0.0)
    for layer, count in Counter((*model.layers, *model.mtp_layers)).items():
        for matmul in layer_matmuls(layer, D):
            name = "attention_projections" if matmul.part == "attention" else matmul.part
            found[name] += count * matmul.flops
        found["attention_core"] += count * core_flops(layer, seq_len)
    found["head"] = (1 + model.mtp) * 2.0 * D * model.vocab
    found["join"] = model.mtp * 2.0 * join_parameter("", D).size
    return FlopsByPart(**found)


def core_flops(layer: Layer, seq_len: int) -> float:
    """Of the mixer's part without weights: scores and the weighted sum of values, or a recurrence's state."""
    mixer = layer.mixer
    if isinstance(mixer, DeltaNet):
        # As Megatron-Core counts it: k k^T, v k^T, the state's update by them, and the state times the query.
        return 2.0 * mixer.heads * mixer.head_dim * 4 * mixer.state
    if isinstance(mixer, Recurrence):
        return 2.0 * mixer.heads * mixer.head_dim * 2 * mixer.state
    return flops_per_position(mixer) * positions_seen(mixer, seq_len) if mixer is not None else 0.0


def flops_per_position(attention: Attention) -> float:
    """For a token and one position that it attends to; sharing keys between heads saves memory, not arithmetic."""
    return 2.0 * attention.heads * (attention.qk_dim + attention.v_dim)


def positions_seen(attention: Attention, seq_len: int) -> float:
    """How many positions a token attends to on average; the triangle is S/2 by convention, not (S+1)/2."""
    if attention.chunk:
        whole, rest = divmod(seq_len, attention.chunk)
        return (whole * attention.chunk**2 + rest**2) / (2 * seq_len)
    reach = min(attention.window, seq_len) if attention.window else seq_len
    return reach - reach**2 / (2 * seq_len)


def _rule_as_executed(mixer: DeltaNet, seq_len: int) -> float:
    """Of one token: forward, once more in the backward pass, and two matmuls for each. The triangular solve is no
    matmul, and its backward has one.

    Inside of chunks keys meet keys, queries meet keys, and scores meet values; between chunks the state is read twice
    and written once.
    """
    heads, values, keys, n = mixer.heads, mixer.head_dim, mixer.state, mixer.chunk
    chunks = -(-seq_len // n)
    inside = 2 * 2 * mixer.groups * n * n * keys + 2 * heads * n * n * values
    between = 3 * 2 * heads * n * keys * values
    solve = 2 * heads * n * n * (values + keys)
    return (4 * (chunks * inside + (chunks - 1) * between) + chunks * solve) / seq_len


def _core_as_executed(mixer: Attention, seq_len: int) -> float:
    """A sink is one more key and one more entry of every query and key; values are padded to the keys' dim."""
    sink = int(mixer.sinks)
    seen = min(mixer.chunk, seq_len) if mixer.chunk else seq_len
    return 2 * mixer.heads * 2 * (max(mixer.qk_dim, mixer.v_dim) + sink) * (seen + sink)
