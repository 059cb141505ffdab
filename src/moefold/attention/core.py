"""The seam between projections and attention itself: who holds which tokens' keys is the core's business.

T tokens on this rank, H query heads, G key/value heads, d query and key entries, v value entries.
"""

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
        """[S, H, U]: what each token reads from the tokens before it in its own sequence."""
        ...


class LocalCore:
    """Whole sequences are here: the heads of this rank need nobody else."""

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
