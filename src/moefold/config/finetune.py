"""Fine-tuning: low-rank adapters beside frozen weights, and preferences as the objective.

Adapters are parameters of the model (`model.lora`): they are sharded, saved and counted as all others. Which parameters
are updated is said by the optimizer's section (`optim.trained`, `optim.frozen`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.strict import STRICT


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: a weight W acts as W + (alpha / rank) B A, where A has `rank` rows and B `rank` columns, and B starts at 0.

    Each expert has an A and a B of its own.
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
class DpoConfig:
    """DPO on preference pairs, in place of the next token's cross entropy."""

    __pydantic_config__: ClassVar = STRICT

    # How far the policy may go from the reference: rewards are beta times the difference of log-probs.
    beta: float = 0.1
    # A checkpoint of the reference's weights, as `moefold dpo` writes it. None: the model without its adapters.
    reference: str | None = None
