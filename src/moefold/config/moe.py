"""An MoE layer: router, load balancing, capacity, experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from moefold.config.strict import STRICT

RouterKind = Literal["topk", "sinkhorn", "expert_choice", "balanced"]


@dataclass(frozen=True)
class RouterConfig:
    """Router scores, and the rule that assigns tokens to experts by them."""

    __pydantic_config__: ClassVar = STRICT

    # topk: each token's top-k experts. sinkhorn: top-k of a Sinkhorn-balanced assignment. expert_choice: each expert's
    # top tokens. balanced: a fixed round robin, for benchmarks.
    kind: RouterKind = "topk"
    score: Literal["softmax", "sigmoid"] = "softmax"
    # after_topk: top-k of the raw logits, then the score function over those only (Mixtral, gpt-oss).
    score_when: Literal["before_topk", "after_topk"] = "before_topk"
    # Divide a token's probs by their sum.
    normalize: bool = False
    # Multiply probs by this (routed_scaling_factor).
    scale: float = 1.0
    # Group-limited routing: top `top_groups` of `num_groups` expert groups first, then experts inside them.
    num_groups: int = 1
    top_groups: int = 1
    # max: a group's score is its best expert's (DeepSeek-V2). topk_sum: the sum of its best top_k / top_groups, as many
    # as a token takes from each of its groups on average (DeepSeek-V3, where that is 8 / 4 = 2).
    group_score: Literal["max", "topk_sum"] = "max"
    # A trained bias on the logits (gpt-oss).
    logit_bias: bool = False
    # The bias of auxiliary-loss-free balancing: added to scores for top-k only, not trained; each step moves it by
    # `bias_update_rate` against the load.
    expert_bias: bool = False
    bias_update_rate: float = 1e-3
    # Compute logits and scores in float32 where compute is narrower; float64 stays float64.
    fp32: bool = True
    # Sinkhorn balances in training only; evaluation takes the plain top-k.
    sinkhorn_iterations: int = 8

    def group_terms(self, top_k: int) -> int:
        """How many of a group's highest scores are summed to the score of the group."""
        return 1 if self.group_score == "max" else max(1, top_k // self.top_groups)


@dataclass(frozen=True)
class BalanceConfig:
    """Coefficients of the balance losses, which are added up over layers; 0 switches one off. All of them count the
    plain top-k of the scores."""

    __pydantic_config__: ClassVar = STRICT

    microbatch: float = 0.0
    sequence: float = 0.0
    # sequences: the mean over the sequences of the step (DeepSeek-V3). tokens: weighted by their tokens.
    sequence_mean: Literal["sequences", "tokens"] = "sequences"
    global_batch: float = 0.0
    # Balance between devices (`device_groups` equal groups of experts) instead of single experts.
    device: float = 0.0
    device_groups: int = 1
    z: float = 0.0


@dataclass(frozen=True)
class CapacityConfig:
    """At most ceil(factor * tokens * top_k / number of experts or devices) assignments per expert, or per device."""

    __pydantic_config__: ClassVar = STRICT

    factor: float = 1.0
    # expert: each expert has a capacity. device: the experts of a device share one (DeepSeek-V2). A device is one of
    # `device_groups` equal ranges of experts, independent of the layout.
    per: Literal["expert", "device"] = "expert"
    device_groups: int = 1
    # Which assignments are dropped beyond it: those with the lowest prob, or the last in token order.
    drop: Literal["probability", "position"] = "probability"
    # full: counted over all tokens of the microbatch, under any layout. local: over each rank's own tokens.
    scope: Literal["full", "local"] = "full"
    # Pad every expert to exactly its capacity in rows, so that shapes do not depend on data.
    pad: bool = False


@dataclass(frozen=True)
class MoEConfig:
    """One MoE layer."""

    __pydantic_config__: ClassVar = STRICT

    num_experts: int = 8
    top_k: int = 2
    expert_hidden_dim: int = 32
    router: RouterConfig = field(default_factory=RouterConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    # None is dropless: every assignment is computed.
    capacity: CapacityConfig | None = None
    # Hidden dim of the shared expert, which computes every token; 0 means none.
    shared_hidden_dim: int = 0
    # Multiply the shared expert's output by a learned sigmoid gate per token.
    shared_gate: bool = False
    # Latent MoE: down-project tokens to this dim before dispatch; None dispatches in the model dim.
    latent_dim: int | None = None
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    # Biases in the experts' linear layers (gpt-oss). `router.expert_bias` is the loss-free balancing bias.
    expert_mlp_bias: bool = False
    # Where the prob multiplies: the expert's activation (saves no tensor for backward) or its output, which are one
    # model, or its input, which is another (Llama 4).
    weight_at: Literal["activation", "output", "input"] = "activation"
