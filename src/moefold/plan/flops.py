"""How much arithmetic a token costs: the number behind every TFLOP/s and MFU that moefold prints.

There are two honest ways to count, and they differ by tens of percent on small models, so both are here by name.

`training_flops_per_token` counts what the model needs, in the convention of published MoE runs (Megatron-Core's):
three times the forward pass; causal attention as half of the square; the head; shared experts. A module that predicts
further ahead is one more layer, its join of two rows, and the head once more. Not the router, the embedding, norms, or
anything computed a second time. A faster program for the same model keeps the same count, so
MFU says how well the machine was used.

`executed_flops_per_token` counts what moefold's matrix products really do: the whole square of attention, values
padded to the keys' width, attention's five products backward, the logits a second time, the router.
It equals torch's FLOP counter, and is there to keep the first count honest.

Both count a multiplication and its addition as two. Numbers are per token, averaged over a sequence of S tokens.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig


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
    # Of the modules that predict further ahead; their blocks and heads are in the parts above.
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
    blocks = _blocks(model)
    mixtures = sum(map(model.is_moe_layer, blocks))
    moe = model.moe or MoEConfig()
    return FlopsByPart(
        attention_projections=len(blocks) * _projections(model.attention, model.dim),
        attention_core=sum(_core(model.attention, _positions_seen(model, block, seq_len)) for block in blocks),
        dense=(len(blocks) - mixtures) * _gated(model.dim, model.dense_hidden_dim),
        shared=mixtures * _gated(model.dim, moe.shared_hidden_dim),
        routed=mixtures * _routed(moe, model.dim),
        router=mixtures * _router(moe, model.dim),
        head=(1 + model.num_mtp) * _matrix(model.dim, model.vocab_size),
        join=model.num_mtp * _matrix(2 * model.dim, model.dim),
    )


def training_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Forward and backward in the published convention. DeepSeek-V3 at 4,096 tokens: 249.8e9, with its MTP 260.0e9."""
    return 3 * forward_flops_per_token(model, seq_len).model


def executed_flops_per_token(model: ModelConfig, seq_len: int) -> FlopsByPart:
    """Forward and backward as moefold computes them, without recomputed layers and without dropped tokens."""
    needed = forward_flops_per_token(model, seq_len)
    core = len(_blocks(model)) * _core_as_executed(model.attention, seq_len)
    thrice = {field.name: 3 * getattr(needed, field.name) for field in fields(needed)}
    # Attention: two products forward, five backward, of which the first repeats the scores. The head's logits are
    # computed in the forward pass, again in the backward pass, and differentiated by two products.
    return FlopsByPart(**{**thrice, "attention_core": 3.5 * core, "head": 4 * needed.head})


def _blocks(model: ModelConfig) -> range:
    """The layers, and those inside of MTP modules, which count on."""
    return range(model.num_layers + model.num_mtp)


def _positions_seen(model: ModelConfig, layer: int, seq_len: int) -> float:
    """How many positions a token looks at on average; the triangle is S/2 by convention, not (S+1)/2."""
    attention = model.attention
    window = attention.window if isinstance(attention, GQAConfig) and layer % attention.window_every == 0 else None
    reach = seq_len if window is None else min(window, seq_len)
    return reach - reach**2 / (2 * seq_len)


def _core(attention: GQAConfig | MLAConfig, positions: float) -> float:
    """Scores and the weighted sum of values; sharing keys between heads saves memory, not arithmetic."""
    if isinstance(attention, MLAConfig):
        return 2 * attention.num_heads * (attention.nope_dim + attention.rope_dim + attention.value_dim) * positions
    return 2 * attention.num_heads * 2 * attention.head_dim * positions


def _core_as_executed(attention: GQAConfig | MLAConfig, seq_len: int) -> float:
    """A sink is one more key and one more entry of every query and key; values are as wide as keys."""
    if isinstance(attention, MLAConfig):
        wide = max(attention.nope_dim + attention.rope_dim, attention.value_dim)
        return 2 * attention.num_heads * 2 * wide * seq_len
    sink = int(attention.sinks)
    return 2 * attention.num_heads * 2 * (attention.head_dim + sink) * (seq_len + sink)


def _projections(attention: GQAConfig | MLAConfig, D: int) -> float:
    H = attention.num_heads
    if isinstance(attention, GQAConfig):
        Hd, Gd = H * attention.head_dim, attention.num_kv_heads * attention.head_dim
        return _matrix(D, Hd + 2 * Gd) + _matrix(Hd, D)
    query = H * (attention.nope_dim + attention.rope_dim)
    latent = attention.q_latent
    queries = _matrix(D, query) if latent is None else _matrix(D, latent) + _matrix(latent, query)
    down = _matrix(D, attention.kv_latent + attention.rope_dim)
    up = _matrix(attention.kv_latent, H * (attention.nope_dim + attention.value_dim))
    return queries + down + up + _matrix(H * attention.value_dim, D)


def _routed(moe: MoEConfig, D: int) -> float:
    if moe.latent_dim is None:
        return moe.top_k * _gated(D, moe.expert_hidden_dim)
    return moe.top_k * _gated(moe.latent_dim, moe.expert_hidden_dim) + 2 * _matrix(D, moe.latent_dim)


def _router(moe: MoEConfig, D: int) -> float:
    return _matrix(D, moe.num_experts) + _matrix(D, int(moe.shared_gate))


def _gated(D: int, F: int) -> float:
    """Gate, up and down."""
    return 3 * _matrix(D, F)


def _matrix(rows_in: int, rows_out: int) -> float:
    return 2.0 * rows_in * rows_out
