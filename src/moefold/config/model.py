"""The model: the hyper-parameters that a paper's table or a config.json gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moefold.config.attention import GatedDeltaNetConfig, GQAConfig, MLAConfig, RopeConfig
from moefold.config.moe import MoEConfig
from moefold.config.strict import STRICT

NormScale = Literal["weight", "one_plus_weight"]


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: a weight W acts as W + (alpha / rank) B A, where A has `rank` rows and B `rank` columns, and B starts at 0.

    Each expert has an A and a B of its own. Adapters are parameters of the model: they are sharded, saved and counted
    as all others. Which parameters are updated is said by `optim.trained` and `optim.frozen`.
    """

    __pydantic_config__: ClassVar = STRICT

    rank: int = 16
    alpha: float = 32.0
    # Weights that have adapters: patterns (`fnmatch`) of names, of which matrices and experts count; routers have none.
    targets: tuple[str, ...] = ("layers.*.attention.*", "layers.*.feed_forward.*")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer; every `moe_every`-th layer after the first `num_dense_layers` is an MoE layer."""

    __pydantic_config__: ClassVar = STRICT

    vocab_size: int = 256
    dim: int = 64
    num_layers: int = 2
    attention: Annotated[GQAConfig | MLAConfig, Field(discriminator="kind")] = field(default_factory=GQAConfig)
    # Linear attention in most layers of a hybrid model; None is `attention` in all of them.
    linear_attention: GatedDeltaNetConfig | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)
    moe: MoEConfig | None = field(default_factory=MoEConfig)
    num_dense_layers: int = 0
    # Layer i is an MoE layer when (i + 1) % moe_every == 0, and dense otherwise (Llama 4).
    moe_every: int = 1
    dense_hidden_dim: int = 128
    norm_eps: float = 1e-6
    # What an RMSNorm multiplies by. one_plus_weight: weights are centred at zero (Qwen3-Next).
    norm_scale: NormScale = "weight"
    tied_embeddings: bool = False
    init_std: float = 0.02
    # depth: output projections start with init_std / sqrt(2 * num_layers), as in GPT-2 and Megatron.
    init_output_scale: Literal["none", "depth"] = "none"
    # MTP modules (multi-token prediction), and the weight of their mean loss.
    num_mtp: int = 0
    mtp_weight: float = 0.3
    # The divisor of an MTP module's summed loss. tokens: all tokens of the step, DeepSeek-V3's eq. 24 (T). labels: the
    # labels at its depth that are not ignored, as in Megatron.
    mtp_divisor: Literal["tokens", "labels"] = "tokens"
    # Low-rank adapters beside the weights (LoRA); None: none. docs/fine-tuning.md.
    lora: LoraConfig | None = None

    def is_linear_layer(self, layer: int) -> bool:
        """Whether the layer has linear attention; numbers from `num_layers` on are MTP modules."""
        linear = self.linear_attention
        return linear is not None and layer < self.num_layers and (layer + 1) % linear.full_attention_every != 0

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.num_dense_layers and (layer + 1) % max(self.moe_every, 1) == 0

    @property
    def has_dense_layers(self) -> bool:
        return not all(map(self.is_moe_layer, range(self.num_layers)))
