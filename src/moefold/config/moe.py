"""How tokens find their experts: the router, what keeps it balanced, what happens to overflow, and the experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from moefold.config.strict import STRICT

RouterKind = Literal["topk", "sinkhorn", "expert_choice", "balanced"]


@dataclass(frozen=True)
class RouterConfig:
    """Scores, and the rule that turns scores into choices."""

    __pydantic_config__: ClassVar = STRICT

    # topk: every token takes its best experts. sinkhorn: the choice is balanced by optimal transport first.
    # expert_choice: every expert takes its best tokens. balanced: a fixed round robin, for benchmarks.
    kind: RouterKind = "topk"
    score: Literal["softmax", "sigmoid"] = "softmax"
    # after_topk: choose on raw logits, then score only the chosen ones.
    score_when: Literal["before_topk", "after_topk"] = "before_topk"
    # Divide a token's weights by their sum.
    normalize: bool = False
    scale: float = 1.0
    # Choose the best `top_groups` of `num_groups` expert groups first, then experts inside them.
    num_groups: int = 1
    top_groups: int = 1
    # max: a group's score is its best expert's (DeepSeek-V2). topk_sum: the sum of its best top_k / top_groups, as many
    # as a token takes from each of its groups on average (DeepSeek-V3, where that is 8 / 4 = 2).
    group_score: Literal["max", "topk_sum"] = "max"
    # A learned bias on the logits (gpt-oss), part of the gradient.
    logit_bias: bool = False
    # The loss-free bias: shifts choices only, is not trained, and moves by `bias_update_rate` against the load each
    # step.
    expert_bias: bool = False
    bias_update_rate: float = 1e-3
    # float64 runs stay in float64; anything narrower is scored in float32 when this is set.
    fp32: bool = True
    # Sinkhorn routing balances in training only; evaluation takes the plain top-k.
    sinkhorn_iterations: int = 8

    def group_terms(self, top_k: int) -> int:
        """How many of a group's best scores are added up to the group's own."""
        return 1 if self.group_score == "max" else max(1, top_k // self.top_groups)


@dataclass(frozen=True)
class BalanceConfig:
    """Coefficients of the balance losses; 0 switches one off. All of them count the plain top-k of the scores."""

    __pydantic_config__: ClassVar = STRICT

    microbatch: float = 0.0
    sequence: float = 0.0
    # sequences: every sequence of the step counts the same, as DeepSeek-V3 publishes it. tokens: by its tokens.
    sequence_mean: Literal["sequences", "tokens"] = "sequences"
    global_batch: float = 0.0
    # Balance between groups of experts (the experts of one device), not between single experts.
    device: float = 0.0
    device_groups: int = 1
    z: float = 0.0


@dataclass(frozen=True)
class CapacityConfig:
    """A bound on how many tokens an expert, or a device, accepts: ceil(factor * tokens * top_k / number of them)."""

    __pydantic_config__: ClassVar = STRICT

    factor: float = 1.0
    # expert: each expert has a capacity. device: the experts of a device share one (DeepSeek-V2), whichever of them the
    # tokens chose. A device is one of `device_groups` equal runs of experts, whatever the layout.
    per: Literal["expert", "device"] = "expert"
    device_groups: int = 1
    # Who is dropped where there is no room: the assignments with the lowest routing probability, or the last in order.
    drop: Literal["probability", "position"] = "probability"
    # full: counted over all tokens of the microbatch, whatever the layout. local: over each rank's own shard.
    scope: Literal["full", "local"] = "full"
    # Give every expert exactly its capacity in rows, so shapes never depend on data.
    pad: bool = False


@dataclass(frozen=True)
class MoEConfig:
    """One mixture-of-experts layer."""

    __pydantic_config__: ClassVar = STRICT

    num_experts: int = 8
    top_k: int = 2
    expert_hidden_dim: int = 32
    router: RouterConfig = field(default_factory=RouterConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    # None is dropless: every chosen token is computed.
    capacity: CapacityConfig | None = None
    # Width of the dense expert that sees every token; 0 means none.
    shared_hidden_dim: int = 0
    # Weigh the shared expert's answer by a learned sigmoid per token.
    shared_gate: bool = False
    # Send and compute in this smaller width; None means the model's own width.
    latent_dim: int | None = None
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    expert_mlp_bias: bool = False
    # Where the routing weight multiplies: inside the expert (nothing extra is saved) or on its output.
    weight_at: Literal["activation", "output"] = "activation"
