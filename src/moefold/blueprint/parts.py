"""Which parts of a model a pipeline rank holds: those that its stages need.

A part that several stages use, on different ranks, is held by each of them: the embedding, which also serves the
modules that look ahead and, where it is tied, the head. Such copies start equal, their gradients are added up, and so
they stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moefold.blueprint.stages import StageSpec
from moefold.config.model import ModelConfig


@dataclass(frozen=True)
class Parts:
    embedding: bool
    layers: tuple[int, ...]
    mtp: tuple[int, ...]
    # The final norms and, unless the embedding serves as it, the head.
    loss: bool

    def holds(self, name: str) -> bool:
        """Whether the parameter or buffer of this name is among them."""
        first, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if first == "layers":
            return int(number) in self.layers
        if first == "mtp":
            return int(number) in self.mtp
        return self.embedding if first == "embedding" else self.loss


def parts_of(stages: Iterable[StageSpec], model: ModelConfig) -> Parts:
    held = tuple(stages)
    loss = any(stage.loss for stage in held)
    looks_ahead = tuple(module for stage in held for module in stage.mtp)
    return Parts(
        embedding=any(stage.embedding for stage in held) or bool(looks_ahead) or (loss and model.tied_embeddings),
        layers=tuple(layer for stage in held for layer in stage.layers),
        mtp=looks_ahead,
        loss=loss,
    )


def whole_model(model: ModelConfig) -> StageSpec:
    """The one stage of a model that is not cut."""
    return StageSpec(0, True, range(model.num_layers), tuple(range(model.num_mtp)), True)
