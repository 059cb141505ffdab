"""The interface between projections and attention itself: a core decides which ranks' keys a token's query meets."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moefold.attention.sdpa import attend
from moefold.nn.batch import Batch


class AttentionCore(Protocol):
    def __call__(
        self,
        q_SHC: Tensor,
        k_SJC: Tensor,
        v_SJU: Tensor,
        batch: Batch,
        *,
        scale: float,
        window: int | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """[S, H, U]: causal attention of each token within its own document."""
        ...


class LocalCore:
    """Whole sequences are on this rank; its heads need no communication."""

    def __call__(
        self,
        q_SHC: Tensor,
        k_SJC: Tensor,
        v_SJU: Tensor,
        batch: Batch,
        *,
        scale: float,
        window: int | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        return attend(q_SHC, k_SJC, v_SJU, batch.lengths, scale, window, sinks_H)
