"""Which parts of a model a pipeline rank holds: those that its stages need.

A part that several stages use, on different ranks, is held by each of them: the embedding, which also serves the
MTP modules and, where it is tied, the head; the final norm, which the first such module reads too. Such
copies start equal, their gradients are added up, and so they stay equal.
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
    # The norms of the model's own stream and of each module's, which the loss and the next module both read.
    final_norm: bool
    mtp_norms: tuple[int, ...]
    # The head, unless the embedding serves as it.
    loss: bool

    def holds(self, name: str) -> bool:
        """Whether the parameter or buffer of this name is among them."""
        first, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if first == "layers":
            return int(number) in self.layers
        if first == "mtp":
            return int(number) in self.mtp
        if first == "mtp_norms":
            return int(number) in self.mtp_norms
        return {"embedding": self.embedding, "final_norm": self.final_norm, "head": self.loss}[first]


def parts_of(stages: Iterable[StageSpec], model: ModelConfig) -> Parts:
    held = tuple(stages)
    loss = any(stage.loss for stage in held)
    looks_ahead = tuple(module for stage in held for module in stage.mtp)
    return Parts(
        embedding=any(stage.embedding for stage in held) or bool(looks_ahead) or (loss and model.tied_embeddings),
        layers=tuple(layer for stage in held for layer in stage.layers),
        mtp=looks_ahead,
        final_norm=loss or 0 in looks_ahead,
        mtp_norms=tuple(depth for depth in range(model.num_mtp) if loss or depth + 1 in looks_ahead),
        loss=loss,
    )


def whole_model(model: ModelConfig) -> StageSpec:
    """The one stage of a model that is not cut."""
    return StageSpec(0, True, range(model.num_layers), tuple(range(model.num_mtp)), True)
