"""How many tokens a step sees, and in which pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.strict import STRICT


@dataclass(frozen=True)
class DataConfig:
    """A step's global batch is cut into microbatches of `micro_batch` whole sequences, whatever the layout."""

    __pydantic_config__: ClassVar = STRICT

    seq_len: int = 64
    global_batch: int = 8
    micro_batch: int = 1
