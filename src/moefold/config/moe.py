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
    # A group's score is the sum of its best experts' scores: DeepSeek-V3 adds two, V2 looks at the best one.
    group_score: Literal["max", "top2_sum"] = "max"
    # A learned bias on the logits (gpt-oss), part of the gradient.
    logit_bias: bool = False
    # The loss-free bias: shifts choices only, is not trained, and moves by `bias_rate` against the load each step.
    expert_bias: bool = False
    bias_rate: float = 1e-3
    # float64 runs stay in float64; anything narrower is scored in float32 when this is set.
    fp32: bool = True
    sinkhorn_iterations: int = 8


@dataclass(frozen=True)
class BalanceConfig:
    """Coefficients of the balance losses; 0 switches one off."""

    __pydantic_config__: ClassVar = STRICT

    microbatch: float = 0.0
    sequence: float = 0.0
    global_batch: float = 0.0
    # Balance between groups of experts (the experts of one device), not between single experts.
    device: float = 0.0
    device_groups: int = 1
    z: float = 0.0


@dataclass(frozen=True)
class CapacityConfig:
    """A bound on how many tokens an expert accepts: ceil(factor * tokens * top_k / experts)."""

    __pydantic_config__: ClassVar = STRICT

    factor: float = 1.0
    # Who is dropped when an expert is full: the least probable, or the last in order.
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
    expert_width: int = 32
    router: RouterConfig = field(default_factory=RouterConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    # None is dropless: every chosen token is computed.
    capacity: CapacityConfig | None = None
    # Width of the dense expert that sees every token; 0 means none.
    shared_width: int = 0
    # Weigh the shared expert's answer by a learned sigmoid per token.
    shared_gate: bool = False
    # Send and compute in this smaller width; None means the model's own width.
    latent_width: int | None = None
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    expert_bias: bool = False
    # Where the routing weight multiplies: inside the expert (nothing extra is saved) or on its output.
    weight_at: Literal["activation", "output"] = "activation"
