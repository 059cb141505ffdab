"""What the loop must remember to go on exactly where it stopped; a few numbers, in every checkpoint's manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moefold.errors import CheckpointError


@dataclass(frozen=True)
class TrainState:
    """``samples`` is the whole position in the data: the order of samples is a function of the seed alone."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skips_in_a_row: int = 0
    # Recent losses and norms of accepted steps, which a spike is measured against.
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrainState:
        try:
            return cls(
                step=int(data["step"]),
                samples=int(data["samples"]),
                tokens=int(data["tokens"]),
                skips_in_a_row=int(data["skips_in_a_row"]),
                losses=tuple(map(float, data["losses"])),
                norms=tuple(map(float, data["norms"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the trainer's state is not what this version writes: {error}") from None
