"""Statistics of expert load: overloaded experts, dead experts, and how evenly tokens are spread.

`counts` has one row per MoE layer, one entry per expert: its tokens. Load is a count divided by its row's mean, so 1 is
balanced, 0 is dead, and E / top_k is the worst that top-k routing can do. Entropy is that of the row as a distribution,
divided by log E: 1 is balanced, 0 means that one expert gets everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts2D = Sequence[Sequence[int]] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class LayerStats:
    """One MoE layer. `cv` is the standard deviation of the load; `dead` lists experts without a token."""

    max_load: float
    min_load: float
    entropy: float
    cv: float
    dead: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class RouterStats:
    """All MoE layers. The busiest expert of the worst layer determines the time of expert-parallel ranks."""

    layers: tuple[LayerStats, ...]

    @property
    def max_load(self) -> float:
        return max((layer.max_load for layer in self.layers), default=0.0)

    @property
    def mean_max_load(self) -> float:
        return sum(layer.max_load for layer in self.layers) / len(self.layers) if self.layers else 0.0

    @property
    def entropy(self) -> float:
        """Of the least balanced layer."""
        return min((layer.entropy for layer in self.layers), default=0.0)

    @property
    def dead(self) -> int:
        return sum(len(layer.dead) for layer in self.layers)


def router_stats(counts: Counts2D) -> RouterStats:
    counts_ME = np.asarray(counts, dtype=np.float64)
    if counts_ME.ndim != 2 or counts_ME.size == 0:
        return RouterStats(())
    load_ME = relative_load(counts_ME)
    share_ME = load_ME / counts_ME.shape[1]
    # 0 * log 0 is 0.
    logs_ME = np.log(share_ME, out=np.zeros_like(share_ME), where=share_ME > 0)
    entropy_M = -(share_ME * logs_ME).sum(1) / max(np.log(counts_ME.shape[1]), 1e-9)
    return RouterStats(
        tuple(
            LayerStats(
                max_load=float(load_E.max()),
                min_load=float(load_E.min()),
                entropy=float(min(max(entropy, 0.0), 1.0)),
                cv=float(load_E.std()),
                # In a layer without any token nothing is known about its experts.
                dead=tuple(np.flatnonzero(counts_E == 0).tolist()) if counts_E.any() else (),
                tokens=int(counts_E.sum()),
            )
            for load_E, entropy, counts_E in zip(load_ME, entropy_M, counts_ME)
        )
    )


def relative_load(counts_ME: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Counts divided by their row's mean; a row of zeros stays zero."""
    mean_M1 = counts_ME.mean(axis=-1, keepdims=True)
    return np.divide(counts_ME, mean_M1, out=np.zeros_like(counts_ME), where=mean_M1 > 0)
